"""A chain of transforms as a `torch.optim.Optimizer`."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.replicas import check_replicas
from halfstep_torch.distributed.shards import check_not_replaced, is_sharded
from halfstep_torch.engine.batches import (
    Batch,
    LastStep,
    attach_keys,
    attach_numbers,
    attach_row_plans,
    check_finite,
    make_batches,
    measure,
)
from halfstep_torch.engine.compiled_stage import compile_batch, is_at_hand
from halfstep_torch.engine.launch import Launch
from halfstep_torch.engine.loss_scale import is_skipped, scale_of
from halfstep_torch.engine.row_plan import RowSizes
from halfstep_torch.engine.signals import SignalsWait
from halfstep_torch.engine.slots import count
from halfstep_torch.engine.step_warnings import (
    warn_at_ends,
    warn_at_first_step,
    warn_of_missing_links,
    warn_of_no_gradient,
    warn_of_range,
)
from halfstep_torch.engine.whole_step import WholeStep
from halfstep_torch.leaves import has_memory, parameters_by_leaf
from halfstep_torch.saved_optimizer import SavedOptimizer
from halfstep_torch.sharded.step import ShardedStep
from halfstep_torch.streamed_state import StreamedStep


def _undisturbed(step: Callable[..., None]) -> Callable[..., None]:
    """Let a step have its own dtypes, which a block of `torch.autocast` would cast, and its state to itself.

    Threads that share an optimizer take their steps one after the other.
    """

    @functools.wraps(step)
    def run(self: Any, *args: Any, **options: Any) -> None:
        with vars(self).setdefault("_lock", threading.RLock()):
            enabled = [*filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))]
            if not enabled:
                step(self, *args, **options)
                return
            with contextlib.ExitStack() as blocks:
                for device_type in enabled:
                    blocks.enter_context(torch.autocast(device_type, enabled=False))
                step(self, *args, **options)

    return run


Named = Sequence[tuple[int, str, Tensor]]
_WHOLE = WholeStep()


class Optimizer(SavedOptimizer):
    """A `torch.optim` optimizer that applies a chain of transforms.

    At each step every gradient goes through the links of the chain, in float32, and the weight becomes
    nearest(p + u) in its own dtype. Parameters without a gradient stay. Each link documents where it rounds.
    Weights and state are changed in place. Gradients, state and numbers of all parameters are checked, and
    kernels compiled, before any weight changes. From then on handlers of signals wait, as that of Ctrl-C,
    until the step is whole; a second signal of a kind does not wait. A later failure (no memory left, a
    user's own rule) leaves parameters stepped and counted, and others not; of those that were stepped
    together when it came (of one group, dtype and device) some may be stepped that are not counted.

    The links' numbers are entries of the param groups (`lr`, `betas`, `eps`, `weight_decay`, `mu_dtype`,
    ...): a group's own value wins, and lr schedulers may write them. So do `param_storage` and the roundings
    of the named classes: exact weights for norms and embeddings are a group with `param_storage="split16"`.
    The state of a parameter is a flat dict. It has `step`, an int64 0-d tensor, and the arrays of the links
    (`exp_avg`, `exp_avg_sq`), row-major, in their own dtypes. `load_state_dict` keeps every bit of them.

    Random words depend on (seed, step, name, element) alone: pass named parameters
    (`model.named_parameters()`); reordering, freezing or resuming then changes no bit.
    Without names, a parameter's index over all groups stands for its name. torch's own generators are not
    used.

    Args:
        params: parameters, pairs (name, parameter), or dicts of groups with their own values of the entries.
            float32, bfloat16 or float16.
        tx: a transform, or a `chain` of them.
        maximize: ascend.
        compile: whether steps run as torch.compile'd kernels. True; False; or "auto": on CUDA devices; on a
            CPU from the first step on where an earlier process has stored its kernels; else with a C++
            compiler, once eager steps have cost about as much as compiling, that is after 300 million
            weights stepped: the first step of a large model, step 300 of a million weights. The bits are
            the same.
        names: pairs (name, parameter) of the whole model, for wrappers that hand over parameters without
            names, or a share of them.
        state_device: "cpu" keeps state on the host, and brings it to the device of its weights piece by piece
            while a step runs: two pieces of 16 million elements, or the two longest parameters where a norm
            is measured or rows are no whole blocks. The bits are the same. State of a shard whose step
            exchanges words stays with its weights. On CUDA this is unproven until `make gpu` has run. None:
            state is where its weights are.

    Raises:
        TypeError: if an argument, a parameter or a group's value is of a wrong type.
        ValueError: if a value is out of range.
        RuntimeError: if `compile` is True, a parameter is on the CPU, and there is no C++ compiler.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> tx = hs.chain(
        ...     hs.scale_by_adam(b2=0.99),
        ...     hs.add_decayed_weights(0.1),
        ...     hs.scale_by_learning_rate(1e-3),
        ...     hs.round_stochastically(seed=0),
        ... )
        >>> optimizer = hs.Optimizer(model.named_parameters(), tx)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.bfloat16

    Source: contract A6, P1.
    """

    release: Any = None
    """The handle of `release_gradients`, as long as it steps the parameters."""

    _idle_steps = 0
    """So many steps began, and no parameter has had a gradient yet."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler calls `step` with the gradients as they are, and says how they are scaled.

        True for float16 gradients, which it does not unscale itself. For others Lightning would not clip.
        """
        if self.release is not None:
            return True  # which has no gradients left to unscale, and says so
        return any(p.dtype == torch.float16 for group in self.param_groups for p in group["params"])

    def step(self, closure: Callable[[], Any] | None = None, *, zero_grad: bool = False) -> Any:
        """Update every parameter that has a gradient.

        `torch.amp.GradScaler` may call it. Gradients of a scaled loss, also float16 gradients, are unscaled
        in float32. A step in which the scaler found an infinity or a NaN changes nothing.

        Args:
            closure: re-evaluates the model and returns the loss.
            zero_grad: drop the gradients afterwards, as `zero_grad()` does.

        Raises:
            TypeError: if a gradient is sparse or of a wrong dtype, or a group's value of a wrong type.
            ValueError: if a gradient or state array does not fit its parameter, or a group's value is out of
                range. Weights and state are then unchanged.
            RuntimeError: at the first step, if another process steps a replica of the model with another
                seed, or at another step; at every step after a `load_state_dict` that failed while it copied,
                until a state dict is loaded whole. Nothing is changed here.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    f"{self._name}: closure={closure!r} is not a function. "
                    "Use step(), or step(zero_grad=True)."
                )
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            # Inside a compiled training step this is a graph break: Dynamo must not trace NumPy on the host.
            # A decorator would do, and import Dynamo together with this package.
            torch.compiler.disable(self._step)()  # pyright: ignore[reportCallIssue]
        if zero_grad:
            self.zero_grad()
        return loss

    @torch.no_grad()
    def step_parameter(self, param: Tensor, group: Any = None, index: Any = None) -> None:
        """Step one parameter, for trainers that step in backward. Its gradient stays.

        The bits are those of `step`. A parameter without a gradient stays as it is.

        Args:
            param: one of this optimizer's.
            group: its param group, which such trainers pass; not needed.
            index: its place there; not needed.

        Raises:
            ValueError: if the parameter is not this optimizer's, or a link of the chain needs all gradients.
        """
        if param not in self._alone:
            self._alone = {member: ((i, name, member), LastStep()) for i, name, member in self._named()}
            if readers := [link.name for links in self.bound_links() for link, _ in links if link.measures]:
                self._alone = {}
                raise ValueError(
                    f"{self._name}: {readers[0]} needs all gradients before the step, and step_parameter has "
                    "one. Leave it out of the chain, or use step()."
                )
        if param not in self._alone:
            raise ValueError(
                f"{self._name}: step_parameter got a tensor of shape {tuple(param.shape)}, which is none of "
                "its parameters. Pass one of a param group's params, or use add_param_group first."
            )
        entry, last = self._alone[param]
        self.step_alone([entry], last)

    @functools.cached_property
    def _alone(self) -> dict[Tensor, tuple[tuple[int, str, Tensor], LastStep]]:
        """Of each parameter that is stepped alone its place and name, and what its last step has left."""
        return {}

    def _step(self) -> None:
        if not is_skipped(self):
            self.step_alone(None, self._last_step)

    def _may_make_state(self) -> bool:
        """Whether this may be the step by which torch.distributed.checkpoint makes state.

        It is if all gradients are 0, too. Such a step would change no weight; it is none, and is not counted.
        """
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        rates = [group.get("lr") for group in self.param_groups]
        return (
            not self.state
            and all(rate is not None and float(rate) == 0 for rate in rates)
            and all(param.grad is not None for param in params)
        )

    def check_steps(self) -> None:
        """Raise RuntimeError unless a step can go on from the state that is here."""
        self.check_loaded()

    @_undisturbed
    def step_alone(self, parameters: Named | None, last: LastStep, sizes: RowSizes | None = None) -> None:
        """Step some of the parameters, those with a gradient: by the launch of the last step, if it holds.

        Args:
            parameters: the index of their group, leaf name, parameter; None for all.
            last: what the last step of these parameters has left.
            sizes: of rows; by default the fastest.
        """
        self.check_steps()
        if parameters is None:
            listed = [param for group in self.param_groups for param in group["params"]]
        else:
            listed = [param for _, _, param in parameters]
        launch = last.launch
        if launch is not None and launch.renew(listed, self, scale_of(self)):
            self._run(_WHOLE, launch.batches, last)
            return
        last.launch = None
        may_make_state = parameters is None and self._may_make_state()
        self._build(list(self._named()) if parameters is None else parameters, last, sizes, may_make_state)

    def _build(self, named: Named, last: LastStep, sizes: RowSizes | None, may_make_state: bool) -> None:
        """Build the step of parameters, and run it; not if it may make state, and would move nothing."""
        all_batches: list[Batch] = []
        params = [param for _, _, param in named]
        how = self._how(params)
        with how.agreed_batches(params, all_batches):
            all_batches += make_batches(named, self._group, self.state, last, how.slots_of)
            attach_keys(all_batches)
            if not all_batches and not self.state:
                check_not_replaced(self._name, {name: p for _, name, p in named}, parameters_by_leaf)
                self._idle_steps += bool(named)
                warn_of_no_gradient(self._name, self._idle_steps)
        if may_make_state and not how.any_of(any(_moves(batch) for batch in all_batches)):
            return
        # On the meta device only state is made.
        batches = [batch for batch in all_batches if has_memory(batch.slots[0].param)]
        with how.exchanged(batches):
            self._run(how, batches, last, functools.partial(self._attach, batches, last, sizes))
            if how is _WHOLE and 0 < len(batches) == len(all_batches):
                last.launch = Launch(params, self.state, self.param_groups, batches, self._compile)
        count([slot for batch in all_batches for slot in batch.slots if not has_memory(slot.owner)])

    def _attach(self, batches: Sequence[Batch], last: LastStep, sizes: RowSizes | None) -> None:
        """Compile what is to be compiled, and give batches their rows."""
        self._compile_all(batches)
        attach_row_plans(batches, last, sizes)

    def _run(
        self,
        how: WholeStep,
        batches: Sequence[Batch],
        last: LastStep,
        attach: Callable[[], None] | None = None,
    ) -> None:
        """Give batches the numbers of a step, and step them."""
        show_rates, measured = [], measure(batches)
        with how.agreed():
            check_finite(self._name, batches)
            attach_numbers(batches, measured, last)
            attach_keys(batches) if attach is None else attach()
            scheduled = [batch for batch in batches if batch.group.choices.schedule is not None]
            show_rates = self._shown_rates([(batch.group.index, max(batch.numbers)) for batch in scheduled])
            self._look_around(batches)
        # Everything that can fail has been tried: from here on, weights change.
        with SignalsWait():
            how.run(batches)
            for show_rate in show_rates:
                show_rate()

    def _how(self, params: Iterable[Tensor]) -> WholeStep:
        """Return how parameters are stepped."""
        if self._state_on_host:
            return self._streamed_step
        return self._sharded_step if any(map(is_sharded, params)) else _WHOLE

    def _compile_all(self, batches: Iterable[Batch]) -> None:
        """Compile what is to be compiled."""
        for batch in batches:
            elements = sum(slot.param.numel() for slot in batch.slots)
            compile_stages = functools.partial(compile_batch, batch)
            at_hand = functools.partial(is_at_hand, batch)
            self._compile.prepare(self._name, batch.device, elements, compile_stages, at_hand)

    def _look_around(self, batches: Sequence[Batch]) -> None:
        """Say what the user should know, most of it at the first step; there compare replicas, too."""
        if self._compared and not {step % 100 for batch in batches for step in batch.numbers} & {0, 1}:
            return
        first = [batch for batch in batches if 1 in batch.numbers]
        nameless = sum(len(group["params"]) for group in self.param_groups if "param_names" not in group)
        if first:
            warn_at_first_step(self._name, first, nameless, self.nameless_before or 0)
            warn_of_missing_links(self._name, first)
        warn_of_range(self._name, batches)
        warn_at_ends(self._name, batches)
        if not self._compared:
            slots = [slot for batch in batches for slot in batch.slots if slot.param is slot.owner]
            seeds = [[link.seed for link in choices.chain.links] for choices in self._choices]
            check_replicas(self._name, slots, seeds)
            self._compared = True

    @functools.cached_property
    def _streamed_step(self) -> StreamedStep:
        return StreamedStep(self._name)

    @functools.cached_property
    def _sharded_step(self) -> ShardedStep:
        return ShardedStep(self._name)


def _moves(batch: Batch) -> bool:
    """Whether a gradient of a batch is not 0."""
    return any(not has_memory(slot.param) or bool(slot.grad.any()) for slot in batch.slots)


def check_optimizer(caller: str, optimizer: Any) -> None:
    """Raise TypeError for an optimizer of another package."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{caller}: optimizer is {type(optimizer).__name__}. Pass a halfstep_torch optimizer."
        )
