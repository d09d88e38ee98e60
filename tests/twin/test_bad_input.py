"""What both packages refuse: the value, the rule and the way out, in the same words of `halfstep`."""

import ml_dtypes
import numpy as np
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep import codebook, relative, scaled

B1, B2 = "Use a decay rate such as 0.9.", "Use a decay rate such as 0.999."
AT_LEAST_0, INTEGER = "Use a number >= 0.", "Use an integer in that range."
SEED = "Use an integer in that range, or two uint32 words (high, low)."
NO_SEED = "is not an integer. Use an integer in [0, 2^64), or two uint32 words (high, low)."
MU = (
    'is not a state dtype. Use "bfloat16", "float16" or "float32"; of 8 bits scaled("float8_e4m3fn"), '
    "or a recipe."
)
NU = 'is not a state dtype. Use "bfloat16" or "float32"; of 8 bits scaled("ufloat8_e5m3"), or a recipe.'
ROUNDINGS = 'Use "stochastic", "feedback", "nearest", "auto" or "nearest_unchecked".'
NO_SIGN = "has no sign. Use it for nu, and a signed format for mu."
NO_SCALE = "cannot hold a moment without a block scale."
TARGETS = 'Use "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2" or "float8_e3m4".'
SCALED = 'Use "float16", "float8_e4m3fn", "int8", "ufloat8_e5m3" or "uroot8".'
TABLES = 'Use "dynamic8" or "udynamic8".'
POWER = "Use a number in (0, 1) such as 0.382, or None for LAMB's own ratio."
CANCELS = f"trust_power=1.0 cancels the learning rate: a schedule would do nothing. {POWER}"
BLOCK = 'is not a block size. Use a positive integer, "row" or None.'

LOSES = (
    "cannot hold a second moment: it rounds small ones to zero, or up by orders of magnitude, and steps are "
    'too long or short. Use "bfloat16", scaled("float16"), scaled("ufloat8_e5m3") or codebook("udynamic8").'
)
NO_UNIT = (
    "{}=relative(...) needs a second moment beside {}. Use it for mu of Adam or LAMB, and scaled(...) here."
)
NO_BOUND = (
    "mu_dtype has no scale and holds up to 7.5, and mu reaches {} roots of nu at b1={} and b2={}. "
    '{} mu_dtype=relative("int8", 128) with nu_dtype=scaled("uroot8"), or the recipe four_bit or '
    "sixteen_bit: these take any rates."
)
FROM_99 = "At this b2 use b1 from 0.99 to 0.99, constant or in a schedule, or"
STOPS = (
    "nu_dtype=uroot4_e4m4 stops at its largest number, and no first moment in its units stops with it: after "
    'a spike steps would be thousands of lr long. Use mu_dtype=relative("mulaw8") of adam or lamb, or '
    'scaled("ufloat8_e5m3") here.'
)
NO_POWER = (
    'mu_dtype=relative("mulaw8") is in units of a power of two that nu_dtype="uroot4_e4m4" gives, and '
    'nu_dtype is {}. Use nu_dtype="uroot4_e4m4", or relative("float8_e3m4").'
)
NO_FORMAT = "dtype={} with block_size={} is not a format. Use {}."
UNITS, UNITS_OF_BLOCKS = '"float8_e3m4" or "mulaw8"', '"int8" or "int4"'
ODD = "block_size={} is odd, and codes of '{}' are two to a byte. Use an even block_size, \"row\" or None."
WARMUP = "Use a whole number of steps, such as 1000, or 0."

