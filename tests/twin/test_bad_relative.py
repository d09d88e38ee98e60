"""What moments in units of a root, and second moments, are refused for: by both packages, alike."""

import jax.numpy as jnp
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch

PACKAGES = {"jax": halfstep_jax, "torch": halfstep_torch}


def build(name: str, rule: str, **options) -> None:
    """Build a rule and its state for a matrix: what a user would do first."""
    if name == "jax":
        getattr(halfstep_jax, rule)(**options).init({"w": jnp.zeros((64, 64))})
    else:
        link = getattr(halfstep_torch, rule)(**options)
        halfstep_torch.Optimizer([("w", torch.nn.Parameter(torch.zeros(64, 64)))], link)


REFUSED = [
    ("scale_by_lion", {"mu_dtype": ("float8_e3m4",)}, r"mu_dtype=relative\(...\) needs a second moment"),
    ("trace", {"decay": 0.9, "accumulator_dtype": ("int8",)}, r"relative\(...\) needs a second moment"),
    ("scale_by_adam", {"nu_dtype": ("float8_e3m4",)}, r"nu_dtype=relative\(...\) needs a second moment"),
    ("scale_by_adam", {"mu_dtype": ("int8",), "b2": 0.9999}, r"reaches 22.9 roots of nu at b"),
    ("scale_by_adam", {"mu_dtype": ("int8",), "b1": 0.99, "b2": 0.9}, r"reaches inf roots of nu at b"),
    ("scale_by_lion", {"mu_dtype": ("mulaw8",)}, r"mu_dtype=relative\(...\) needs a second moment"),
    ("scale_by_lion", {"mu_dtype": "uroot4_e4m4"}, "mu_dtype=uroot4_e4m4 has no sign. Use it for nu"),
    ("scale_by_adam", {"mu_dtype": ("mulaw8",), "nu_dtype": "uroot4_e4m4", "b2": 0.9999},
     "reaches 22.9 roots of nu at b"),
    ("scale_by_adam", {"nu_dtype": "uroot4_e4m4"}, "nu_dtype=uroot4_e4m4 stops at its largest number"),
    ("scale_by_adam", {"mu_dtype": ("int8", 128), "nu_dtype": "uroot4_e4m4"},
     "nu_dtype=uroot4_e4m4 stops at its largest number"),
    ("scale_by_adan", {"nu_dtype": "uroot4_e4m4"}, "nu_dtype=uroot4_e4m4 stops at its largest number"),
    ("scale_by_adam", {"mu_dtype": ("mulaw8",)}, r'gives, and nu_dtype is None. Use nu_dtype="uroot4_e4m4"'),
    ("scale_by_adam", {"mu_dtype": ("mulaw8",), "nu_dtype": "ufloat8_e6m2"},
     r'mulaw8"\) is in units of a power of two that nu_dtype="uroot4_e4m4" gives, and nu_dtype is ufl'),
]  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    ("rule", "options", "message"),
    REFUSED,
)
def test_relative_is_refused_where_there_is_no_second_moment_or_no_bound(name, rule, options, message):
    relative = PACKAGES[name].relative
    given = {key: relative(*x) if isinstance(x, tuple) else x for key, x in options.items()}
    with pytest.raises(ValueError, match=message):
        build(name, rule, **given)


