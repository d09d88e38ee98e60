"""How the moments of an optimizer fare: whether they can shrink, are zero, and are kept as was asked for."""

import dataclasses
from collections import defaultdict

import torch
from torch import Tensor

from halfstep_torch.description import describe
from halfstep_torch.engine.optimizer import Optimizer
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.trial_steps import NARROW, copy_of, is_moment, take_step


@dataclasses.dataclass(frozen=True)
class MomentDiagnosis:
    """How one kind of moment fares.

    Attributes:
        dtypes: how many elements are kept in each dtype.
        frozen: share of them that cannot shrink: one step without a gradient takes nothing off them. (Of
            codes with scales nothing is said.)
        zero: of a second moment, the share that is zero where the first one is not.
        not_as_asked: share of them that is kept otherwise than was asked for: of an optimizer of this
            package, not in its format; of another, not in the dtype that its fresh state has.
        why: it is; "" where it is not.
    """

    dtypes: dict[str, int]
    frozen: float
    zero: float = 0.0
    not_as_asked: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        kinds = ", ".join(self.dtypes)
        asked = f"not as asked {self.not_as_asked:.1%}"
        return f"{kinds}; frozen {self.frozen:.1%}; zero {self.zero:.1%}; {asked}"


def diagnose_moments(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, MomentDiagnosis]:
    """Return how the moments fare, by key: rates show in what a step without a gradient leaves of them.

    Args:
        optimizer: of this package or not.
        params: of the optimizer, with gradients.
    """
    params = [p for p in params if optimizer.state.get(p)]
    asked: set[tuple[Tensor, str]] = set()

    def state(p: Tensor, key: str, x: Tensor) -> Tensor:
        if x.dtype not in NARROW or not is_moment(p, key, x):
            return x
        asked.add((p, key))
        # The next number above 1: there the gap below is the largest share of the number.
        return torch.full_like(x, 1 + torch.finfo(x.dtype).eps)

    alone, copies = copy_of(optimizer, params, torch.zeros_like, torch.zeros_like, state)
    take_step(alone)
    others = _kept_otherwise(optimizer, params)
    fates: dict[str, _Fate] = defaultdict(_Fate)
    for i, group in enumerate(optimizer.param_groups):
        for p in (p for p in group["params"] if p in copies):
            kept, left = optimizer.state[p], alone.state[copies[p]]
            for key, x in kept.items():
                if not is_moment(p, key, x):
                    continue
                fates[key].dtypes[dtype_name(x.dtype)] += x.numel()
                if (p, key) in others:
                    fates[key].otherwise[others[p, key]] += x.numel()
                if (p, key) in asked:
                    shrinks = bool((left[key] != 1 + torch.finfo(x.dtype).eps).any())
                    fates[key].note(i, x.numel(), shrinks)
            first, second = kept.get("exp_avg"), kept.get("exp_avg_sq")
            if is_moment(p, "", first) and is_moment(p, "", second) and first.is_floating_point():
                fates["exp_avg_sq"].zero += int(((second == 0) & (first != 0)).sum())
    return {key: fate.diagnosis for key, fate in fates.items()}


def _kept_otherwise(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[tuple[Tensor, str], str]:
    """Return why, of each moment that is not kept as was asked for, by parameter and key."""
    if isinstance(optimizer, Optimizer):
        leaves = zip(describe(optimizer).leaves, optimizer.plans(), strict=True)
        return {
            (param, key): one.why
            for leaf, (_, param, _) in leaves
            for key, one in leaf.moments.items()
            if one.why
        }
    alone, copies = copy_of(optimizer, params, torch.clone, torch.clone, None)
    take_step(alone)
    found = {}
    for p, fresh in ((p, alone.state[copy]) for p, copy in copies.items()):
        for key, x in optimizer.state[p].items():
            if is_moment(p, key, x) and is_moment(p, key, fresh.get(key)) and fresh[key].dtype != x.dtype:
                found[p, key] = f"it is {dtype_name(x.dtype)}, and {dtype_name(fresh[key].dtype)} where fresh"
    return found


class _Fate:
    """What is known of one kind of moment."""

    def __init__(self):
        self.dtypes: dict[str, int] = defaultdict(int)
        self.otherwise: dict[str, int] = defaultdict(int)
        self.zero = 0
        # A group has one rate. Of few elements that are rounded stochastically, none may happen to shrink.
        self._sizes: dict[int, int] = defaultdict(int)
        self._shrinks: dict[int, bool] = defaultdict(bool)

    def note(self, group: int, size: int, shrinks: bool) -> None:
        """Note of an array of a group whether any element has shrunk."""
        self._sizes[group] += size
        self._shrinks[group] |= shrinks

    @property
    def diagnosis(self) -> MomentDiagnosis:
        """What is told of it."""
        total = max(sum(self.dtypes.values()), 1)
        frozen = sum(size for group, size in self._sizes.items() if not self._shrinks[group])
        otherwise = sum(self.otherwise.values()) / total
        why = max(self.otherwise, key=self.otherwise.__getitem__, default="")
        return MomentDiagnosis(dict(self.dtypes), frozen / total, self.zero / total, otherwise, why)
