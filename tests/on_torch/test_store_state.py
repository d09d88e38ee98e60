"""`store_state` over this package's transforms: what it stores, its words, saving and loading, bad input."""

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, parameters, run, snapshot

SMALL = {"block_size": 4, "min_size": 0, "min_ndim": 0}
FP8 = hs.scaled("float8_e4m3fn", **SMALL)
RATE = 1e-2


def optimizer(params, *links, seed=0, **options):
    """Return a chain of links, a learning rate and stochastically rounded weights."""
    tx = hs.chain(*links, hs.scale_by_learning_rate(RATE), hs.round_stochastically(seed))
    return hs.Optimizer(params, tx, **options)


def adam(**options):
    return hs.scale_by_adam(mu_dtype="float32", nu_dtype="float32", **options)


def test_a_wrapped_link_measures_all_gradients():
    results = []
    for wrap in (lambda tx: tx, lambda tx: hs.store_state(tx, "float32")):
        params = parameters()
        made = optimizer(params, wrap(hs.chain(hs.clip_by_global_norm(0.1), adam(eps=0.1))))
        run(params, made, range(3))
        results.append([made.state[p]["exp_avg"].clone() for _, p in params])
    for clipped, stored in zip(*results, strict=True):
        assert torch.equal(clipped, stored)


def test_a_wrapped_link_refuses_gradients_that_would_spread():
    p = torch.nn.Parameter(torch.ones(4, 4))
    p.grad = torch.full((4, 4), torch.inf)
    made = hs.Optimizer([("w", p)], hs.chain(hs.store_state(hs.scale_by_muon(), "bfloat16")))
    with pytest.raises(ValueError, match="the gradient of 'w' has an infinity or a NaN"):
        made.step()
    assert torch.equal(p, torch.ones(4, 4))


@pytest.mark.parametrize(
    "fmt", ["bfloat16", FP8, hs.codebook("dynamic8", **SMALL)], ids=["bf16", "fp8", "table"]
)
def test_every_array_with_an_axis_is_stored_and_scalars_left_alone(fmt):
    params = parameters()
    made = optimizer(params, hs.store_state(adam(), fmt))
    run(params, made, range(3))
    dtype = torch.bfloat16 if fmt == "bfloat16" else fmt.torch_dtype
    for name, p in params:
        state = made.state[p]
        expected = dtype if p.ndim else torch.float32
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == expected, name
        assert ("exp_avg_scale" in state) == (fmt != "bfloat16" and p.ndim > 0), name


def test_its_words_are_those_of_the_array_s_name_in_the_contract():
    p = torch.nn.Parameter(torch.zeros(50))
    p.grad = torch.linspace(-3, 3, 50)
    inside = hs.chain(hs.add_decayed_weights(0.1), hs.trace(0.9, accumulator_dtype="float32"))
    made = hs.Optimizer([("layer.w", p)], hs.store_state(inside, "bfloat16", seed=7))
    made.step()
    words = hs.random_words(7, 1, "1/trace/layer/w", hs.Role.STATE, (50,))
    expected = hs.round_to(p.grad, torch.bfloat16, words, saturate=True)
    assert torch.equal(made.state[p]["momentum_buffer"], expected)


def test_seeds_of_the_wrapped_link_and_of_the_wrapper_are_two():
    """The rule's own rounding keeps its words, whatever the seed of the wrapper."""
    kept = []
    for seed in (1, 2):
        params = parameters()
        inner = hs.scale_by_adam(mu_dtype="float32", nu_dtype="bfloat16", seed=5)
        by_name = hs.store_state(
            inner, "bfloat16", select=lambda name, array: name.startswith("mu/"), seed=seed
        )
        made = optimizer(params, by_name)
        run(params, made, range(1))
        kept.append([made.state[p] for _, p in params])
    assert all(torch.equal(a["exp_avg_sq"], b["exp_avg_sq"]) for a, b in zip(*kept, strict=True))
    assert not torch.equal(kept[0][0]["exp_avg"], kept[1][0]["exp_avg"])


def test_select_is_asked_by_the_contract_s_names_and_by_shape():
    asked = []

    def select(name, array):
        asked.append((name, tuple(array.shape), array.dtype))
        return name == "nu/a/w"

    params = parameters()
    made = optimizer(params, hs.store_state(adam(), "bfloat16", select=select))
    run(params, made, range(1))
    assert {("mu/a/w", (6, 5), torch.float32), ("nu/a/b", (5,), torch.float32)} <= set(asked)
    stored = {name: made.state[p]["exp_avg_sq"].dtype for name, p in params}
    assert stored == {"a.w": torch.bfloat16, "a.b": torch.float32, "scale": torch.float32}


def test_a_state_of_another_format_is_refused():
    params = parameters()
    first = optimizer(params, hs.store_state(adam(), hs.scaled("ufloat8_e5m3", **SMALL), select=only_nu))
    run(params, first, range(1))
    other = optimizer(parameters(), hs.store_state(adam(), hs.scaled("uroot8", **SMALL), select=only_nu))
    with pytest.raises(
        ValueError, match="of the chain store_state\\(scale_by_adam, ufloat8_e5m3 in blocks of 4"
    ):
        other.load_state_dict(first.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["bfloat16", FP8], ids=["bf16", "fp8"])
def test_compiled_steps_have_the_bits_of_eager_ones(fmt):
    results = []
    for compile in (False, True):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 6000).view(60, 100).to(torch.bfloat16))
        made = optimizer([("w", p)], hs.store_state(adam(seed=3), fmt, seed=4), compile=compile)
        for t in range(3):
            p.grad = torch.linspace(-1 - t, 1, 6000).view(60, 100).to(torch.bfloat16)
            made.step()
        results.append(snapshot(made))
    assert_same_snapshots(*results)


def only_nu(name, array):
    return "nu" in name.split("/")


def parameter():
    return [("w", torch.nn.Parameter(torch.ones(2, 3)))]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: hs.store_state(adam(), None),
            TypeError,
            'store_state: format=None is not a format. Use "bfloat16", or what scaled returns.',
        ),
        (
            lambda: optimizer(
                parameter(), hs.store_state(adam(), "bfloat16", select=lambda name, array: False)
            ),
            ValueError,
            "store_state: select chooses none of 'mu/w', 'nu/w'. Choose one of them, or leave select out.",
        ),
        (
            lambda: optimizer(parameter(), hs.store_state(adam(), "ufloat16_e7m9")),
            ValueError,
            "store_state: format=ufloat16_e7m9 has no sign, and 'mu' has one. "
            'Choose second moments, as by select=lambda name, array: "nu" in name.split("/").',
        ),
        (
            lambda: hs.store_state(hs.chain(adam(), hs.round_stochastically()), "bfloat16"),
            ValueError,
            "store_state: round_stochastically is in the wrapped chain. "
            "Wrap the transforms before it, and put it after store_state(...).",
        ),
    ],
)
def test_a_bad_call_says_what_is_wrong_and_what_to_do(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
