"""Other libraries' optimizers on 16-bit weights: they step float32 copies, which are then rounded."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.random_words import Role
from halfstep_torch.distributed.shards import refuse_shards
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.float32_copies import Float32Copies
from halfstep_torch.engine.for_each import for_each
from halfstep_torch.engine.plan import Stream
from halfstep_torch.engine.step_numbers import KeysAhead
from halfstep_torch.leaves.checks import check_grad, check_weight
from halfstep_torch.leaves.found_names import with_names_found
from halfstep_torch.leaves.group_names import (
    Group,
    StateDict,
    check_names,
    count_nameless,
    nameless_seeds,
    parameter_names,
    settle_empty_groups,
    with_names,
)
from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.optimizer_state.form import SavedState, check_form

_FUNCTION = "round_weights"
_SEED, _COUNT = "round_seed", "round_step"
_OURS = ("params", "param_names", _SEED)
# Wrapped optimizers, while what wraps them steps them.
_stepping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_PICKLED = ("_optimizer", "_piece", "_compile", "_members", "_whole")


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

    The optimizer sees float32 copies, and keeps state beside float32 weights. The words are those of
    `round_stochastically`: they depend on the seed, the step, the name and the index alone. float32 weights
    are stepped as they are.

    Rounds each weight once per step. While a piece is stepped, its weights and gradients are in float32: 8
    bytes for each element of the piece, or of the longest parameter. A CPU keeps that memory for the next
    step. On one thread of a CPU a compiled step takes 1.4 to 1.7 times as long as torch's AdamW on float32
    weights, an eager step 1.8 to 2.7 times; of RAdam 1.3 to 1.6 and 1.4 to 2.3 times. The kernel is compiled
    once on a machine. Where it is stored, "auto" steps by it from the first step on.

    Args:
        optimizer: of torch or another library, before its first step. It belongs to the result from here on.
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).
        names: as in `Optimizer`. Without them names are found, as there.
        piece_size: how many elements are stepped together. None: all, for a rule whose step of a parameter
            depends on others (Prodigy, D-Adaptation).
        compile: as in `Optimizer`, of the words and the rounding.

    Returns:
        An optimizer of the same param groups. Schedulers, `zero_grad`, `state_dict` and `load_state_dict` are
        for it.

    Raises:
        TypeError: if it is no optimizer, is one of this package, or needs a closure; if a parameter is a
            DTensor or of a wrong dtype.
        ValueError: if it has state already, or two parameters have one name. From `step`, if a rule looks at
            all parameters, and `piece_size` is not None.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.round_weights(torch.optim.RAdam(model.parameters(), lr=1e-3))
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.float32

    Source: ours; the rounding as `round_stochastically`. Contract W6, R3.
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


class _Member(NamedTuple):
    """A parameter and the float32 copy that the optimizer steps."""

    name: str
    param: Tensor
    copy: Tensor


class _Piece:
    """Members that are stepped together, with float32 copies of the 16-bit ones."""

    def __init__(
        self,
        members: Sequence[_Member],
        seed: int,
        memory: Mapping[torch.dtype, dict[torch.device, list[Tensor]]],
    ):
        self.members, self._stays = members, _on_cpu(members)
        self._stream, self._steps = Stream(seed, "", before=False, roles=(Role.PARAM,)), None
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, (_, param, _) in enumerate(members):
            if param.dtype != torch.float32:
                alike.setdefault((param.device, param.dtype), []).append(i)
        self._copies = [
            (places, Float32Copies([members[i].param for i in places], memory[dtype]))
            for (_, dtype), places in alike.items()
        ]

    def fill(self) -> None:
        """Hand the optimizer the copies, and float32 weights themselves."""
        for _, param, copy in self.members:
            if param.dtype == torch.float32:
                copy.data, copy.grad = param.detach(), param.grad
        for places, copies in self._copies:
            copies.fill()
            for i, weight, grad in zip(places, copies.weights, copies.grads, strict=True):
                copy = self.members[i].copy
                if copy.grad is not grad:
                    copy.data, copy.grad = weight, grad

    def round(self, steps: list[int], choice: CompileChoice) -> None:
        """Round the weights from the stepped copies."""
        if self._steps is None or steps != [step + 1 for step in self._steps]:
            self._keys = KeysAhead([self._stream], [member.name for member in self.members])
        keys, self._steps = self._keys.at(steps), steps
        for places, copies in self._copies:
            for i, weight in zip(places, copies.weights, strict=True):
                copy = self.members[i].copy
                if copy.data_ptr() != weight.data_ptr():  # the optimizer has given it other memory
                    weight.copy_(copy.data)
                    copy.data = weight
            copies.round(_FUNCTION, keys[:, places], choice)

    def release(self, alone: bool) -> None:
        """Remove the gradients of the copies, so that the optimizer does not step this piece again.

        Those of a piece that stays, and is alone, are copies, and the next step fills them again.
        """
        for _, param, copy in self.members:
            owned = not self._stays or param.dtype == torch.float32
            if owned or not alone:
                copy.grad = None
            if owned:
                copy.data = copy.data.new_empty(0)


class RoundedWeights(torch.optim.Optimizer):
    """What `round_weights` returns."""

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
        self._hold()
        groups = [dict(group) for group in optimizer.param_groups]
        if given := parameter_names(_FUNCTION, names):
            groups = [{**g, "params": with_names(_FUNCTION, g["params"], given)} for g in groups]
        looked_for = given or names is None  # an empty `names` means none
        super().__init__(
            with_names_found(_FUNCTION, groups) if looked_for else groups, dict(optimizer.defaults)
        )
        self._whole = True
        params = [param for group in self.param_groups for param in group["params"]]
        refuse_shards(_FUNCTION, params, "Use an optimizer of halfstep_torch.")
        check_names(_FUNCTION, self.param_groups)
        if "param_names" in self.param_groups[0]:
            leaves = leaf_names([name for group in self.param_groups for name in group["param_names"]])
        else:
            leaves = [str(i) for i in range(len(params))]
            seed = nameless_seeds([seed], count_nameless([seed]))[0]
        for group in self.param_groups:
            group[_SEED] = seed
        self._members: list[_Member] = []
        for name, param in zip(leaves, params, strict=True):
            check_weight(_FUNCTION, name, param)
            empty = torch.empty(0, dtype=torch.float32, device=param.device)
            self._members.append(_Member(name, param, torch.nn.Parameter(empty)))
        shadows = iter(self._members)
        for group, own in zip(optimizer.param_groups, self.param_groups, strict=True):
            group["params"] = [next(shadows).copy for _ in own["params"]]

    def _hold(self) -> None:
        """Start without memory for copies; from now on the optimizer must not be stepped by itself."""
        self._memory: defaultdict[torch.dtype, dict[torch.device, list[Tensor]]] = defaultdict(dict)
        self._layout: list = []
        self._kept: dict[int, _Piece] = {}
        self._optimizer.register_step_pre_hook(_refuse_own_step)

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
        """Add a group, while the optimizer is built."""
        if self._whole:
            raise TypeError(f"{_FUNCTION}: groups are those of the optimizer. Add them before it is wrapped.")
        settle_empty_groups(self.param_groups, param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    # It returns what `closure` returns.
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: if a scheduler has the optimizer that was wrapped.
        """
        if hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            raise RuntimeError(
                f"{_FUNCTION}: a scheduler was built with the optimizer that was passed, and sets no rate of "
                "what was returned. Build it after round_weights, with what that returned."
            )
        loss = None if closure is None else torch.enable_grad()(closure)()
        entries = [_entries(group) for group in self.param_groups]
        after: list[Group] | None = None
        members = [member for member in self._members if member.param.grad is not None]
        for member in members:
            check_grad(_FUNCTION, member.name, member.param)
        cuts = self._cuts(members)
        for piece in self._pieces(members, cuts):
            for group, own in zip(self._optimizer.param_groups, entries, strict=True):
                group.update(own)
            try:
                self._step_copies(piece, lambda seen=after: self._check_alike(seen))
            finally:
                piece.release(len(cuts) == 1)
            after = [_entries(group) for group in self._optimizer.param_groups]
        for group, own in zip(self.param_groups, after or entries, strict=True):
            group.update(own)
        return loss

    def _pieces(self, members: list[_Member], cuts: list[tuple[int, int]]) -> Iterator[_Piece]:
        """Yield pieces of all members. On a CPU pieces and their memory are kept from step to step."""
        seed = self.param_groups[0][_SEED]
        layout = [seed, *((id(copy), param.dtype, param.device, param.shape) for _, param, copy in members)]
        if layout != self._layout:
            self._forget()
            self._layout = layout
            # The longest first: others step in its memory.
            for start, stop in sorted(
                cuts, key=lambda cut: -sum(m.param.numel() for m in members[slice(*cut)])
            ):
                if _on_cpu(members[start:stop]):
                    self._kept[start] = _Piece(members[start:stop], seed, self._memory)
        for start, stop in cuts:
            yield self._kept.get(start) or _Piece(members[start:stop], seed, self._memory)

    def _forget(self) -> None:
        """Drop the kept pieces and the memory of their copies."""
        self._layout, self._kept = [], {}
        for _, _, copy in self._members:
            copy.data, copy.grad = copy.data.new_empty(0), None

    def _cuts(self, members: list[_Member]) -> list[tuple[int, int]]:
        """Return where each piece of the members starts and stops."""
        cuts, start, size = [], 0, 0
        for i, member in enumerate(members):
            if i > start and self._piece is not None and size + member.param.numel() > self._piece:
                cuts.append((start, i))
                start, size = i, 0
            size += member.param.numel()
        return [*cuts, (start, len(members))] if members else []

    def _step_copies(self, piece: _Piece, check: Callable[[], None]) -> None:
        """Step the copies of a piece by the optimizer, and round the weights from them."""
        piece.fill()
        _stepping.add(self._optimizer)
        try:
            self._optimizer.step()
        finally:
            _stepping.discard(self._optimizer)
        check()
        state = [self.state[member.param] for member in piece.members]
        counts = [kept[_COUNT] if _COUNT in kept else torch.zeros((), dtype=torch.int64) for kept in state]
        for_each("add_", counts, 1)
        for member, count in zip(piece.members, counts, strict=True):
            self.state[member.param] = {**self._optimizer.state[member.copy], _COUNT: count}
        steps = torch.stack(counts).tolist()
        piece.round(steps, self._compile)

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
        """Return the state as torch's optimizers do: that of the optimizer, with counts and the seed."""
        return super().state_dict()

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore what `state_dict` returned, bit for bit; weights are the model's."""
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
        self._optimizer.load_state_dict({"state": rest, "param_groups": inner})
        ids = [i for group in groups for i in group["params"]]
        self.state.clear()
        for i, (_, param, copy) in zip(ids, self._members, strict=True):
            if state.get(i):
                self.state[param] = {
                    **self._optimizer.state[copy],
                    _COUNT: state[i][_COUNT].to("cpu", copy=True),
                }
        for group, own, saved in zip(self._optimizer.param_groups, self.param_groups, groups, strict=True):
            own.update(_entries(group), **{_SEED: saved[_SEED]})


def _refuse_own_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if optimizer not in _stepping:
        raise RuntimeError(
            f"{_FUNCTION}: the optimizer that was passed has no weights any more, and its step would change "
            "none. Step what was returned: optimizer = round_weights(optimizer)."
        )


def _entries(group: Group) -> Group:
    """Return the entries of a group that are the optimizer's own."""
    return {key: value for key, value in group.items() if key not in _OURS}


def _on_cpu(members: Iterable[_Member]) -> bool:
    return all(member.param.device.type == "cpu" for member in members)