VALUES = {
    "scale_by_adam": [
        ({"b1": 1.5}, f"b1=1.5 is outside [0, 1). {B1}"),
        ({"b1": np.nan}, f"b1=nan is outside [0, 1). {B1}"),
        ({"b2": 1}, f"b2=1 is outside [0, 1). {B2}"),
        ({"b2": -0.1}, f"b2=-0.1 is outside [0, 1). {B2}"),
        ({"b2": 0.99999999}, f"b2=0.99999999 is outside [0, 1) in float32. {B2}"),
        ({"b1": np.array([0.9, 0.8])}, "b1 has shape (2,); a hyperparameter is a scalar. Use shape ()."),
        ({"eps": -1.0}, f"eps=-1.0 is negative. {AT_LEAST_0}"),
        ({"eps_root": -1e-9}, f"eps_root=-1e-09 is negative. {AT_LEAST_0}"),
        ({"eps_root": np.nan}, f"eps_root=nan is not a number. {AT_LEAST_0}"),
        ({"seed": -1}, f"seed=-1 is outside [0, 2^64). {SEED}"),
        (
            {"seed": (1, 2**32)},
            "seed=(1, 4294967296) is not two uint32 words (high, low). "
            "Use words in [0, 2^32), or an integer.",
        ),
        ({"mu_dtype": "float64"}, f"mu_dtype='float64' {MU}"),
        ({"mu_dtype": object}, f"mu_dtype=object {MU}"),  # numpy.object warns
        ({"nu_dtype": "complex64"}, f"nu_dtype='complex64' {NU}"),
        ({"nu_dtype": torch.int32}, f"nu_dtype=int32 {NU}"),
        ({"mu_dtype": "int8"}, f'mu_dtype=int8 {NO_SCALE} Use scaled("int8").'),
        (
            {"mu_dtype": ml_dtypes.float8_e4m3fn},
            f'mu_dtype=float8_e4m3fn {NO_SCALE} Use scaled("float8_e4m3fn").',
        ),
        ({"nu_dtype": "int8"}, f'nu_dtype=int8 {NO_SCALE} Use scaled("ufloat8_e5m3").'),
        ({"nu_dtype": torch.float8_e5m2}, f"nu_dtype=float8_e5m2 {NU}"),
        ({"nu_dtype": "float8_e4m3fn"}, f'nu_dtype=float8_e4m3fn {NO_SCALE} Use scaled("ufloat8_e5m3").'),
        ({"nu_dtype": "ufloat8_e5m3"}, f'nu_dtype=ufloat8_e5m3 {NO_SCALE} Use scaled("ufloat8_e5m3").'),
        ({"nu_dtype": "udynamic8"}, 'nu_dtype=udynamic8 is a table. Use codebook("udynamic8").'),
        ({"nu_dtype": "float16"}, f"nu_dtype=float16 {LOSES}"),
        ({"nu_dtype": scaled("int8")}, f"nu_dtype=int8 {LOSES}"),
        ({"nu_dtype": codebook("dynamic8")}, f"nu_dtype=dynamic8 {LOSES}"),
        ({"nu_dtype": relative("float8_e3m4")}, NO_UNIT.format("nu_dtype", "nu")),
        ({"mu_dtype": relative("float8_e3m4"), "b2": 0.9999}, NO_BOUND.format(22.9, 0.9, 0.9999, FROM_99)),
        (
            {"mu_dtype": relative("float8_e3m4"), "b1": 0.99, "b2": 0.9},
            NO_BOUND.format("inf", 0.99, 0.9, "Are b1 and b2 swapped? Otherwise use"),
        ),
        (
            {"mu_dtype": relative("mulaw8"), "nu_dtype": "uroot4_e4m4", "b2": 0.9999},
            NO_BOUND.format(22.9, 0.9, 0.9999, FROM_99),
        ),
        ({"nu_dtype": "uroot4_e4m4"}, STOPS),
        ({"mu_dtype": relative("int8", 128), "nu_dtype": "uroot4_e4m4"}, STOPS),
        ({"mu_dtype": relative("mulaw8")}, NO_POWER.format(None)),
        ({"mu_dtype": relative("mulaw8"), "nu_dtype": "ufloat16_e7m9"}, NO_POWER.format("ufloat16_e7m9")),
        ({"mu_dtype": scaled("ufloat8_e5m3")}, f"mu_dtype=ufloat8_e5m3 {NO_SIGN}"),
        ({"mu_dtype": "ufloat16_e7m9"}, f"mu_dtype=ufloat16_e7m9 {NO_SIGN}"),
        ({"mu_dtype": codebook("udynamic8")}, f"mu_dtype=udynamic8 {NO_SIGN}"),
        ({"mu_rounding": None}, f"mu_rounding=None is not a rounding. {ROUNDINGS}"),
        ({"nu_rounding": "up"}, f"nu_rounding='up' is not a rounding. {ROUNDINGS}"),
        (
            {"mu_rounding": "stochastik"},
            f"mu_rounding='stochastik' is not a rounding. Did you mean \"stochastic\"? {ROUNDINGS}",
        ),
    ],
    "scale_by_adan": [({"b3": 1.5}, f"b3=1.5 is outside [0, 1). {B1}"), ({"nu_dtype": "uroot4_e4m4"}, STOPS)],
    "scale_by_ademamix": [({"b3": 1.5}, f"b3=1.5 is outside [0, 1). {B1}")],
    "scale_by_muon": [({"beta": 1.5}, f"beta=1.5 is outside [0, 1). {B1}")],
    "scale_by_rms": [({"decay": 1.5}, f"decay=1.5 is outside [0, 1). {B1}")],
    "scale_by_schedule_free": [
        ({"b1": 1.5}, f"b1=1.5 is outside [0, 1). {B1}"),
        ({"warmup_steps": -1}, f"warmup_steps=-1 is negative. {WARMUP}"),
        ({"warmup_steps": 2.5}, f"warmup_steps=2.5 is not whole. {WARMUP}"),
        (
            {"lead_dtype": "ufloat16_e7m9"},
            "lead_dtype=ufloat16_e7m9 has no sign. Use it for nu, and a signed format for lead.",
        ),
    ],
    "scale_by_factored_rms": [({"epsilon": -1.0}, f"epsilon=-1.0 is negative. {AT_LEAST_0}")],
    "clip_by_block_rms": [
        ({"threshold": -1.0}, "threshold=-1.0 is negative. Use a number such as 1.0, or leave the link out.")
    ],
    "clip_by_global_norm": [({"max_norm": -1.0}, f"max_norm=-1.0 is negative. {AT_LEAST_0}")],
    "scale_by_param_block_rms": [({"min_scale": -1.0}, f"min_scale=-1.0 is negative. {AT_LEAST_0}")],
    "scale_by_lion": [
        ({"b1": 1.5}, f"b1=1.5 is outside [0, 1). {B1}"),
        ({"mu_dtype": "uroot4_e4m4"}, f"mu_dtype=uroot4_e4m4 {NO_SIGN}"),
        *(({"mu_dtype": relative(x)}, NO_UNIT.format("mu_dtype", "mu")) for x in ("float8_e3m4", "mulaw8")),
    ],
    "trace": [
        ({"decay": 1.5}, f"decay=1.5 is outside [0, 1). {B1}"),
        (
            {"decay": 0.9, "accumulator_dtype": "int8"},
            f'accumulator_dtype=int8 {NO_SCALE} Use scaled("int8").',
        ),
        (
            {"decay": 0.9, "accumulator_dtype": scaled("ufloat8_e5m3")},
            "accumulator_dtype=ufloat8_e5m3 has no sign. Use it for nu, and a signed format for accumulator.",
        ),
        (
            {"decay": 0.9, "accumulator_dtype": relative("float8_e3m4")},
            NO_UNIT.format("accumulator_dtype", "trace"),
        ),
        ({"decay": 0.9, "rounding": "up"}, f"rounding='up' is not a rounding. {ROUNDINGS}"),
    ],
    "add_decayed_weights": [({"weight_decay": -0.1}, f"weight_decay=-0.1 is negative. {AT_LEAST_0}")],
    "scale_by_learning_rate": [
        (
            {"learning_rate": -0.1},
            "learning_rate=-0.1 is negative. Use a number >= 0, or flip_sign=False to ascend.",
        )
    ],
    "scale_by_trust_ratio": [
        (
            {"min_norm": 2.0, "max_norm": 1.0},
            "min_norm=2 is above max_norm=1. Use min_norm <= max_norm, or None for no bound.",
        ),
        (
            {"min_ratio": 2.0, "max_ratio": 1.5},
            "min_ratio=2 is above max_ratio=1.5. Use min_ratio <= max_ratio, or None for no bound.",
        ),
        ({"min_norm": -1.0}, f"min_norm=-1.0 is negative. {AT_LEAST_0}"),
        ({"max_norm": -1.0}, f"max_norm=-1.0 is negative. {AT_LEAST_0}"),
        ({"trust_coefficient": -1.0}, f"trust_coefficient=-1.0 is negative. {AT_LEAST_0}"),
    ],
    "round_stochastically": [({"seed": 2**64}, f"seed={2**64} is outside [0, 2^64). {SEED}")],
    "random_words": [
        ({"seed": -1}, f"seed=-1 is outside [0, 2^64). {SEED}"),
        ({"leaf": -1}, f"leaf=-1 is outside [0, 2^32). {INTEGER}"),
        ({"role": 2**32}, f"role={2**32} is outside [0, 2^32). {INTEGER}"),
        ({"offset": 2**64}, f"offset={2**64} is outside [0, 2^64). {INTEGER}"),
    ],
    "lamb16": [
        ({"trust_power": 0.0}, f"trust_power=0.0 is outside (0, 1). {POWER}"),
        ({"trust_power": 1.0}, CANCELS),
    ],
    "round_to": [({"x": 1.0, "dtype": "int8"}, f"dtype=int8 is not a rounding target. {TARGETS}")],
    "scaled": [
        (
            {"dtype": "float16", "scale": "fine"},
            'scale=\'fine\' is not for dtype=float16. Use "power_of_two", or "fine" for int8.',
        ),
        *(
            ({"dtype": dtype}, f"dtype={name} has no scaled format. {SCALED}")
            for dtype, name in [
                *((x, x) for x in ("int4", "float32", "bfloat16", "ufloat16_e7m9")),
                (torch.complex64, "complex64"),
                (np.dtype("complex64"), "complex64"),
            ]
        ),
        ({"dtype": "unit8"}, f'dtype=unit8 has no scaled format. Did you mean "int8"? {SCALED}'),
        *(({"dtype": "int8", "block_size": n}, f"block_size={n!r} {BLOCK}") for n in (0, -8, "col")),
        *(
            ({"dtype": "int8", n: -1}, f"{n}=-1 is negative. Use an integer >= 0.")
            for n in ("min_size", "min_ndim")
        ),
    ],
    "relative": [
        # Codes without a zero would move what never got a gradient.
        *(
            ({"dtype": name, "block_size": size}, NO_FORMAT.format(name, size, way_out))
            for name, size, way_out in (
                ("bfloat16", None, UNITS),
                ("ufloat16_e7m9", None, UNITS),
                ("int4", None, 'relative("int4", 32)'),
                ("int8", None, 'relative("int8", 32)'),
                ("float8_e3m4", 128, UNITS_OF_BLOCKS),
                ("udynamic8", 128, UNITS_OF_BLOCKS),
            )
        ),
        (
            {"dtype": "mulaw"},
            f'dtype=mulaw with block_size=None is not a format. Did you mean "mulaw8"? Use {UNITS}.',
        ),
        ({"dtype": "int4", "block_size": 33}, ODD.format(33, "int4")),
        ({"dtype": "int8", "block_size": 0}, f"block_size=0 {BLOCK}"),
    ],
    "codebook": [
        ({"table": "dynamic3"}, f"table='dynamic3' is not a table. Did you mean \"dynamic8\"? {TABLES}"),
        ({"table": "dynamic8", "block_size": 0}, f"block_size=0 {BLOCK}"),
        ({"table": "dynamic8", "min_size": -1}, "min_size=-1 is negative. Use an integer >= 0."),
    ],
    "store_state": [
        ({"format": "int8"}, f'format=int8 {NO_SCALE} Use scaled("int8").'),
        (
            {"format": relative("float8_e3m4")},
            "format=relative(...) is in units of the root of a second moment, which is not known here. "
            "Use scaled(...), or mu_dtype=relative(...) of adam.",
        ),
        (
            {"rounding": "nearest"},
            "rounding='nearest' is not a rounding of state whose decay rate is not known. "
            'Use "stochastic" or "nearest_unchecked".',
        ),
        ({"seed": -1}, f"seed=-1 is outside [0, 2^64). {SEED}"),
    ],
}

