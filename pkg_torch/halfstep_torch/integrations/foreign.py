"""Other libraries' optimizers on 16-bit weights: they step float32 copies, which are then rounded."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.distributed.shards import refuse_shards
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.loss_scale import is_skipped, scale_of
from halfstep_torch.integrations.rounded_pieces import Member, Piece, cuts_of, on_cpu
from halfstep_torch.integrations.wrapped_step import refuse_own_step, step_below_hooks
from halfstep_torch.leaves.checks import check_count, check_grad, check_weight
from halfstep_torch.leaves.found_names import with_names_found
from halfstep_torch.leaves.group_names import (
    Group,
    NamedMembers,
    StateDict,
    check_named,
    check_names,
    count_nameless,
    nameless_seeds,
    parameter_names,
    settle_empty_groups,
    with_names,
)
from halfstep_torch.leaves.memory import check_memory, has_memory
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.optimizer_state.form import SavedState, check_form

_FUNCTION = "round_weights"
_SEED, _COUNT = "round_seed", "round_step"
_OURS = ("params", "param_names", _SEED)
_PICKLED = ("_optimizer", "_piece", "_compile", "_copies", "_torn", "_whole")


def round_weights(
    optimizer: torch.optim.Optimizer,
    *,
    seed: Seed = 0,
    names: Iterable | None = None,
    piece_size: int | None = 1 << 24,
    compile: bool | str = "auto",
) -> torch.optim.Optimizer:
    """Make another library's optimizer step 16-bit weights, with stochastic rounding.

        w <- stochastic(step of the optimizer on float32(w), float32(gradient))

    The optimizer steps float32 copies, and its state is as for float32 weights. The random words depend only
    on seed, step, name and index, as in `round_stochastically`. float32 weights are stepped directly.

    Each weight is rounded once per step. While a piece is stepped, its weights and gradients are in float32,
    8 bytes for each element of the piece, or of the longest parameter. A CPU keeps this memory for the next
    step. On one CPU thread a step with a rounding kernel needs 1.2 to 1.9 times the time of torch's AdamW or
    RAdam on float32 weights, and a plain step 1.7 to 3.7 times. The kernel is built once per machine. If it
    is already stored, "auto" uses it from the first step.

    Args:
        optimizer: an optimizer of torch or another library, before its first step. Do not step it afterwards.
        seed: seed of the random words, an integer in [0, 2^64) or two uint32 words (high, low).
        names: as in `Optimizer`. Without them, names are found in the models.
        piece_size: the number of elements stepped together, or None for all, which rules across parameters
            need (Prodigy, D-Adaptation).
        compile: as in `Optimizer`, for the rounding.

    Returns:
        An optimizer with the same param groups. Use it for schedulers, `zero_grad`, `state_dict` and
        `load_state_dict`.

    Raises:
        TypeError: if `optimizer` is not an optimizer, is one of this package, or needs a closure, or if a
            parameter is a DTensor or has a wrong dtype.
        ValueError: if it already has state, or two parameters have the same name. From `step`, if a rule
            reads all parameters and `piece_size` is not None.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.round_weights(torch.optim.RAdam(model.parameters(), lr=1e-3))
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.float32

    Source: ours, with the rounding of `round_stochastically`. Contract W6, R3.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{_FUNCTION}: {type(optimizer).__name__} is no optimizer. Pass a torch.optim one.")
    if isinstance(optimizer, (Optimizer, RoundedWeights, torch.optim.LBFGS)):
        raise TypeError(
            f"{_FUNCTION}: {type(optimizer).__name__} "
            + ("needs a closure." if isinstance(optimizer, torch.optim.LBFGS) else "rounds weights itself.")
            + " Pass another optimizer, such as torch.optim.RAdam(params)."
        )
    if optimizer.state:
        raise ValueError(
            f"{_FUNCTION}: the optimizer has state of steps that it took. Wrap it before its first step, and "
            "load state by load_state_dict of what is returned. torch's Adagrad makes state when it is built."
        )
    if piece_size is not None and (type(piece_size) is not int or piece_size < 1):
        raise ValueError(f"{_FUNCTION}: piece_size={piece_size!r} is no length. Use 2**24, or None for all.")
    choice = CompileChoice(_FUNCTION, compile)
    return RoundedWeights(optimizer, as_seed(_FUNCTION, seed), names, piece_size, choice)


