"""The chain of `Muon`: links for matrices, and links of AdamW for the other parameters of a group."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from halfstep.hyperparameters import Arguments, Scalar, Values
from halfstep.rule import Rule
from halfstep.rules.muon import MatrixAxes, OfMatrices
from halfstep.rules.muon_split import MatrixChoice
from halfstep.rules.named import MUON_OF_MATRICES, MUON_OF_THE_REST
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.chain import Chain, chain
from halfstep_torch.links.entries import Entry, entries_of
from halfstep_torch.links.link import Link, ParamInfo, as_link
from halfstep_torch.numbers.hyperparameters import nonnegative
from halfstep_torch.numbers.seeds import LinkSeed
from halfstep_torch.rules.muon_split import AxesOf
from halfstep_torch.rules.named import links_of
from halfstep_torch.weights.weight_storage import with_param_storage

RENAMED = {key: f"adam_{key}" for key in ("eps", "eps_root", "lr", "mu_dtype", "mu_rounding", "weight_decay")}
"""Names of AdamW's entries in a group that also has Muon's entries."""


class MatrixLink(Link):
    """A link of Muon, for the matrices of a param group.

    Attributes:
        inner: the link.
        axes: the axes of matrices, by leaf name.
        of_group: the axes of all matrices in a group with `use_muon=True`.
        use_muon: the group's `use_muon`, or None if `axes` decides.
    """

    inner: Link
    axes: AxesOf
    of_group: MatrixAxes
    use_muon: bool | None

    reads_names = True

    def __post_init__(self) -> None:
        """Copy the declarations of the link."""
        said = ("name", "scope", "seed", "needs_finite")
        vars(self).update({key: getattr(self.inner, key) for key in said})

    @property
    def rule(self) -> Rule:
        """The rule of the link."""
        return self.inner.rule

    def with_seed(self, seed: LinkSeed) -> Link:
        """Return the same link with other random words."""
        return dataclasses.replace(self, inner=self.inner.with_seed(seed))

    def bind(self, caller: str, h: Values, info: ParamInfo) -> BoundRule | None:
        """Bind the rule to a matrix, by its axes."""
        axes = self.axes_of(info.name)
        if axes is None:
            return None
        rule, inner = self.rule, self.inner
        if isinstance(rule, OfMatrices):
            inner = as_link(dataclasses.replace(rule, **axes._asdict()))
        return inner.bind(caller, h, info)

    def bind_key(self, h: Values) -> tuple:
        """Return the values that the rule's `bind` reads."""
        return self.inner.bind_key(h)

    def axes_of(self, name: str) -> MatrixAxes | None:
        """Return the axes of a parameter's matrices, or None if AdamW steps it."""
        if self.use_muon is None:
            return self.axes.get(name)
        return self.of_group if self.use_muon else None


class RestLink(MatrixLink):
    """A link of AdamW, for parameters that Muon does not step.

    Attributes:
        own: its own entries, with their defaults.
        own_rate: a learning rate independent of `lr`, or None if it follows `lr`.
    """

    own: Arguments
    own_rate: Scalar

    @property
    def entry_fields(self) -> Sequence[Entry]:
        """The fields of the rule, renamed so that they differ from Muon's."""
        return _renamed(type(self.rule))

    @property
    def entries(self) -> Group:
        """The entries of the rule except the rate, and its own entries."""
        return {key: x for key, x in super().entries.items() if key != RENAMED["lr"]} | dict(self.own)

    def read(self, caller: str, group: Group) -> Values:
        """Return the values of the fields. Rate and decay follow Muon's unless set for AdamW."""
        decay = group["adam_weight_decay"]
        decay = group["weight_decay"] if decay is None else decay
        return super().read(
            caller, {**group, "adam_lr": self._rate(caller, group), "adam_weight_decay": decay}
        )

    def _rate(self, caller: str, group: Group) -> Scalar:
        lr, ratio = group["lr"], group["adam_lr_ratio"]
        nonnegative(caller, "adam_lr_ratio", ratio, "Use adam_lr / lr.")
        if self.own_rate is not None and self.use_muon is None:
            return self.own_rate
        if ratio == 1:
            return lr
        return Multiple(lr, float(ratio)) if callable(lr) else float(lr) * float(ratio)

    def bind(self, caller: str, h: Values, info: ParamInfo) -> BoundRule | None:
        """Bind the rule to a parameter that Muon does not step."""
        return self.inner.bind(caller, h, info) if self.axes_of(info.name) is None else None