TYPES = {
    "scale_by_adam": [
        ({"b1": "0.9"}, "b1='0.9' is not a number. Use a float."),
        ({"b1": True}, "b1=True is not a number. Use a float."),
        ({"eps": None}, "eps=None is not a number. Use a float."),
        ({"seed": 1.5}, f"seed=1.5 {NO_SEED}"),
        ({"seed": None}, f"seed=None {NO_SEED}"),
        ({"seed": True}, f"seed=True {NO_SEED}"),
        ({"mu_dtype": 16}, f"mu_dtype=16 {MU}"),
    ],
    "scale_by_learning_rate": [({"learning_rate": None}, "learning_rate=None is not a number. Use a float.")],
    "scale_by_trust_ratio": [({"eps": "small"}, "eps='small' is not a number. Use a float.")],
    "round_stochastically": [({"seed": 1.0}, f"seed=1.0 {NO_SEED}")],
    "clip_by_global_norm": [({"max_norm": "1"}, "max_norm='1' is not a number. Use a float.")],
    "lamb16": [({"trust_power": "half"}, "trust_power='half' is not a number. Use a float.")],
    "round_to": [({"x": [1.0]}, "x is list; it is rounded from float32. Cast it to float32.")],
    "scaled": [
        ({"dtype": 3}, f"dtype=3 is not a dtype. {SCALED}"),
        *(({"dtype": "int8", "block_size": n}, f"block_size={n!r} {BLOCK}") for n in (1.5, 8.0, True)),
        *(
            ({"dtype": "int8", n: 1.5}, f"{n}=1.5 is not an integer. Use an integer >= 0.")
            for n in ("min_size", "min_ndim")
        ),
    ],
    "codebook": [({"table": 8}, f"table=8 is not the name of a table. {TABLES}")],
    "store_state": [({"select": "nu"}, "select='nu' is not a function. Use lambda name, array: ...")],
}

