"""A chain of transforms as a `torch.optim.Optimizer`."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.agreement import Attempt
from halfstep_torch.distributed.replicas import check_replicas
from halfstep_torch.distributed.shards import check_not_replaced
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.loss_scale import is_skipped, scale_of
from halfstep_torch.engine.planned_optimizer import PlannedOptimizer
from halfstep_torch.engine.row_plan import RowSizes
from halfstep_torch.engine.signals import SignalsWait
from halfstep_torch.engine.step_warnings import (
    warn_at_ends,
    warn_at_first_step,
    warn_of_missing_links,
    warn_of_no_gradient,
    warn_of_range,
)
from halfstep_torch.launch import Launch, Named
from halfstep_torch.leaves import has_memory, parameters_by_leaf
from halfstep_torch.saved_state import load, with_headers
from halfstep_torch.sharded.agreement import Agreement
from halfstep_torch.sharded.exchange import meshes_of


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


class Optimizer(PlannedOptimizer):
    """A `torch.optim` optimizer that applies a chain of transforms.

    At each step every gradient goes through the links of the chain, in float32, and the weight becomes
    nearest(p + u) in its own dtype. Parameters without a gradient stay. Each link documents where it rounds.
    Weights and state are changed in place. Gradients, state and numbers of all parameters are checked, and
    kernels compiled, before any weight changes. From then on handlers of signals wait, as that of Ctrl-C,
    until the step is whole; a second signal of a kind does not wait. A later failure (no memory left, a
    user's own rule) leaves some parameters stepped and counted, and others not. Of those that are stepped
    together, of one group, dtype and device, some may be stepped and not counted.

    The links' numbers are entries of the param groups (`lr`, `betas`, `eps`, `weight_decay`, `mu_dtype`,
    ...): a group's own value wins, and lr schedulers may write them. So do `param_storage` and the roundings
    of the named classes: exact weights for norms and embeddings are a group with `param_storage="split16"`.
    The state of a parameter is a flat dict. It has `step`, an int64 0-d tensor, and the arrays of the links
    (`exp_avg`, `exp_avg_sq`), row-major, in their own dtypes. `load_state_dict` keeps every bit of them.

    Random words depend on (seed, step, name, element) alone: pass named parameters
    (`model.named_parameters()`); reordering, freezing or resuming then changes no bit. Without names, a
    parameter's index over all groups is its name. torch's own generators are not used.

    Args:
        params: parameters, pairs (name, parameter), or dicts of groups with their own values of the entries.
            float32, bfloat16 or float16.
        tx: a transform, or a `chain` of them.
        maximize: ascend.
        compile: whether steps run as torch.compile'd kernels. True; False; or "auto": on CUDA devices; on a
            CPU from the first step on where an earlier process has stored its kernels; else with a C++
            compiler, after 300 million stepped weights. That is the first step of a large model, or step 300
            of a million weights. The bits are the same.
        names: pairs (name, parameter) of the whole model, for wrappers that hand over parameters without
            names, or a share of them. Empty: names are not looked for either, and words follow the order.
        state_device: "cpu" keeps state on the host. A step brings it to the device of its weights in two
            pieces of 16 million elements. They are the two longest parameters where a norm is measured or
            rows are no whole blocks. The bits are the same. State of a shard whose step exchanges words stays
            with its weights. On CUDA this is unproven until `make gpu` has run. None: state is where its
            weights are.

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

    _half_loaded = False
    """Whether groups and state are of two runs: `load_state_dict` began to change them and did not end."""

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
            RuntimeError: at the first step, if a replica in another process has another seed or count of
                steps. Also at every step after a `load_state_dict` that failed while it copied, until one
                succeeds. Nothing is changed here.
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
        grad_mode = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(False)
            # Inside a compiled training step this is a graph break: Dynamo must not trace NumPy on the host.
            # A decorator would do, and import Dynamo together with this package.
            torch.compiler.disable(self._step)()  # pyright: ignore[reportCallIssue]
        finally:
            # Twice: the handler of a signal may raise in the first. `torch.no_grad` would leave them off.
            try:
                torch.set_grad_enabled(grad_mode)
            finally:
                torch.set_grad_enabled(grad_mode)
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
            self._alone = {member: (i, name, member) for i, name, member in self._named()}
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
        self.step_alone([self._alone[param]], param)

    @functools.cached_property
    def _alone(self) -> dict[Tensor, tuple[int, str, Tensor]]:
        """Of each parameter that is stepped alone its place and name."""
        return {}

    def _step(self) -> None:
        if not is_skipped(self):
            self.step_alone()

    def _may_make_state(self) -> bool:
        """Whether this may be the step by which torch.distributed.checkpoint makes state.

        It is if all gradients are 0, too. Such a step would change no weight; it is none, and is not counted.
        """
        if self.state:
            return False
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        rates = [group.get("lr") for group in self.param_groups]
        at_zero = all(rate is not None and float(rate) == 0 for rate in rates)
        return at_zero and all(param.grad is not None for param in params)

    def check_steps(self) -> None:
        """Raise RuntimeError unless a step can go on from the state that is here."""
        self.check_loaded()

    def check_loaded(self) -> None:
        """Raise RuntimeError if the last `load_state_dict` failed while it copied."""
        if self._half_loaded:
            raise RuntimeError(
                f"{self._name}: the last load_state_dict failed while it copied, so groups and state are of "
                "two runs. Free memory and load the state dict again, or build a new optimizer."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, each group with an entry that says what it belongs to.

        That entry, `halfstep`, holds the spec version, the links of the chain, and their seeds. It also holds
        the leaf names of the parameters, and the distinct counts of their steps. All of it loads with
        `torch.load(weights_only=True)`. State arrays are not copied. Arrays of a dtype that checkpointers
        cannot gather (int16, 8-bit floats) are shown as their bytes, uint8.

        Raises:
            RuntimeError: if the last `load_state_dict` failed while it copied.
        """
        self.check_loaded()
        return with_headers(self, super().state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore from a state dict, bit for bit.

        Numbers of the param groups and the seeds are taken from the state dict; state arrays are copied.
        Parameters are matched by name within their group or, where either side has no names, by their place.
        Random words then follow the names of this optimizer. State of a parameter that is a DTensor becomes
        DTensors, from arrays that are sharded in any way, or whole in every process.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            TypeError: if it is not a state dict.
            ValueError: if it is of another chain, spec version, names, shapes or formats, or an array has no
                memory here ("meta") or is sparse. Nothing is changed.

        Old arrays are freed before new ones are made. If copying fails after the checks (no memory left, an
        interrupt), part of the state is lost. `step` and `state_dict` then raise RuntimeError until a state
        dict is loaded.
        """
        load(self, state_dict)

    @_undisturbed
    def step_alone(
        self, parameters: Named | None = None, at: Any = None, sizes: RowSizes | None = None
    ) -> None:
        """Step some of the parameters, those with a gradient: by the launch of the last step, if it holds.

        Args:
            parameters: the index of their group, leaf name, parameter; None for all.
            at: under which the launch of these parameters is kept.
            sizes: of rows; by default the fastest.
        """
        self.check_steps()
        if parameters is None:
            listed = [param for group in self.param_groups for param in group["params"]]
        else:
            listed = [param for _, _, param in parameters]
        may_make_state = parameters is None and self._may_make_state()
        launch = self._launches.get(at)
        if launch is not None and not launch.holds(listed, self):
            launch = None
        agreement = self._agreement
        agreement.begin(meshes_of(listed) if launch is None else launch.meshes, len(listed) > 1)
        with Attempt() as attempt:
            if launch is None or not launch.renew(self, scale_of(self)):
                named = list(self._named()) if parameters is None else parameters
                launch = (
                    self._launches.pop(at, None) and None
                )  # its memory goes before new memory is asked for
                launch = self._launches[at] = Launch(self, named)
                self._warn_of_nothing(launch, named)
        agreement.agree_on(attempt.error, launch)
        assert launch is not None  # else an error was raised
        if may_make_state and not agreement.any_of(any(map(_moves, [*launch.batches, *launch.on_meta]))):
            return
        try:
            show_rates, measured = [], launch.bring()
            with Attempt() as attempt:
                launch.prepare(self, measured, sizes)
                show_rates = self._rates_of(launch.batches) if launch.has_schedules else []
                self._look_around(launch.batches)
            agreement.agree(attempt.error)
            # Everything that can fail has been tried: from here on, weights change.
            with SignalsWait():
                launch.run()
                for show_rate in show_rates:
                    show_rate()
            launch.keep(self)
        finally:
            launch.forget()

    def _warn_of_nothing(self, launch: Launch, named: Named) -> None:
        """Say why nothing moves, where no parameter has ever had a gradient."""
        if not (launch.batches or launch.on_meta or self.state):
            check_not_replaced(self._name, {name: p for _, name, p in named}, parameters_by_leaf)
            self._idle_steps += bool(named)
            warn_of_no_gradient(self._name, self._idle_steps)

    def _rates_of(self, batches: Sequence[Batch]) -> list[Callable[[], None]]:
        """Return what shows, after a step, the rates of groups whose lr is a function of it."""
        scheduled = [batch for batch in batches if batch.group.choices.schedule is not None]
        return self.shown_rates([(batch.group.index, max(batch.numbers)) for batch in scheduled])

    def shown_rates(self, steps: Iterable[tuple[int, int]]) -> list[Callable[[], None]]:
        """Return what shows the learning rates of a step in the groups whose lr is a function of it."""
        oldest: dict[int, int] = {}
        for i, step in steps:
            oldest[i] = max(oldest.get(i, 0), step)
        return [self._choices[i].show(self._name, i, self.param_groups[i], oldest[i]) for i in oldest]

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
    def _launches(self) -> dict[Any, Launch]:
        """The last step of all parameters, by None, and of each that is stepped alone."""
        return {}

    @functools.cached_property
    def _agreement(self) -> Agreement:
        return Agreement(self._name)

    @functools.cached_property
    def _arenas(self) -> dict | None:
        """Memory through which the state of each device passes; None where it is beside the weights."""
        return {} if self._state_on_host else None


def _moves(batch: Batch) -> bool:
    """Whether a gradient of a batch is not 0."""
    return any(not has_memory(slot.param) or bool(slot.grad.any()) for slot in batch.slots)


def check_optimizer(caller: str, optimizer: Any) -> None:
    """Raise TypeError for an optimizer of another package."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{caller}: optimizer is {type(optimizer).__name__}. Pass a halfstep_torch optimizer."
        )
