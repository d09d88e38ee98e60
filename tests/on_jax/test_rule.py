"""A rule of a user's own becomes a transform like ours; one that cannot work is refused when it is built."""

import ast
import dataclasses
import functools
import pathlib
import pickle
import re
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import assert_trees_same, gradients, run, take_step, weights


@dataclasses.dataclass(frozen=True)
class Momentum(hs.Rule):
    """`trace`, as a user would write it."""

    decay: Any = hs.decay_rate()
    trace_dtype: Any = None
    seed: Any = 0
    trace = hs.moment(rate="decay")

    def update(self, g, p, n, moments, zero):
        return moments.trace.round(hs.add_product(g, n.decay, moments.trace.value, zero))


@dataclasses.dataclass(frozen=True)
class Factored(hs.Rule):
    """Adafactor's second moment: one average per row, one per column."""

    scope = "parameter"

    b2: Any = hs.decay_rate(0.99)
    rows = hs.moment(rate="b2", signed=False, shape=lambda shape: shape[:-1])
    columns = hs.moment(rate="b2", signed=False, shape=lambda shape: (*shape[:-2], shape[-1]))

    def update(self, g, p, n, moments, zero):
        square = hs.opaque(g * g, zero)
        rows = moments.rows.round(hs.ema(moments.rows.value, square.mean(-1), n.b2, zero))
        columns = moments.columns.round(hs.ema(moments.columns.value, square.mean(-2), n.b2, zero))
        nu = rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]
        return g / (jnp.sqrt(nu) + np.float32(1e-8))


@dataclasses.dataclass(frozen=True)
class ClipByGlobalNorm(hs.Rule):
    """A rule that sees all arrays at once."""

    scope = "all"

    max_norm: Any = hs.number()

    def update(self, g, p, n, moments, zero):
        norm = jnp.sqrt(sum(jnp.sum(hs.opaque(x * x, zero)) for x in g))
        factor = jnp.minimum(np.float32(1), n.max_norm / norm)
        return tuple(hs.opaque(x * factor, zero) for x in g)


@dataclasses.dataclass(frozen=True)
class PullTo(hs.Rule):
    """A rule that reads the weights and a schedule."""

    reads_params = "the link pulls params to zero"

    rate: Any = hs.scalar_or_schedule()

    def update(self, g, p, n, moments, zero):
        return hs.add_product(g, -n.rate, p, zero)


def tree(dtype="bfloat16"):
    return {"w": weights((12, 8), dtype), "v": weights((5, 6), dtype, seed=2)}


def rows(steps=4):
    return {"w": gradients(steps, (12, 8)), "v": gradients(steps, (5, 6), seed=3)}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rule_written_by_a_user_has_the_bits_of_ours(compiled):
    for dtype in ("bfloat16", "float32"):
        theirs = optax.chain(hs.as_transform(Momentum(0.99, dtype, seed=7)), hs.scale_by_learning_rate(0.1))
        ours = optax.chain(hs.trace(0.99, accumulator_dtype=dtype, seed=7), hs.scale_by_learning_rate(0.1))
        expected = run(ours, tree(), rows(), compiled=False)
        params, state = run(theirs, tree(), rows(), compiled=compiled)
        assert_trees_same(params, expected[0])
        assert_trees_same(tuple(state[0]), tuple(expected[1][0]))


@pytest.mark.slow
def test_state_of_another_shape_than_the_weight():
    tx = hs.as_transform(Factored())
    params, state = run(tx, tree(), rows())
    assert state.rows["w"].shape == (12,)
    assert state.columns["w"].shape == (8,)
    assert_trees_same((params, state), run(tx, tree(), rows(), compiled=False))


def test_a_rule_that_sees_all_arrays():
    g = jax.tree.map(lambda x: x[0], rows()) | {"none": None}
    tx = hs.as_transform(ClipByGlobalNorm(0.25))
    updates, state = tx.update(g, tx.init(tree()))
    assert updates["none"] is None
    assert state == optax.EmptyState()
    # 126 squares are summed with an error of 126 half units in the last place at most; the root halves it.
    assert abs(float(optax.tree.norm(updates)) / 0.25 - 1) < 64 * 2.0**-24