# Under nearest rounding: the link and its arguments, the moment's dtype, the rate, half a gap.
FREEZES = [
    ("scale_by_adam", {"nu_dtype": "bfloat16"}, "bfloat16", "b2=0.999", "2^-8"),
    ("scale_by_adam", {"b1": 0.9996, "mu_dtype": "float16"}, "float16", "b1=0.9996", "2^-11"),
    ("scale_by_adam", {"b1": 0.95, "mu_dtype": scaled("float8_e4m3fn")}, "float8_e4m3fn", "b1=0.95", "2^-4"),
    ("scale_by_adam", {"b1": 0.9961, "mu_dtype": scaled("int8")}, "int8", "b1=0.9961", "1/254"),
    ("scale_by_adam", {"b2": 0.95, "nu_dtype": scaled("ufloat8_e5m3")}, "ufloat8_e5m3", "b2=0.95", "2^-4"),
    ("scale_by_adam", {"nu_dtype": codebook("udynamic8")}, "udynamic8", "b2=0.999", "1/31.44"),
    ("scale_by_lion", {"b2": 0.999, "mu_dtype": "bfloat16"}, "bfloat16", "b2=0.999", "2^-8"),
    ("trace", {"decay": 0.999, "accumulator_dtype": "bfloat16"}, "bfloat16", "decay=0.999", "2^-8"),
]


