"""Diagnosis of a 16-bit run for both packages, with shares of losses, and advice if a share is large.

Each package takes the trial steps itself and counts the losses.
"""

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping
from typing import SupportsInt

from halfstep.text_table import Report, Table

Count = tuple[int, int]
"""Numbers of lost elements and of all elements."""
Ends = tuple[int, int, int]
"""Numbers of elements below a range or at its lower end, above it or at its upper end, and in all."""


@dataclasses.dataclass(frozen=True)
class MomentDiagnosis:
    """The losses in one kind of moment.

    Attributes:
        dtypes: number of elements in each dtype.
        frozen: share of elements that do not shrink in a step without a gradient. (Codes with scales are not
            counted.)
        zero: share of a second moment that is zero while the first moment is not.
        not_as_asked: share that is not stored in the requested format, or in other libraries, in the dtype
            that a fresh state has.
        why: the reason for `not_as_asked`, or "" if the share is 0.
        lowest: share of a second moment at the smallest number of its codes, for weights that move.
        highest: share of a second moment at the largest number of its codes.
        worst: the weight with the largest share at an end, and its share, or "" if there is none.
    """

    dtypes: dict[str, int]
    frozen: float
    zero: float = 0.0
    not_as_asked: float = 0.0
    why: str = ""
    lowest: float = 0.0
    highest: float = 0.0
    worst: str = ""

    def __str__(self) -> str:
        shares = {
            "cannot shrink": self.frozen,
            "zero": self.zero,
            "not in the format asked for": self.not_as_asked,
            "at the smallest number": self.lowest,
            "at the largest": self.highest,
        }
        found = [f"{share:.1%} {what}" for what, share in shares.items() if share]
        return f"{', '.join(self.dtypes)}: {', '.join(found) or 'nothing found'}"


class MomentTally:
    """Counts for one kind of moment.

    Attributes:
        zero: number of elements in a second moment that are zero while the first moment is not.
        otherwise: number of elements that do not have the requested format, by reason.
        ends: by weight, the numbers of elements in a second moment at its smallest and largest number, and
            in all.
    """

    def __init__(self):
        self.zero = 0
        self.ends: dict[str, Ends] = {}
        self.otherwise: dict[str, int] = collections.defaultdict(int)
        self._dtypes: dict[str, int] = collections.defaultdict(int)
        # Arrays with the same rate and dtype are counted together, because in a small array that is rounded
        # stochastically no element may happen to shrink.
        self._sizes: dict[Hashable, int] = collections.defaultdict(int)
        self._shrinks: dict[Hashable, bool] = collections.defaultdict(bool)

    def add(self, dtype: str, size: int, rate: Hashable, shrinks: bool) -> None:
        """Count an array."""
        self._dtypes[dtype] += size
        self._sizes[rate, dtype] += size
        self._shrinks[rate, dtype] |= shrinks

    @property
    def diagnosis(self) -> MomentDiagnosis:
        """Return the counts as shares."""
        total = max(sum(self._dtypes.values()), 1)
        frozen = sum(size for key, size in self._sizes.items() if not self._shrinks[key])
        otherwise = sum(self.otherwise.values()) / total
        why = max(self.otherwise, key=self.otherwise.__getitem__, default="")
        low, high = (sum(counts[i] for counts in self.ends.values()) / total for i in (0, 1))
        zero, worst = self.zero / total, worst_of(self.ends)
        return MomentDiagnosis(dict(self._dtypes), frozen / total, zero, otherwise, why, low, high, worst)

    def add_ends(self, leaf: str, low: SupportsInt, high: SupportsInt, size: int) -> None:
        """Count the elements in a weight's moment at the smallest and largest number, and all elements."""
        self.ends[leaf] = (int(low), int(high), size)


