"""A chain of transforms as a `torch.optim.Optimizer`."""

import copy
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.rule import Rule
from halfstep.rules.named import Named
from halfstep_torch.distributed.agreement import Attempt
from halfstep_torch.engine.ahead import Ahead
from halfstep_torch.engine.batches import Measured
from halfstep_torch.engine.byte_form import pickled, unpickled
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.counts import Counts
from halfstep_torch.engine.group_checks import check_choices, choices_of, read_group, settle_new_group
from halfstep_torch.engine.groups import GroupChoices, ReadGroup, plain_value, rate_of, shown_rates
from halfstep_torch.engine.loss_scale import is_skipped, scale_of
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.scheduler_rates import SchedulerRates, check_scheduler
from halfstep_torch.engine.signals import (
    SignalsWait,
    between_steps,
    call_untraced,
    is_capturing,
    undisturbed,
    unwrapped,
)
from halfstep_torch.engine.step_warnings import warn_of_nothing, warn_of_rates, warn_of_step
from halfstep_torch.launch import Launch, Parameters
from halfstep_torch.leaves.checks import check_params
from halfstep_torch.leaves.found_names import with_names_found
from halfstep_torch.leaves.group_names import (
    Group,
    NamedMembers,
    StateDict,
    parameter_names,
    settle_empty_groups,
)
from halfstep_torch.links.chain import Chain, ChainByOptions, chain
from halfstep_torch.links.group_entries import check_torch_options
from halfstep_torch.links.link import Link
from halfstep_torch.optimizer_state.form import SavedState
from halfstep_torch.optimizer_state.saved_state import load, may_make_state, with_headers
from halfstep_torch.sharded.agreement import Agreement
from halfstep_torch.sharded.exchange import meshes_of
from halfstep_torch.sharded.host_state import state_home

_PARAMS = operator.itemgetter("params")
_PICKLED = ("_tx", "_compile", "_schedule", "_choices", "_home", "_half_loaded", "nameless_before")