def called(hs, link, arguments):
    """Call a link with arguments beside those that it must have."""
    needed = {
        "random_words": {"seed": 0, "step": 1, "leaf": "w", "role": 0, "shape": (3,)},
        "lamb16": {"learning_rate": 0.01},
        "round_to": {"dtype": "bfloat16"},
        "store_state": {"inner": hs.scale_by_adam(), "format": "bfloat16"},
    }
    if link == "lamb16" and hs is halfstep_torch:
        return hs.Lamb16([torch.nn.Parameter(torch.ones(4))], **arguments)
    return getattr(hs, link)(**needed.get(link, {}) | arguments)


ROWS = [
    pytest.param(kind, link, *row, id=f"{link}: {row[1][:40]}")
    for kind, links in ((ValueError, VALUES), (TypeError, TYPES))
    for link, rows in links.items()
    for row in rows
]


@pytest.mark.parametrize("hs", [halfstep_jax, halfstep_torch])
@pytest.mark.parametrize(("kind", "link", "arguments", "message"), ROWS)
def test_a_bad_argument_is_refused_in_the_same_words(hs, kind, link, arguments, message):
    with pytest.raises(kind) as caught:
        called(hs, link, arguments)
    assert type(caught.value) is kind
    named = "Lamb16" if link == "lamb16" and hs is halfstep_torch else link
    assert str(caught.value) == f"{named}: {message}"