@pytest.mark.parametrize("name", PACKAGES)
def test_relative_with_blocks_needs_no_bound(name):
    build(name, "scale_by_adam", mu_dtype=PACKAGES[name].relative("int8", 128), b2=0.9999)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bfloat16",), "dtype=bfloat16 with block_size=None is not a format"),
        (("int4",), r'dtype=int4 with block_size=None is not a format. Use relative\("int4", 32\).'),
        (("float8_e3m4", 128), 'with block_size=128 is not a format. Use "int8" or "int4"'),
        (("int4", 33), "block_size=33 is odd"),
        (("int8", 0), "block_size=0 is not a block size"),
        # Codes without a zero would move what never got a gradient.
        (
            ("ufloat8_e6m2",),
            'dtype=ufloat8_e6m2 with block_size=None is not a format. Use "float8_e3m4", "int8" or "mulaw8"',
        ),
        (("ulinear4", 128), 'dtype=ulinear4 with block_size=128 is not a format. Use "int8" or "int4"'),
    ],
)
def test_relative_refuses_what_is_no_format(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        PACKAGES[name].relative(*arguments)


@pytest.mark.parametrize("fmt", [("float8_e3m4",), ("int4", 32)])
def test_state_of_another_transform_has_no_such_unit(fmt):
    message = r"store_state: format=relative\(...\) is in units of the root of a second moment"
    with pytest.raises(ValueError, match=message):
        halfstep_jax.store_state(optax.adam(1.0), halfstep_jax.relative(*fmt))
    with pytest.raises(ValueError, match=message):
        halfstep_torch.store_state(halfstep_torch.scale_by_adam(), halfstep_torch.relative(*fmt))


@pytest.mark.parametrize("name", PACKAGES)
def test_a_fine_scale_is_for_int8(name):
    with pytest.raises(ValueError, match="scale='fine' is not for dtype=float16"):
        PACKAGES[name].scaled("float16", scale="fine")


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("nu", ["float16", "scaled int8", "codebook dynamic8", "codebook dynamic4"])
def test_a_second_moment_is_not_kept_where_small_ones_are_lost_or_lifted(name, nu):
    kind, _, dtype = nu.partition(" ")
    fmt = getattr(PACKAGES[name], kind)(dtype) if dtype else kind
    with pytest.raises(ValueError, match="cannot hold a second moment"):
        build(name, "scale_by_adam", nu_dtype=fmt)


def test_the_count_stops_at_its_largest_value_in_both():
    last = 2**31 - 1
    tx = halfstep_jax.scale_by_adam()
    state = tx.init({"w": jnp.zeros(2)})._replace(count=jnp.int32(last - 1))
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = halfstep_torch.Adam([("w", p)])
    p.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    header = saved["param_groups"][0]["halfstep"]
    saved["state"][0]["step"], header["counts"] = torch.tensor(last - 1), str(last - 1)
    optimizer.load_state_dict(saved)
    for _ in range(2):
        _, state = tx.update({"w": jnp.ones(2)}, state)
        optimizer.step()
        assert int(state.count) == int(optimizer.state[p]["step"]) == last
    saved["state"][0]["step"], header["counts"] = torch.tensor(last + 1), str(last + 1)
    with pytest.raises(ValueError, match=r"step of .* is 2147483648, no whole number in \[0, 2\^31 - 1\]"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("recipe", ["one_pass", "eight_bit"])
@pytest.mark.parametrize("rates", [{"b1": 0.5, "b2": 0.999}, {"b1": 0.9, "b2": 0.9999}])
def test_what_a_refusal_of_rates_advises_takes_them(name, recipe, rates):
    recipes, relative = PACKAGES[name].recipes, PACKAGES[name].relative
    advised = (
        r'Use mu_dtype=relative\("int8", 128\) with nu_dtype=scaled\("uroot8"\), or the recipe four_bit or '
        "sixteen_bit: these take any rates"
    )
    with pytest.raises(ValueError, match=advised):
        build(name, "scale_by_adam", **_moments(getattr(recipes, recipe)), **rates)
    for way_out in (recipes.eight_bit | {"mu_dtype": relative("int8", 128)}, recipes.four_bit):
        build(name, "scale_by_adam", **_moments(way_out), **rates)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("recipe", ["one_pass", "eight_bit", "four_bit"])
def test_recipes_take_slow_first_moments(name, recipe):
    build(name, "scale_by_adam", **_moments(getattr(PACKAGES[name].recipes, recipe)), b1=0.99, b2=0.999)


def _moments(recipe):
    return {key: x for key, x in recipe.items() if key != "param_storage"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_second_moment_of_18_binades_is_warned_of(name):
    fmt = PACKAGES[name].scaled("float8_e4m3fn")
    with pytest.warns(
        UserWarning, match=r"nu_dtype=float8_e4m3fn holds 18 binades .* 28 % of all get over 4 times"
    ):
        build(name, "scale_by_adam", nu_dtype=fmt)
    build(name, "scale_by_adam", mu_dtype=fmt)