@dataclasses.dataclass(frozen=True)
class Diagnosis(Report):
    """The result of `diagnose`. `print` and notebooks show it as a table.

    Attributes:
        updates_lost: share of nonzero updates to 16-bit weights that do not move a weight. It is 0 if weights
            are rounded stochastically, or the error is kept.
        decay_lost: the same share for weight decay alone, or None without weight decay.
        leaves: `updates_lost` for each 16-bit weight, by name.
        moments: the losses in every kind of moment, by its name in the state.
        out_of_range: share of nonzero gradients with squares outside the second moment's range, for each
            weight with a second moment in a format without a scale.
        sums_rounded: share of gradient sums for which every summand was added in 16 bits and rounded to
            nearest.
        norm: norm of all gradients, in float32.
        plain_norm: norm of all gradients, as the framework computes it.
        nonfinite: infinite or NaN share of "weights", of "gradients" and of every kind of moment.
        advice: a line for each problem, empty if there is none.
    """

    updates_lost: float
    decay_lost: float | None
    leaves: dict[str, float]
    moments: dict[str, MomentDiagnosis]
    out_of_range: dict[str, float]
    sums_rounded: float
    norm: float
    plain_norm: float
    nonfinite: dict[str, float]
    advice: tuple[str, ...]

    def table(self) -> Table:
        """Return the table, and the advice below it."""
        decay = "none" if self.decay_lost is None else f"{self.decay_lost:.1%}"
        worst = sorted(((name, lost) for name, lost in self.leaves.items() if lost), key=lambda row: -row[1])
        rows = [(f"not finite: {what}", f"{share:.1%}") for what, share in self.nonfinite.items() if share]
        rows += [("updates lost", f"{self.updates_lost:.1%}")]
        rows += [(f"  {name}", f"{lost:.1%}") for name, lost in worst[:5]]
        rows += [("decay lost", decay), *((name, str(moment)) for name, moment in self.moments.items())]
        outside = sorted(self.out_of_range.items(), key=lambda row: -row[1])
        rows += [(f"gradients out of range: {name}", f"{share:.1%}") for name, share in outside[:5] if share]
        rows.append(("sums of gradients", f"rounded to nearest {self.sums_rounded:.1%}"))
        theirs = f" (the framework computes {self.plain_norm:.6g})"
        wrong = abs(self.plain_norm - self.norm) > 0.01 * self.norm
        rows.append(("norm of gradients", f"{self.norm:.6g}{theirs if wrong else ''}"))
        advice = [f"- {line}" for line in self.advice or ("Nothing is lost.",)]
        return Table(("of the next step", "found"), rows, notes=advice)


@dataclasses.dataclass(frozen=True)
class Wording:
    """The words and names that messages use for a framework.

    Attributes:
        package: the halfstep package.
        cure: remedy for lost updates.
        rate: name of a moment's decay rate.
        pairs: names of second moments, each with the name of its first moment.
        sums: origin of rounded gradient sums.
        plain_norm: name of the framework's norm.
        clip: name of the clipping function.
    """

    package: str
    cure: str
    rate: str
    pairs: Mapping[str, str]
    sums: str
    plain_norm: str
    clip: str


def diagnosis_of(
    terms: Wording,
    updates: Mapping[str, Count],
    compensated: Mapping[str, Count],
    decay: Iterable[Count] | None,
    moments: Mapping[str, MomentDiagnosis],
    sums_rounded: float,
    norm: float,
    plain_norm: float,
    nonfinite: Mapping[str, Count],
    largest: float,
    outside: Mapping[str, Mapping[str, Ends]],
    fault: str = "",
) -> Diagnosis:
    """Return the diagnosis for given counts.

    `compensated` counts the updates to compensated weights. `largest` is the largest gradient magnitude.
    `outside` counts, by the second moment's format and by weight, the gradients below its range, above its
    range, and other than zero. `fault` describes a fault in the chain itself.
    """
    rounded_lost, compensation_lost = _share(updates.values()), _share(compensated.values())
    updates = {**updates, **compensated}
    updates_lost = _share(updates.values())
    decay_lost = None if decay is None else _share(decay)
    broken = {what: _share([count]) for what, count in nonfinite.items()}
    advice = [
        *filter(None, [fault]),
        *_advice_on_nonfinite(broken),
        *(() if fault else _advice_on_updates(terms, rounded_lost, decay_lost)),
        *_advice_on_compensation(compensation_lost),
        *_advice_on_formats(terms, moments, outside),
        *(line for name, moment in moments.items() for line in _advice_on_moment(terms, name, moment)),
        *_advice_on_gradients(terms, sums_rounded, norm, plain_norm, largest),
    ]
    leaves = {name: _share([count]) for name, count in updates.items()}
    return Diagnosis(
        updates_lost,
        decay_lost,
        leaves,
        dict(moments),
        {
            name: (low + high) / max(size, 1)
            for counts in outside.values()
            for name, (low, high, size) in counts.items()
        },
        sums_rounded,
        norm,
        plain_norm,
        broken,
        tuple(advice),
    )