@pytest.mark.parametrize("hs", [halfstep_jax, halfstep_torch])
@pytest.mark.parametrize(("link", "arguments", "dtype", "rate", "half_gap"), FREEZES)
def test_nearest_is_refused_where_it_freezes(hs, link, arguments, dtype, rate, half_gap):
    (stored,) = (name for name in arguments if name.endswith("dtype"))
    rounding = "rounding" if link == "trace" else stored.replace("dtype", "rounding")
    with pytest.raises(ValueError, match=r"freezes") as caught:
        called(hs, link, arguments | {rounding: "nearest"})
    assert str(caught.value) == (
        f'{link}: {stored}={dtype} with {rounding}="nearest" freezes at {rate} '
        f"(1-{rate.split('=')[0]} < {half_gap}). "
        f'Use {rounding}="stochastic", or {stored}="float32".'
    )


@pytest.mark.parametrize("hs", [halfstep_jax, halfstep_torch])
@pytest.mark.parametrize(("b1", "dtype"), [(0.9, "float8_e4m3fn"), (0.996, "int8")])
def test_nearest_is_taken_just_below(hs, b1, dtype):
    hs.scale_by_adam(b1=b1, mu_dtype=scaled(dtype), mu_rounding="nearest")


@pytest.mark.parametrize("rule", ["adamw", "lion", "lamb"])
def test_a_weight_storage_that_there_is_not_is_refused_with_those_that_the_rule_has(rule):
    named = {"adamw": "AdamW", "lion": "Lion", "lamb": "Lamb"}[rule]
    weight = torch.nn.Parameter(torch.ones(4))
    more = ', "master", "feedback" or "int8".' if rule == "adamw" else ' or "master".'
    for given, meant in (("kahan", "compensated"), ("split-8", "split8")):
        for caller, call in (
            (rule, lambda given=given: getattr(halfstep_jax, rule)(1e-3, param_storage=given)),
            (named, lambda given=given: getattr(halfstep_torch, named)([weight], param_storage=given)),
        ):
            with pytest.raises(ValueError, match="is not a weight storage") as caught:
                call()
            assert str(caught.value) == (
                f'{caller}: param_storage={given!r} is not a weight storage. Did you mean "{meant}"? '
                f'Use "stochastic", "nearest", "compensated", "split8", "split16"{more}'
            )