def test_a_rule_that_reads_weights_and_a_schedule():
    tx = hs.as_transform(PullTo(lambda count: 0.5 * (count + 1)))
    p, zeros = {"w": jnp.full(3, 2.0, jnp.bfloat16)}, {"w": jnp.zeros(3)}
    state = tx.init(p)
    for expected in (-1.0, -2.0, -3.0):
        updates, state = tx.update(zeros, state, p)
        assert updates["w"].tolist() == [expected] * 3


def test_a_derived_state_can_be_pickled():
    state = hs.as_transform(Momentum(0.5)).init(tree())
    assert type(state).__qualname__ == "Momentum.State"
    assert_trees_same(pickle.loads(pickle.dumps(state)), state)


def test_a_hyperparameter_that_is_an_array_gives_the_bits_of_a_constant():
    make = lambda decay: hs.as_transform(Momentum(decay, "float32"))  # noqa: E731
    injected = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(0.9)
    expected = run(make(0.9), tree("float32"), rows())
    for compiled in (False, True):
        assert_trees_same(run(injected, tree("float32"), rows(), compiled=compiled)[0], expected[0])


# --- what leaves share -------------------------------------------------------------------------------------


def traced_step(tx, leaves, shapes=1):
    params = {f"w{i}": jax.ShapeDtypeStruct((16 + i % shapes, 128), jnp.bfloat16) for i in range(leaves)}
    state = jax.eval_shape(tx.init, params)
    return jax.jit(functools.partial(take_step, tx)).trace(params, state, params)


def equations(jaxpr, seen):
    """Count the equations of a program and of those that it calls, each of these once."""
    if id(jaxpr) in seen:
        return 0
    seen.add(id(jaxpr))
    called = [j for eqn in jaxpr.eqns for j in jax.extend.core.jaxprs_in_params(eqn.params)]
    return len(jaxpr.eqns) + sum(equations(j, seen) for j in called)


def test_leaves_of_one_shape_share_what_is_traced():
    tx = hs.adamw(1e-3, weight_decay=0.1)
    few, many = (equations(traced_step(tx, n).jaxpr.jaxpr, set()) for n in (2, 12))
    # Four links with a call each, and what `optax.apply_updates` does.
    assert (many - few) / 10 <= 8


def test_a_leaf_of_a_new_shape_is_few_equations():
    tx = hs.adamw(1e-3, weight_decay=0.1)
    one, two = (equations(traced_step(tx, n, shapes=n).jaxpr.jaxpr, set()) for n in (1, 2))
    # With the branches of every platform and a program for every derivative it was 272.
    assert two - one <= 130


def without_names(body):
    """Return the text of a computation with its values numbered as they come."""
    numbers = {}
    body = re.sub(r", metadata=\{[^}]*\}", "", body)
    return re.sub(r"%[\w.-]+", lambda name: f"%{numbers.setdefault(name[0], len(numbers))}", body)


def test_leaves_of_one_shape_share_their_kernels():
    text = traced_step(hs.adamw(1e-3, weight_decay=0.1), 12, shapes=3).lower().compile().as_text()
    bodies = re.findall(r"\n%fused_computation[^\n]* -> bf16\[\d+,128\] (\{\n.*?\n\})", text, re.DOTALL)
    assert len(bodies) == 12 * 3
    # Three of each shape, those of the first leaf of all in another order of operands: 12 if each shape had
    # a first leaf, as where a zero is shared right out of its loop; 36 if a leaf's own index stood in them.
    assert len(set(map(without_names, bodies))) <= 11


# --- bad rules ---------------------------------------------------------------------------------------------


def rule(update, *, name="Own", **members):
    """Return an instance of a rule with one moment, mu."""
    fields = {"b1": hs.decay_rate(0.9), "mu": hs.moment(rate="b1"), "update": update} | members
    fields["__annotations__"] = {"b1": Any}
    return dataclasses.dataclass(frozen=True)(type(name, (hs.Rule,), fields))()


def kept(self, g, p, n, moments, zero):
    return moments.mu.round(g)


