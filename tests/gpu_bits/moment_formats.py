"""The formats of moments whose steps are executed: all that the packages list, in pairs that Adam takes."""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping

import halfstep_jax as hs
import halfstep_spec as spec
from halfstep import recipes
from halfstep.storage.codes import CODES, Codes
from halfstep.storage.formats import Format

Pair = tuple[Format, Format]

_FAMILIES: dict[str, dict] = {
    "plain": {},
    "scaled": {"scaled": True},
    "fixed": {"relative": True},
    "fine": {"scaled": True, "scale": "fine", "relative": True},
}
# Layouts that no list of codes has.
_FURTHER: tuple[Pair, ...] = (
    (hs.scaled("float8_e4m3fn", "row"), hs.scaled("ufloat8_e5m3", "row")),
    (hs.scaled("int8", scale="fine"), hs.scaled("ufloat8_e5m3")),
)


def recipe_options() -> dict[str, dict]:
    """Return the arguments of every recipe, by its name."""
    return {
        name: dict(value)
        for name, value in vars(recipes).items()
        if isinstance(value, Mapping) and name[0] != "_"
    }


@functools.cache
def pairs() -> list[Pair]:
    """Return formats of a first and a second moment: each that there is, once if that can be."""
    chosen = [(_as_format(r["mu_dtype"]), _as_format(r["nu_dtype"])) for r in recipe_options().values()]
    chosen = [*dict.fromkeys([*chosen, *_FURTHER])]
    firsts = [fmt for fmt, codes in _listed() if codes.signed]
    seconds = [fmt for fmt, codes in _listed() if codes.for_second_moments and not fmt.relative]

    def unused(formats: list[Format], place: int) -> list[Format]:
        return [fmt for fmt in formats if fmt not in [pair[place] for pair in chosen]]

    for first in unused(firsts, 0):
        takers = (fmt for fmt in [*unused(seconds, 1), *seconds] if _is_taken(first, fmt))
        chosen += [(first, fmt) for fmt in itertools.islice(takers, 1)]
    for second in unused(seconds, 1):
        takers = (fmt for fmt in firsts if _is_taken(fmt, second))
        chosen += [(fmt, second) for fmt in itertools.islice(takers, 1)]
    return chosen


def not_executed() -> list[str]:
    """Return codes that are in no pair, as "family name"."""
    used = [(fmt.family, fmt.dtype) for pair in pairs() for fmt in pair]
    return [f"{family} {name}" for family in CODES for name in CODES[family] if (family, name) not in used]


def text(pair: Pair) -> str:
    """Return how a pair is called here, such as "float16; ufloat8_e5m3/128"."""
    return "; ".join(re.sub(r", blocks of (\d+)|, a block per (row)", r"/\1\2", fmt.text) for fmt in pair)


def as_spec(fmt: Format) -> spec.Format:
    """Return the same format as the contract's own class."""
    return spec.Format(
        fmt.dtype, fmt.scaled, fmt.block_size, fmt.min_size, fmt.min_ndim, fmt.scale, fmt.relative
    )


def _listed() -> Iterator[tuple[Format, Codes]]:
    for family, named in CODES.items():
        for name, codes in named.items():
            # An int4 is dithered, and in the recipe in blocks of 32.
            yield Format(name, **_FAMILIES[family], block_size=32 if codes.dithered else 128), codes


def _as_format(dtype: str | Format) -> Format:
    return Format.of(dtype) if isinstance(dtype, Format) else Format(dtype)


def _is_taken(mu: Format, nu: Format) -> bool:
    try:
        hs.scale_by_adam(mu_dtype=mu, nu_dtype=nu, mu_rounding="stochastic")
    except ValueError:
        return False
    return True