@functools.cache
def _renamed(rule: type[Rule]) -> tuple[Entry, ...]:
    entries = entries_of(rule)
    return tuple(dataclasses.replace(entry, key=RENAMED.get(entry.key, entry.key)) for entry in entries)


@dataclasses.dataclass(frozen=True)
class Multiple:
    """A schedule times a number."""

    rate: Callable[[int], Scalar]
    factor: float

    def __call__(self, count: int) -> float:
        """Return the product for a step after `count` steps."""
        return float(self.rate(count)) * self.factor


@dataclasses.dataclass
class MuonChain:
    """A function that makes the chain of a `Muon` param group from its options.

    Attributes:
        caller: the name in messages.
        given: the arguments, by their JAX names.
        of_factor: the rules of the factor.
        lr: the learning rate for matrices.
        adam_lr: the learning rate for AdamW, or None for `lr`.
        adam_weight_decay: the decay for AdamW, or None for the decay of matrices.
        axes: the axes of the parameters split so far.
        patterns: the argument `matrices`, which also splits later groups.
    """

    caller: str
    given: Arguments
    of_factor: Sequence[Rule]
    lr: Scalar
    adam_lr: Scalar
    adam_weight_decay: Scalar
    axes: AxesOf
    patterns: MatrixChoice

    def __call__(
        self,
        *,
        use_muon: bool | None,
        output_axis: int | tuple[int, ...],
        reduction_axis: int | tuple[int, ...] | None,
        param_storage: str,
        mu_rounding: str,
        adam_mu_rounding: str,
        nu_rounding: str,
    ) -> Chain:
        """Return the chain of a group."""
        rounded = {"mu_rounding": mu_rounding, "adam_mu_rounding": adam_mu_rounding}
        given = {**self.given, **rounded, "nu_rounding": nu_rounding}
        which = self.axes, MatrixAxes(reduction_axis, output_axis), use_muon
        momentum, *others = links_of(MUON_OF_MATRICES, given)
        links: list[Rule] = [MatrixLink(as_link(x), *which) for x in (momentum, *self.of_factor, *others)]
        follows = not callable(self.lr) and not callable(self.adam_lr)
        ratio = self.ratio(self.lr, self.adam_lr) if follows else 1.0
        own = [{}, {"adam_weight_decay": self.adam_weight_decay}, {"adam_lr_ratio": ratio}]
        for rule, entries in zip(links_of(MUON_OF_THE_REST, given), own, strict=True):
            links.append(RestLink(as_link(rule), *which, entries, None if follows else self.adam_lr))
        return with_param_storage(self.caller, chain(*links), param_storage, given["seed"])

    def ratio(self, lr: Scalar, adam_lr: Scalar) -> float:
        """Return the rate of AdamW over that of matrices."""
        if adam_lr is None:
            return 1.0
        over, under = nonnegative(self.caller, "adam_lr", adam_lr), nonnegative(self.caller, "lr", lr)
        if over == under:
            return 1.0
        if not under:
            raise ValueError(
                f"{self.caller}: adam_lr={adam_lr!r} beside lr=0 has no ratio to it, and schedulers keep the "
                "ratio. Give lr the largest rate of the run, and let a scheduler begin at 0."
            )
        return float(adam_lr) / float(lr)

    def completed(self, group: Mapping) -> Group:
        """Return a new param group, completed with the entries of AdamW."""
        group = dict(group)
        if group.get("use_muon") is False:
            for key, renamed in RENAMED.items():
                if key in ("eps", "eps_root", "mu_dtype", "mu_rounding") and key in group:
                    group.setdefault(renamed, group.pop(key))
            group.setdefault("lr", self.lr if self.adam_lr is None else self.adam_lr)
            group.setdefault("adam_lr_ratio", 1.0)
        if "adam_lr" in group:
            group["adam_lr_ratio"] = self.ratio(group.get("lr", self.lr), group.pop("adam_lr"))
        if "weight_decay" in group:
            group.setdefault("adam_weight_decay", None)
        return group