class RoundedWeights(torch.optim.Optimizer):
    """The result of `round_weights`.

    All state is in `state` and `param_groups`, which the wrapped optimizer shares during a step.
    """

    rounds_to_nearest = False
    alternative = (
        "Its state_dict, state and param_groups are those of torch. For the rest use an optimizer of "
        "halfstep_torch, such as AdamW."
    )
    _whole = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        seed: int,
        names: Iterable | None,
        piece_size: int | None,
        choice: CompileChoice,
    ):
        self._optimizer, self._piece, self._compile = optimizer, piece_size, choice
        self._copies: dict[Tensor, torch.nn.Parameter] = {}
        self._torn: list[Tensor] = []
        self._hold()
        groups = [dict(group) for group in optimizer.param_groups]
        if given := parameter_names(_FUNCTION, names):
            groups = [{**g, "params": with_names(_FUNCTION, g["params"], given)} for g in groups]
        looked_for = given or names is None  # an empty `names` means none
        super().__init__(
            with_names_found(_FUNCTION, groups) if looked_for else groups, dict(optimizer.defaults)
        )
        self._whole = True
        if not any("param_names" in group for group in self.param_groups):
            seed = nameless_seeds([seed], count_nameless([seed]))[0]
        for group in self.param_groups:
            group[_SEED] = seed
        self._check(param for group in self.param_groups for param in group["params"])
        self._lend()

    def _check(self, added: Iterable[Tensor]) -> None:
        """Raise TypeError or ValueError for new parameters that cannot be stepped."""
        new = list(added)
        refuse_shards(_FUNCTION, new, "Use an optimizer of halfstep_torch.")
        check_names(_FUNCTION, self.param_groups)
        trained = [(name, p) for _, name, p in self._named() if p.requires_grad or p.grad is not None]
        for name, param in trained:
            if any(param is x for x in new):
                check_weight(_FUNCTION, name, param)
        check_memory(_FUNCTION, trained)

    def _named(self) -> Iterator[tuple[int, str, Tensor]]:
        seed = next((group[_SEED] for group in self.param_groups if _SEED in group), 0)
        for group in self.param_groups:  # including groups added by a library
            for key, value in {**self.defaults, _SEED: seed}.items():
                group.setdefault(key, value)
        return self._names.named(_FUNCTION, self.param_groups, self.state)

    def _lend(self) -> list[Member]:
        """Set the wrapped optimizer's groups, with copies in place of parameters. Return all members."""
        copies: list[list[Tensor]] = [[] for _ in self.param_groups]
        before, members, self._copies = self._copies, [], {}
        for i, name, param in self._named():
            copy = before.get(param)
            if copy is None or copy.device != param.device:
                copy = torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device=param.device))
            self._copies[param] = copy
            copies[i].append(copy)
            members.append(Member(name, param, copy))
        self._optimizer.param_groups[:] = [
            {**_entries(group), "params": listed}
            for group, listed in zip(self.param_groups, copies, strict=True)
        ]
        return members

    def _hold(self) -> None:
        """Start without memory for copies. From now on the wrapped optimizer must not be stepped alone."""
        self._memory: defaultdict[torch.dtype, dict[torch.device, list[Tensor]]] = defaultdict(dict)
        self._layout: list = []
        self._addresses: list[int] = []
        self._kept: dict[int, Piece] = {}
        self._names = NamedMembers()
        self._optimizer.register_step_pre_hook(refuse_own_step)

    def __copy__(self) -> "RoundedWeights":
        raise TypeError(
            f"{_FUNCTION}: a shallow copy, such as diagnose tries steps with, would step the same weights. "
            "Diagnose the optimizer before it is wrapped; copy.deepcopy takes model and optimizer."
        )

    def __getstate__(self) -> StateDict:
        self._forget()
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _PICKLED}}

    def __setstate__(self, state: StateDict) -> None:
        super().__setstate__(state)
        self._hold()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, with its own values of the entries if it has any."""
        if self._whole and any("param_names" in group for group in self.param_groups):
            (param_group,) = with_names_found(_FUNCTION, [param_group])
            check_named(_FUNCTION, param_group)
        settle_empty_groups(self.param_groups, param_group)
        super().add_param_group(param_group)
        if not self._whole:
            return
        group = self.param_groups[-1]
        group[_SEED] = self.param_groups[0][_SEED]
        try:
            self._check(group["params"])
        except BaseException:
            self.param_groups.pop()
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler calls `step` with scaled gradients, because it cannot unscale float16."""
        return any(p.dtype == torch.float16 for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    # It returns the result of `closure`.
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient.

        A `torch.amp.GradScaler` may call it. Gradients of a scaled loss are unscaled in float32.

        Args:
            closure: a function that re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: if a scheduler was built for the wrapped optimizer, or if an earlier step failed
                and left state without its weights.
        """
        if hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            raise RuntimeError(
                f"{_FUNCTION}: a scheduler was built with the optimizer that was passed, and sets no rate of "
                "what was returned. Build it after round_weights, with what that returned."
            )
        self._check_whole()
        loss = None if closure is None else torch.enable_grad()(closure)()
        if is_skipped(self):
            return loss
        entries, scale = [_entries(group) for group in self.param_groups], scale_of(self)
        after: list[Group] | None = None
        members = [member for member in self._lend() if member.param.grad is not None]
        self._check_members(members)
        cuts = cuts_of(members, self._piece)
        for piece in self._pieces(members, cuts):
            for group, own in zip(self._optimizer.param_groups, entries, strict=True):
                group.update(own)
            try:
                self._step_copies(piece, scale, lambda seen=after: self._check_alike(seen))
            finally:
                piece.release(len(cuts) == 1)
            after = [_entries(group) for group in self._optimizer.param_groups]
        for group, own in zip(self.param_groups, after or entries, strict=True):
            group.update(own)
        return loss

    def _check_whole(self) -> None:
        """Raise RuntimeError if a step failed in the middle and its state was not replaced."""
        self._torn = [param for param in self._torn if self.state.get(param)]
        if self._torn:
            raise RuntimeError(
                f"{_FUNCTION}: a step failed after it had begun to change state, and the weights have not "
                "moved. Load a state dict and the model, or clear optimizer.state to start moments again."
            )

    def _check_members(self, members: Sequence[Member]) -> None:
        """Check kinds, gradients, counts and memory of the members."""
        for name, param, _ in members:
            if kept := self.state.get(param):
                check_count(_FUNCTION, name, kept[_COUNT])
            else:
                refuse_shards(_FUNCTION, [param], "Use an optimizer of halfstep_torch.")
                check_weight(_FUNCTION, name, param)
            check_grad(_FUNCTION, name, param)
        addresses = [param.data_ptr() if has_memory(param) else 0 for _, param, _ in members]
        if addresses != self._addresses:
            check_memory(_FUNCTION, ((name, param) for name, param, _ in members))
            self._addresses = addresses

    def _pieces(self, members: list[Member], cuts: list[tuple[int, int]]) -> Iterator[Piece]:
        """Yield pieces of all members. On a CPU pieces and their memory are kept between steps."""
        seed = self.param_groups[0][_SEED]
        layout = [seed, *((id(copy), param.dtype, param.device, param.shape) for _, param, copy in members)]
        if layout != self._layout:
            self._forget()
            self._layout = layout
            # The longest is first, and others use its memory.
            for start, stop in sorted(
                cuts, key=lambda cut: -sum(m.param.numel() for m in members[slice(*cut)])
            ):
                if on_cpu(members[start:stop]):
                    self._kept[start] = Piece(members[start:stop], seed, self._memory)
        for start, stop in cuts:
            yield self._kept.get(start) or Piece(members[start:stop], seed, self._memory)

    def _forget(self) -> None:
        """Drop the kept pieces and the memory of their copies."""
        self._layout, self._kept = [], {}
        for copy in self._copies.values():
            copy.data, copy.grad = copy.data.new_empty(0), None

    def _step_copies(self, piece: Piece, scale: float | None, check: Callable[[], None]) -> None:
        """Step the copies of a piece with the wrapped optimizer, and round the weights from them."""
        piece.fill(scale)
        lent, params = self._optimizer.state, [member.param for member in piece.members]
        kept = [self.state.get(param) or {} for param in params]
        for (_, _, copy), state in zip(piece.members, kept, strict=True):
            if state:
                lent[copy] = {key: x for key, x in state.items() if key != _COUNT}
        self._torn = params
        try:
            step_below_hooks(self._optimizer)
            check()
        finally:
            stepped = [lent.pop(copy, {}) for _, _, copy in piece.members]
        zero = [torch.zeros((), dtype=torch.int64, device="cpu") for _ in params]
        counts = [state.get(_COUNT, none) for state, none in zip(kept, zero, strict=True)]
        for count in counts:
            count.add_(1)
        for param, state, count in zip(params, stepped, counts, strict=True):
            self.state[param] = {**state, _COUNT: count}
        piece.round(_FUNCTION, torch.stack(counts).tolist(), self._compile)
        self._torn = []

    def _check_alike(self, before: list[Group] | None) -> None:
        """Raise ValueError if pieces leave different entries in the groups."""
        for own, group in zip(before or (), self._optimizer.param_groups, strict=False):
            for key, value in _entries(group).items():
                if isinstance(value, (int, float)) and own.get(key) != value:
                    raise ValueError(
                        f"{_FUNCTION}: {key} of a group is {own.get(key)!r} after a piece and {value!r} "
                        "after the next: the rule looks at all parameters. Build it with piece_size=None."
                    )

    def state_dict(self) -> StateDict:
        """Return the wrapped optimizer's state as torch's optimizers do, with counts and the seed.

        Raises:
            RuntimeError: if a step failed in the middle.
        """
        self._check_whole()
        return super().state_dict()

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore a result of `state_dict`, bit for bit. Arrays are copied, and weights do not change."""
        check_form("load_state_dict", state_dict, "Pass what state_dict() of round_weights' result returned.")
        groups, state = state_dict["param_groups"], state_dict["state"]
        stepped = [kept for kept in state.values() if kept]
        if not all(_SEED in group for group in groups) or not all(_COUNT in kept for kept in stepped):
            raise ValueError(
                f"load_state_dict: {_SEED!r} of a group or {_COUNT!r} of a parameter is not there: the state "
                "dict is of the optimizer alone. Pass what state_dict() of round_weights' result returned."
            )
        inner = [{key: x for key, x in group.items() if key not in _OURS[1:]} for group in groups]
        rest = {i: {key: x for key, x in kept.items() if key != _COUNT} for i, kept in state.items()}
        members = self._lend()
        self._optimizer.load_state_dict({"state": rest, "param_groups": inner})
        ids = [i for group in groups for i in group["params"]]
        self.state.clear()
        for i, (_, param, copy) in zip(ids, members, strict=True):
            loaded = self._optimizer.state.pop(copy, {})
            if state.get(i):
                own = {key: x.clone() if isinstance(x, Tensor) else x for key, x in loaded.items()}
                self.state[param] = {**own, _COUNT: state[i][_COUNT].to("cpu", copy=True)}
        for group, own, saved in zip(self._optimizer.param_groups, self.param_groups, groups, strict=True):
            own.update(_entries(group), **{_SEED: saved[_SEED]})
        self._torn = []


def _entries(group: Group) -> Group:
    """Return the wrapped optimizer's own entries of a group."""
    return {key: value for key, value in group.items() if key not in _OURS}