class Optimizer(torch.optim.Optimizer):
    """A `torch.optim` optimizer that applies a chain of transforms.

    At each step every gradient goes through the links of the chain, in float32, and the weight becomes
    nearest(p + u) in its own dtype. Parameters without a gradient are skipped. Each link documents where it
    rounds. Weights and state are changed in place. Before any weight changes, the gradients, state and
    numbers of all parameters are checked and kernels are compiled. Signal handlers (Ctrl-C) then wait until
    the step ends, but a second signal of the same kind does not wait. A later failure (no memory left, an
    error in a user's own rule) leaves some parameters stepped and counted, and others not. Parameters with
    one group, dtype and device are stepped together, and some may then be stepped but not counted.

    The hyperparameters of the links are entries of the param groups (`lr`, `betas`, `eps`, `weight_decay`,
    `mu_dtype`, ...). A group may set its own values, and lr schedulers may write them. In the named classes
    `param_storage` and the roundings are entries too, so norms and embeddings get exact weights from a group
    with `param_storage="split16"`. The state of a parameter is a flat dict with `step`, an int64 0-d tensor,
    and the arrays of the links (`exp_avg`, `exp_avg_sq`), row-major, in their own dtypes. `load_state_dict`
    restores all their bits.

    Random words depend only on (seed, step, name, element). With named parameters
    (`model.named_parameters()`), reordering, freezing or resuming changes no bit. Without names, a
    parameter's index over all groups is its name. torch's own generators are not used.

    Args:
        params: parameters, pairs (name, parameter), or dicts of groups with their own values of the entries.
            float32, bfloat16 or float16.
        tx: a transform, or a `chain` of them.
        maximize: ascend.
        compile: whether to step with generated kernels, which give the same bits. "auto" uses a kernel as
            soon as it is built. On a CPU a C compiler builds it in about a second while training continues
            with plain steps, and later processes load it from a folder. On a GPU Triton builds it in the
            first step. True waits for the compiler and raises an error if there is none. False uses plain
            steps.
        names: pairs (name, parameter) for the whole model, for wrappers that pass parameters without names,
            or only some parameters. If empty, names are not searched for, and random words follow the order.
        state_device: "cpu" keeps state on the host, in pinned memory that GPU kernels read and write over the
            bus. The bits are the same. Plain steps copy it in pieces. If the step of a shard exchanges words,
            its state stays with its weights. On CUDA this is unproven until `make gpu` has run. None keeps
            state on the device of its weights.
        capturable: whether a CUDA graph may capture a step. Counts, keys and numbers are then computed on the
            device, by a launch before the step, with the same bits. Hyperparameters that are float32 tensors
            on the device, such as `lr`, are read at each replay. Others keep the value of the capture. Make
            one step outside the graph before the first capture. A group may set its own value.

    Raises:
        TypeError: if an argument, a parameter or a group's value is of a wrong type.
        ValueError: if a value is out of range.
        RuntimeError: if `compile` is True and there is no C compiler, or on a GPU no Triton.

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

    # The links of a named optimizer, and how it decays weights (None if torch's groups have no such entry).
    named: ClassVar[Named | None] = None
    decoupled_decay: ClassVar[bool | None] = None
    # The number of optimizers without names built before with its seeds, or None if parameters have names.
    nameless_before: int | None = None

    release: Any = None  # a ReleasedGradients, of a layer above
    """The handle of `release_gradients`, while it steps the parameters."""

    _idle_steps = 0
    """Steps begun so far in which no parameter had a gradient."""

    _half_loaded: str | None = None  # the call that failed while it copied
    """Name of a load that failed while it copied, so that weights, groups and state are of two runs."""

    def __init__(
        self,
        params: Iterable,
        tx: Chain | Rule | ChainByOptions | None = None,
        *,
        maximize: bool = False,
        compile: bool | Literal["auto"] = "auto",
        names: Iterable | None = None,
        state_device: str | torch.device | None = None,
        capturable: bool = False,
        **others: object,
    ) -> None:
        if tx is None or others:
            problem = f"{next(iter(others))} is no argument" if others else "tx is missing"
            raise TypeError(
                f"{self._name}: {problem}: a chain decides what a step does, and its numbers. Pass "
                "chain(scale_by_adam(), scale_by_learning_rate(1e-3), round_stochastically()), or use AdamW."
            )
        self._tx = tx if isinstance(tx, ChainByOptions) else ChainByOptions(functools.partial(chain, tx), {})
        self._compile = CompileChoice(self._name, compile)
        params = check_params(self._name, params)
        self._given_names = parameter_names(self._name, names) or None
        params = with_names_found(self._name, params) if names is None else params
        self._choices: list[GroupChoices] = []
        self._home = state_home(self._name, state_device)
        self._remember_no_step()
        entries = self._tx.make(**self._tx.options).entries
        entries |= {**self._tx.options, "maximize": maximize}
        entries |= {"capturable": True} if capturable else {}
        self._schedule = entries["lr"] if callable(entries.get("lr")) else None
        if self._schedule is not None:
            entries["lr"] = rate_of(self._name, self._schedule, 0)
        check_torch_options(self._name, {"capturable": capturable})
        super().__init__(params, {key: plain_value(value) for key, value in entries.items()})
        check_choices(self)

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler calls `step` with scaled gradients, and sets `grad_scale`.

        True for float16 gradients, which the scaler cannot unscale. With others Lightning would not clip.
        """
        if self.release is not None:
            return True  # no gradients are left to unscale, and `release` raises an error
        return any(p.dtype == torch.float16 for group in self.param_groups for p in group["params"])

    def step(
        self, closure: Callable[[], Any] | None = None, *, zero_grad: bool = False
    ) -> Any:  # the result of `closure`
        """Update every parameter that has a gradient.

        `torch.amp.GradScaler` may call it. Gradients of a scaled loss, including float16 gradients, are
        unscaled in float32. A step is skipped if the scaler found an infinity or a NaN.

        Args:
            closure: a function that re-evaluates the model and returns the loss.
            zero_grad: whether to set the gradients to None after the step, as `zero_grad()` does.

        Raises:
            TypeError: if a gradient is sparse or has a wrong dtype, or a group's value has a wrong type.
            ValueError: if a gradient or state array does not fit its parameter, or a group's value is out of
                range. Weights and state are then unchanged.
            RuntimeError: at the first step, if a replica in another process has another seed or step count.
                Also at every step after `load_state_dict` failed while it copied, until a load succeeds.
                Weights and state are then unchanged.
        """
        if closure is not None and not callable(closure):
            raise TypeError(
                f"{self._name}: closure={closure!r} is not a function. Use step(), or step(zero_grad=True)."
            )
        loss = None if closure is None else torch.enable_grad()(closure)()
        call_untraced(self._step)
        if zero_grad:
            self.zero_grad()
        return loss

    @torch.no_grad()
    def step_parameter(self, param: Tensor, group: object = None, index: object = None) -> None:
        """Step one parameter, for trainers that step in backward. Its gradient stays.

        The result is bit-identical to `step`. A parameter without a gradient is skipped.

        Args:
            param: a parameter of this optimizer.
            group: its param group, ignored.
            index: its index in the group, ignored.

        Raises:
            ValueError: if this optimizer does not have the parameter, or a link of the chain needs all
                gradients.
        """
        if param not in self._by_param:
            self.check_single_steps(self._name, "and step_parameter has one", "use step()")
            self._by_param = {member: (i, name, member) for i, name, member in self._named()}
        if param not in self._by_param:
            raise ValueError(
                f"{self._name}: step_parameter got a tensor of shape {tuple(param.shape)}, which is none of "
                "its parameters. Pass one of a param group's params, or use add_param_group first."
            )
        self.step_parameters([self._by_param[param]], param)

    def check_single_steps(self, caller: str, why: str, cure: str) -> None:
        """Raise ValueError if a link of a chain needs all gradients before a step."""
        if readers := [link.name for links in self.bound_links() for link, _ in links if link.measures]:
            raise ValueError(
                f"{caller}: {readers[0]} needs all gradients before the step, {why}. "
                f"Leave it out of the chain, or {cure}."
            )

    def _step(self) -> None:
        if getattr(self, "found_inf", None) is not None:
            if is_capturing():
                raise RuntimeError(
                    f"{self._name}: a CUDA graph records this step, and a GradScaler asks the host whether "
                    "to make it. Call step() without the scaler, with bfloat16 or float32 gradients."
                )
            if is_skipped(self):
                return
        self.step_parameters()

    def check_steps(self) -> None:
        """Raise RuntimeError if the state is incomplete after a failed load."""
        if self._half_loaded:
            self.check_loaded()

    def check_loaded(self) -> None:
        """Raise RuntimeError if the last load, or `set_float32_params`, failed while it copied."""
        if self._half_loaded:
            raise RuntimeError(
                f"{self._name}: {self._half_loaded} failed while it copied, so weights, groups and state are "
                "of two runs. Free memory and load again, or build a new optimizer."
            )

    @between_steps
    def state_dict(self) -> StateDict:
        """Return the state as a dict in torch's form, with an entry `halfstep` in each group.

        The entry holds the spec version, the links of the chain and their seeds, the leaf names of the
        parameters, and the distinct counts of their steps. All of it loads with
        `torch.load(weights_only=True)`. State arrays are not copied. If another thread trains, use
        `save_state`, for which steps wait. Arrays with a dtype that checkpointers cannot gather (int16, 8-bit
        floats) are returned as uint8 bytes.

        Raises:
            TypeError: if an array or a number was replaced by one of a type that `load_state_dict` rejects.
            ValueError: if such a replacement has a value that it rejects, or an array was removed.
            RuntimeError: if the last `load_state_dict` failed while it copied.
        """
        self.check_loaded()
        self._check_frozen()
        return with_headers(self, super().state_dict())

    @between_steps
    @torch.no_grad()
    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore from a state dict, bit for bit.

        The numbers of the param groups and the seeds come from the state dict, and state arrays are copied.
        Parameters are matched by name within their group or, if either side has no names, by position. Random
        words then follow the names of this optimizer. The state of a DTensor becomes DTensors. Its saved
        arrays may be sharded in any way, or whole in every process.

        Args:
            state_dict: a result of `state_dict`.

        Raises:
            TypeError: if it is not a state dict.
            ValueError: if its chain, spec version, names, shapes or formats differ, or an array has no memory
                ("meta") or is sparse. Nothing is changed.
            Exception: from a post hook. All of the new state is then set.

        Old arrays are freed before new ones are made. If copying fails after the checks (no memory left, an
        interrupt), part of the state is lost. `step` and `state_dict` then raise RuntimeError until a state
        dict is loaded.
        """
        load(self, state_dict)
        if self._rates is not None:
            self._rates.restart()

    @between_steps
    def read_rates(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Read the coming learning rates of a scheduler, for `param_storage="feedback"` and `"int8"`.

        A copy of the scheduler runs ahead. The result is then bit-identical to `lr` as a function of the
        step. If the scheduler is not stepped once after each step, or `lr` is written otherwise, this is
        logged once, and coming rates are unknown, as without this call. Other weight storages do not depend
        on them. The scheduler is not saved with the state, so call this again after resuming.

        Args:
            scheduler: a scheduler from `torch.optim.lr_scheduler` for this optimizer.

        Raises:
            TypeError: if it is not a scheduler, or its rates depend on a metric.
            ValueError: if it belongs to another optimizer.

        Example:
            >>> import torch, halfstep_torch as hs
            >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
            >>> optimizer = hs.AdamW(model.named_parameters(), 1e-3, param_storage="feedback")
            >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
            >>> optimizer.read_rates(scheduler)

        Source: contract A21.
        """
        caller = f"{self._name}.read_rates"
        self._rates = SchedulerRates(self._name, check_scheduler(caller, scheduler, self))
        self.drop_launches("read_rates was called")

    @undisturbed
    def step_parameters(self, parameters: Parameters | None = None, at: Tensor | None = None) -> None:
        """Step the given parameters that have a gradient, with the last launch if it still holds.

        Args:
            parameters: tuples (group index, leaf name, parameter), or None for all.
            at: the key under which the launch of these parameters is kept.
        """
        self.check_steps()
        capturing = is_capturing()
        if len(self.param_groups) != len(self._choices):
            self._settle_groups()
        if parameters is None:
            listed = [*itertools.chain.from_iterable(map(_PARAMS, self.param_groups))]
        else:
            listed = [param for _, _, param in parameters]
        makes_state = parameters is None and not self.state and may_make_state(self)
        launch = self._launches.get(at)
        holds = launch is not None and launch.holds(listed, self)
        scale = None if getattr(self, "grad_scale", None) is None else scale_of(self)
        if capturing:
            self._check_capture(launch if holds else None)
        if launch is None or not holds or launch.meshes or not launch.renew(self, scale):
            if capturing:
                self._check_capture(None)
            launch = self._agreed_launch(launch, holds, listed, parameters, at)
        if makes_state and not self._agreement.any_of(launch.moves):
            return
        if launch.needs_no_host:
            with SignalsWait():
                launch.run()
            return
        try:
            measured = launch.bring()
            if launch.meshes:
                show_rates = []
                with Attempt() as attempt:
                    show_rates = self._prepare(launch, measured)
                self._agreement.agree(attempt.error)
            else:
                show_rates = self._prepare(launch, measured)
            # Nothing before this line changes weights, and nothing after it is expected to fail.
            with SignalsWait():
                launch.run()
                for show_rate in show_rates:
                    show_rate()
            if launch.is_new:
                launch.keep(self)
        finally:
            launch.forget()

    def _check_capture(self, launch: Launch | None) -> None:
        """Raise RuntimeError unless a CUDA graph may record a step, given its launch if that still holds."""
        if launch is not None:
            launch.check_capture(self)
        elif not any(group.get("capturable") for group in self.param_groups):
            raise RuntimeError(
                f"{self._name}: a CUDA graph records this step, and capturable is False. Build the optimizer "
                "with capturable=True."
            )
        if launch is None or not launch.needs_no_host:
            raise RuntimeError(
                f"{self._name}: a CUDA graph records a step that is not built, or was built for other "
                "parameters, gradients or state. Make the same step outside of the graph before."
            )

    def drop_launches(self, why: str) -> None:
        """Drop built steps for the reason `why`. Replays of captured steps then change nothing."""
        for launch in self._launches.values():
            self._drop(launch, why)
        self._launches.clear()

    def _drop(self, launch: Launch | None, why: str) -> None:
        if launch is not None and launch.captures.captured:
            self._replayed += launch.captures.drop(self._name, why)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zero in place, as replays of a captured step need."""
        self._check_frozen()
        super().zero_grad(set_to_none)

    def _check_frozen(self) -> None:
        """Log group entries that changed after the capture, which replays do not read."""
        for launch in self._launches.values():
            if launch.captures.captured:
                launch.captures.check_frozen(self.param_groups)

    def _agreed_launch(
        self,
        launch: Launch | None,
        holds: bool,
        listed: Sequence[Tensor],
        parameters: Parameters | None,
        at: Tensor | None,
    ) -> Launch:
        """Return the last launch if it `holds`, else extend or rebuild it. Processes of a mesh agree."""
        agreement, made = self._agreement, None
        meshes = launch.meshes if launch is not None and holds else meshes_of(listed)
        agreement.begin(meshes, len(listed) > 1)
        with Attempt() as attempt:
            if launch is not None and holds and launch.renew(self, scale_of(self)):
                made = launch
            else:
                named = list(self._named()) if parameters is None else parameters
                gone = self._launches.pop(at, None)
                if gone is not None and gone.extend(self, named, scale_of(self)):
                    made = gone
                else:
                    self._drop(gone, "parameters, gradients or state changed")
                    made = Launch(self, named)
                self._launches[at] = made
                if not (made.batches or made.on_meta or self.state):
                    warn_of_nothing(self, named)
        agreement.agree_on(attempt.error, made)
        assert made is not None  # else an error was raised
        return made

    def _prepare(self, launch: Launch, measured: Measured) -> list[Callable[[], None]]:
        """Prepare a step and make its checks. Return functions that show its learning rates."""
        launch.prepare(self, measured)
        show_rates = shown_rates(self, launch.counts) if launch.has_schedules else []
        if launch.watches_rates:
            warn_of_rates(self._name, launch.batches)
        warn_of_step(self, launch.batches)
        return show_rates

    def __getstate__(self) -> StateDict:
        fields = {name: getattr(self, name) for name in _PICKLED}
        return {**super().__getstate__(), **fields, **pickled(self.state), "_given_names": None}

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(unpickled(state))
        self.defaults.pop("differentiable", None)  # an entry of torch's own optimizers only
        self._remember_no_step()

    def _remember_no_step(self) -> None:
        """Reset the fields kept between steps, which are never pickled."""
        self._lock, self._agreement = threading.RLock(), Agreement(self._name)
        self._compared: str | None = None
        self._rates: SchedulerRates | None = None
        # The last launch for all parameters, under None, and for each parameter stepped alone.
        self._launches: dict[Tensor | None, Launch] = {}
        self._by_param: dict[Tensor, tuple[int, str, Tensor]] = {}
        self._home = type(self._home)()  # it holds memory of this process
        self._members, self._counts = NamedMembers(), Counts()
        # Tables of dropped steps, which graphs still read.
        self._replayed: list[Ahead] = []

    def __repr__(self) -> str:
        """Return the text of torch's optimizers, without names and headers."""
        lines = [f"{self._name} ("]
        for i, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {i}")
            lines += [f"    {key}: {group[key]}" for key in sorted(self.defaults)]
        return "\n".join([*lines, ")"])

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, with its own values of the entries if it has any.

        `param_group` has `params` and any of the entries (numbers of the links, formats such as `mu_dtype`,
        and in the named classes `param_storage`, roundings and `recipe`). If `lr` is a function of the step,
        the group shows the rate of the last step. Nothing is added if a value has a wrong type (TypeError),
        is out of range, or is unknown (ValueError).
        """
        param_group, choices = choices_of(self, param_group)
        settle_empty_groups(self.param_groups, param_group)
        super().add_param_group(param_group)
        self._choices.append(choices)
        try:
            settle_new_group(self)
        except BaseException:
            self.param_groups.pop()
            self._choices.pop()
            raise
        self.drop_launches("a param group was added")

    def _settle_groups(self) -> None:
        """Read `param_groups` again after groups were inserted or removed there.

        A group that shares a parameter with an earlier group keeps the choices of the earlier group. Other
        groups are added, as by `add_param_group`.
        """
        if len(self.param_groups) == len(self._choices):
            return
        groups, choices, members = list(self.param_groups), list(self._choices), self._members
        places, self._members = members.places(), members.regrouped()
        self.drop_launches("param groups changed")
        self._by_param.clear()
        self.param_groups.clear()
        self._choices.clear()
        try:
            for group in groups:
                place = next((places[param] for param in group["params"] if param in places), None)
                if place is None:
                    self.add_param_group(group)
                else:
                    self.param_groups.append(group)
                    self._choices.append(copy.copy(choices[place]))
        except BaseException:
            self.param_groups[:], self._choices[:], self._members = groups, choices, members
            raise

    def _group(self, index: int, saved: Group | None = None) -> ReadGroup:
        self._settle_groups()
        return read_group(self, index, saved)

    def _named(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (group index, leaf name, parameter) for all parameters (contract W7)."""
        self._settle_groups()
        return self._members.named(self._name, self.param_groups, self.state)

    def plans(self) -> Iterator[tuple[str, Tensor, Plan]]:
        """Yield (leaf name, parameter, plan of its step) for all parameters, with the current groups."""
        group_of = functools.cache(self._group)
        for i, name, param in self._named():
            yield name, param, group_of(i).plan(name, param)

    def bound_links(self) -> list[list[tuple[Link, Values]]]:
        """Return the links of each param group's chain, each link with its values."""
        groups = [self._group(i) for i in range(len(self.param_groups))]
        return [list(zip(group.links, group.values, strict=True)) for group in groups]


def check_optimizer(caller: str, optimizer: object) -> Optimizer:
    """Return the optimizer, without its wrapper. Raise TypeError if it is from another package."""
    optimizer = unwrapped(optimizer)
    if not isinstance(optimizer, Optimizer):
        way_out = getattr(optimizer, "alternative", "Pass a halfstep_torch optimizer.")
        raise TypeError(f"{caller}: optimizer is {type(optimizer).__name__}. {way_out}")
    return optimizer