RANGES = {
    "ufloat16_e7m9": (2.0**-79, 2.8e14, "1.7e-24, and are kept at that", "2.8e14, and become NaN"),
    "uroot4_e4m4": (
        1.3235e-15,
        1.749e4,
        "1.3e-15, and are kept at that, so that steps are too short",
        "1.7e4, and are kept at that, so that steps are too long",
    ),
}
"""Smallest and largest second moments in formats without a scale, and the effect on other values."""


_EMBEDDINGS = "Embeddings of language models have such gradients."


def gradients_outside(dtype: str, counts: Mapping[str, Ends]) -> str:
    """Return the effect on the weight with the most gradients outside a range, or "" if there is none.

    A single gradient that is too large counts. Gradients that are too small count from a share of a quarter,
    because a moment averages many squares, and some may be small. Contract: F6, F17, F21.

    Args:
        dtype: format of the second moments.
        counts: by weight, the numbers of gradients below the range, above it, and other than zero.
    """
    for end, least, large in ((1, 0.0, True), (0, 0.25, False)):
        shares = {name: counts[name][end] / max(counts[name][2], 1) for name in counts}
        name = max(shares, key=shares.__getitem__, default="")
        if name and shares[name] > least:
            return _outside(dtype, name, _percent(shares[name]), large)
    return ""


def limits(dtype: str) -> tuple[float, float]:
    """Return the smallest and largest gradient with a square in the range of a format without a scale."""
    return math.sqrt(RANGES[dtype][0]), math.sqrt(RANGES[dtype][1])