BAD = [
    (
        lambda: rule(lambda self, g, p, n, moments, zero: moments.mu.round(g)[:1]),
        ValueError,
        "Own: the update that the rule returns is float32[1, 16], due is float32[8, 16]. "
        "Return float32 of the shape that came in.",
    ),
    (
        lambda: rule(lambda self, g, p, n, moments, zero: moments.mu.round(g).astype(jnp.bfloat16)),
        ValueError,
        "Own: the update that the rule returns is bfloat16[8, 16], due is float32[8, 16]. "
        "Return float32 of the shape that came in.",
    ),
    (
        lambda: rule(lambda self, g, p, n, moments, zero: moments.mu.round(g[0])),
        ValueError,
        "Own: what is stored as mu is float32[16], due is float32[8, 16]. "
        "Return float32 of the shape that came in.",
    ),
    (
        lambda: rule(lambda self, g, p, n, moments, zero: moments.nu.round(g)),
        AttributeError,
        "Own: update reads the moment nu, which the rule does not declare. "
        'Declare it: nu = moment(rate="...").',
    ),
    (
        lambda: rule(lambda self, g, p, n, moments, zero: g),
        ValueError,
        "Own: update never rounds mu, which so would stay zero. "
        "Call moments.mu.round(...) once, or do not declare it.",
    ),
    (
        lambda: rule(lambda self, g, p, n, moments, zero: moments.mu.round(moments.mu.round(g))),
        ValueError,
        "Own: mu is rounded twice in a step. Round it once.",
    ),
    (
        lambda: rule(kept, mu=hs.moment(rate="b2")),
        ValueError,
        "Own: the decay rate of the moment mu, b2, is no field. "
        "Declare it, or name another one: moment(rate=...).",
    ),
    (
        lambda: rule(kept, mu=hs.moment(rate="b1", shape=lambda shape: 3)),
        ValueError,
        "Own: the shape of mu for weights of (8, 16) is 3. Return a tuple of integers.",
    ),
    (
        lambda: rule(kept, mu_scale=hs.moment(rate="b1")),
        ValueError,
        "Own: the state has two fields mu_scale. Rename the moment.",
    ),
    (
        lambda: rule(kept, trace=hs.moment(rate="b1")),
        ValueError,
        "Own: the words of mu are those of another moment, trace. Rename it.",
    ),
    (
        lambda: rule(kept, scope="all"),
        ValueError,
        'Own: a rule of scope "all" keeps no moments. Use scope "parameter".',
    ),
    (
        lambda: rule(kept, scope="leaf"),
        ValueError,
        'Own: scope="leaf" is not a scope. Use "elementwise", "parameter" or "all".',
    ),
    (
        lambda: rule(kept, mu_dtype="ufloat8_e6m2"),
        ValueError,
        "Own: mu_dtype=ufloat8_e6m2 has no sign. Use it for nu, and a signed format for mu.",
    ),
    (
        lambda: rule(kept, b1=hs.decay_rate(1.5)),
        ValueError,
        "Own: b1=1.5 is outside [0, 1). Use a decay rate such as 0.9.",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD, ids=[row[2][:50] for row in BAD])
def test_a_bad_rule_is_refused_when_it_is_built(make, error, message):
    with pytest.raises(error) as caught:
        hs.as_transform(make())
    assert str(caught.value) == message


# --- products and sums -------------------------------------------------------------------------------------

LINKS = pathlib.Path(hs.__file__).parent


def bare_products(source: str) -> list[str]:
    """Return the sums in a source one of whose terms is a product as it stands."""

    def is_product(node):
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)

    sums = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.BinOp | ast.AugAssign))
    return [
        ast.unparse(n)
        for n in sums
        if isinstance(n.op, ast.Add | ast.Sub)
        and any(is_product(term) for term in ([n.left, n.right] if isinstance(n, ast.BinOp) else [n.value]))
    ]


@pytest.mark.parametrize("path", sorted([*LINKS.glob("rules/*.py"), *LINKS.glob("weights/*.py")]), ids=str)
def test_no_link_adds_a_bare_product(path):
    # Right op by op and another rounding under jit: `exact.add_product` keeps the two apart.
    assert bare_products(path.read_text()) == []


def test_a_bare_product_would_be_found():
    source = "u = g + b * m\nv -= b * m\nw = f(a * b) + c"
    assert sorted(bare_products(source)) == ["g + b * m", "v -= b * m"]