def _outside(dtype: str, name: str, share: str, large: bool) -> str:
    _, _, too_small, too_large = RANGES[dtype]
    return (
        f"gradients of {name!r} are so {'large' if large else 'small'} that squares of {share} of them are "
        f"{'above' if large else 'below'} what {dtype} holds: {too_large if large else too_small}. "
        f"{'' if large else f'{_EMBEDDINGS} '}"
        "Use the recipe eight_bit, and a GradScaler where the loss is scaled."
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "under 1%"


def worst_of(ends: Mapping[str, Ends]) -> str:
    """Return the weight with the largest share of elements at an end, and its share, or "" if there is none.

    Example:
        >>> worst_of({"a": (1, 0, 8), "b": (6, 0, 8)})
        "'b' 75%"
    """
    shares = {name: (low + high) / max(size, 1) for name, (low, high, size) in ends.items()}
    name = max(shares, key=shares.__getitem__, default="")
    return f"{name!r} {_percent(shares[name])}" if shares.get(name) else ""


END_CODES = {"uroot4_e4m4": (0, 254), "uroot8": (0, None)}
"""Codes for the smallest and, if the range ends there, the largest second moment in formats with roots."""


def end_codes(dtype: str) -> tuple[int, int | None] | None:
    """Return a format's end codes, given its name or text, or None if its codes have no end.

    Example:
        >>> end_codes("uroot8, blocks of 128")
        (0, None)
    """
    return END_CODES.get(dtype.split(",")[0])


def at_ends(name: str, dtype: str, lowest: float, highest: float, worst: str = "") -> str:
    """Return a warning for shares of a second moment at its ends, or "" if both are at most 1 %.

    `worst` is the weight with the largest share, and its share.
    """
    if end_codes(dtype) is None or max(lowest, highest) <= 0.01:
        return ""
    what = [f"{lowest:.0%} of {name} at the smallest number of {dtype}, so that steps are too short"] * (
        lowest > 0.01
    )
    what += [f"{highest:.0%} of {name} at the largest, so that steps are too long"] * (highest > 0.01)
    most = f" The largest share is that of {worst}." if worst else ""
    if dtype != "uroot4_e4m4":
        return (
            f"{', and '.join(what)}.{most} Their blocks hold 43 binades, and gradients spread over more: "
            'use nu_dtype="bfloat16".'
        )
    why = f" {_EMBEDDINGS}" if lowest > 0.01 else ""
    return (
        f"{', and '.join(what)}.{most}{why} Take the scale off the loss before the step, or use the recipe "
        "eight_bit, which scales blocks."
    )


def _advice_on_nonfinite(shares: Mapping[str, float]) -> Iterable[str]:
    broken = [f"{share:.1%} of the {what}" for what, share in shares.items() if share]
    if broken:
        yield (
            f"{', '.join(broken)} are infinite or NaN, and stay so. Go back to a checkpoint, "
            "and clip gradients."
        )


def _advice_on_formats(
    terms: Wording, moments: Mapping[str, MomentDiagnosis], outside: Mapping[str, Mapping[str, Ends]]
) -> Iterable[str]:
    kept = {name: moment.dtypes for name, moment in moments.items()}
    for dtype, counts in outside.items():
        if problem := gradients_outside(dtype, counts):
            yield problem[0].upper() + problem[1:]
    for second in terms.pairs:
        if any(dtype.startswith("float8_e4m3fn") for dtype in kept.get(second, ())):
            yield (
                f"{second} in float8_e4m3fn holds 18 binades of a block, and rounds smaller numbers up. "
                'scaled("ufloat8_e5m3") holds 32, in as many bytes.'
            )


def _share(counts: Iterable[Count]) -> float:
    lost, total = zip((0, 0), *counts, strict=True)
    return sum(lost) / max(sum(total), 1)


def _advice_on_updates(terms: Wording, updates_lost: float, decay_lost: float | None) -> Iterable[str]:
    if updates_lost > 0.05 or (decay_lost or 0) > 0.05:
        decay = f" and {decay_lost:.0%} of the decay" if decay_lost else ""
        yield (
            f"Rounding drops {updates_lost:.0%} of the updates{decay}. {terms.cure} A learning rate that was "
            "tuned while weights stood still may be too high once they move: try a lower rate."
        )


def _advice_on_compensation(lost: float) -> Iterable[str]:
    if lost > 0.05:
        yield (
            f"{lost:.0%} of the updates of compensated weights are below 2^-18 of the weights, which a "
            'compensation does not hold (contract P4). Use param_storage="split8": it loses no update, and '
            "takes one byte per weight less."
        )


def _advice_on_moment(terms: Wording, name: str, moment: MomentDiagnosis) -> Iterable[str]:
    if moment.frozen > 0.05:
        yield (
            f"{moment.frozen:.0%} of {name} cannot shrink: 1 - {terms.rate} is below half a gap of its "
            f"dtype. Keep it in float32, or round it stochastically, as {terms.package} does."
        )
    if moment.zero > 0.01:
        first = terms.pairs[name]
        yield (
            f"{moment.zero:.0%} of {name} is zero where {first} is not: such weights move by {first} / eps. "
            "Keep it in a dtype with the range of float32, such as bfloat16."
        )
    for dtype in moment.dtypes:
        if problem := at_ends(name, dtype, moment.lowest, moment.highest, moment.worst):
            yield problem
    if moment.not_as_asked > 0.05:
        yield (
            f"{moment.not_as_asked:.0%} of {name} is not kept as was asked for: {moment.why}. "
            "Ask for another format, or for a lower min_size, and build a new optimizer."
        )


def _advice_on_gradients(
    terms: Wording, sums_rounded: float, norm: float, plain_norm: float, largest: float
) -> Iterable[str]:
    if math.isinf(norm) and math.isfinite(largest):
        yield (
            "The norm of the gradients is above float32's largest number, though every gradient is finite: "
            f"clipping by it makes every update zero, but for {terms.clip} of {terms.package}."
        )
    if sums_rounded > 0.05:
        yield (
            f"{sums_rounded:.0%} of the {terms.sums}: they lose small addends. "
            f"Use accumulate_gradients of {terms.package}."
        )
    if abs(plain_norm - norm) > 0.01 * norm:
        yield (
            f"The norm of the gradients is {norm:.4g}; {terms.plain_norm} takes it for {plain_norm:.4g}. "
            f"Use {terms.clip} of {terms.package}."
        )
