"""A rule of a user's own becomes a transform like ours; one that cannot work is refused when it is built."""

import functools
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
from halfstep_jax.numbers.op import JaxOp
from on_jax.steps import assert_trees_same, gradients, run, take_step, weights


class Momentum(hs.Rule):
    """`trace`, as a user would write it."""

    decay: Any = hs.decay_rate()
    trace_dtype: Any = None
    seed: Any = 0
    trace = hs.moment(rate="decay")

    def update(self, g, p, n, m, op):
        return m.trace.round(g + n.decay * m.trace.value)


def mean(axis):
    return lambda x: x.mean(axis)


def outer(x, y):
    return x[..., :, None] * y[..., None, :]


class Factored(hs.Rule):
    """Adafactor's second moment: one average per row, one per column."""

    scope = "parameter"

    b2: Any = hs.decay_rate(0.99)
    eps: Any = hs.number(1e-8)
    rows = hs.moment(rate="b2", signed=False, shape=lambda shape: shape[:-1])
    columns = hs.moment(rate="b2", signed=False, shape=lambda shape: (*shape[:-2], shape[-1]))

    def update(self, g, p, n, m, op):
        square = g * g
        rows = m.rows.round(op.ema(m.rows.value, op.apply(mean(-1), square), n.b2))
        columns = m.columns.round(op.ema(m.columns.value, op.apply(mean(-2), square), n.b2))
        nu = op.apply(outer, rows, columns) / op.apply(lambda x: x.mean(-1)[..., None, None], rows)
        return g / (op.sqrt(nu) + n.eps)


class ClipByGlobalNorm(hs.Rule):
    """A rule that sees all arrays at once."""

    scope = "all"

    max_norm: Any = hs.number()

    def update(self, g, p, n, m, op):
        norm = op.sqrt(op.apply(lambda *squares: sum(map(jnp.sum, squares)), *(x * x for x in g)))
        factor = op.minimum(n.max_norm / norm, 1.0)
        return tuple(x * factor for x in g)


class PullTo(hs.Rule):
    """A rule that reads the weights and a schedule."""

    reads_params = "the link pulls params to zero"

    rate: Any = hs.number(schedule=True)

    def update(self, g, p, n, m, op):
        return g - n.rate * p


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


# --- numbers of a step -------------------------------------------------------------------------------------


def test_numbers_may_be_computed_with_one_another():
    class Scaled(hs.Rule):
        a: Any = hs.number(0.3)
        b: Any = hs.number(0.7)

        def numbers(self, h, t, op):
            return {"c": h.a * h.b + h.a / 3.0 + op.sqrt(h.b)}

        def update(self, g, p, n, m, op):
            return n.c * g

    a, b, third = np.float32(0.3), np.float32(0.7), np.float32(3)
    expected = a * b + a / third + np.sqrt(b)
    make = lambda a: hs.as_transform(Scaled(a))  # noqa: E731
    for tx in (make(0.3), optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)(0.3)):
        for update in (tx.update, jax.jit(tx.update)):
            updates, _ = update({"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)}))
            assert updates["w"].tolist() == [float(expected)] * 3


def test_the_count_of_a_step_may_be_moved_and_compared():
    class Counted(Momentum):
        def numbers(self, h, t, op):
            first, later = op.float32(t == 1), op.float32((t - 1) % 2)
            return {"code": first + 2.0 * later + 4.0 * op.float32(t + 1)}

        def update(self, g, p, n, m, op):
            m.trace.round(g)
            return n.code * g

    tx = hs.as_transform(Counted(0.5))
    state, seen = tx.init(tree()), []
    for _ in range(3):
        updates, state = tx.update({"w": jnp.ones((12, 8)), "v": jnp.ones((5, 6))}, state)
        seen.append(float(updates["w"][0, 0]))
    assert seen == [9.0, 14.0, 16.0]


# --- check_rule --------------------------------------------------------------------------------------------


def multiplied_and_added(x, y):
    return x * y + x


class Fused(Momentum):
    """A function of JAX in which XLA fuses a product with a sum."""

    decay: Any = hs.decay_rate(0.9)

    def update(self, g, p, n, m, op):
        t = m.trace.round(op.ema(m.trace.value, g, n.decay))
        return 3.0 * op.apply(multiplied_and_added, t, g) - g


class Unprotected(hs.Rule):
    """A product that the rule has taken out of its number."""

    def update(self, g, p, n, m, op):
        return op.wrap(g.value * g.value) + g


class Wide(hs.Rule):
    """All that a rule may declare, and most of what it may compute."""

    scope = "parameter"
    reads_params = "the rule compares both"

    a: float = hs.number(0.3)
    b: float = hs.number(0.7, schedule=True)
    b2: float = hs.decay_rate(0.99)
    wide_dtype: Any = None
    wide = hs.moment(rate="b2", signed=False)
    row = hs.moment(shape=lambda shape: shape[-1:])

    def numbers(self, h, t, op):
        return {"c": h.a * h.b, "r": op.unbias((h.b2, t))[0]}

    def update(self, g, p, n, m, op):
        wide = m.wide.round(op.ema(m.wide.value, g * g, n.b2))
        m.row.round(op.apply(lambda x: x.sum(0), g))
        u = op.where((g > p) & op.isfinite(g), g / op.sqrt(wide * n.r), (g * n.a) / n.b)
        u = op.clamp(u + n.c, -1.0, 1.0) * op.sign(p) - op.abs(p) * n.a
        return op.scaled(u, op.norm(p) / (op.norm(u, exact=True) + n.a)) + op.power(op.abs(g), n.b)


@pytest.mark.slow
def test_a_rule_is_held_against_numpy():
    for rule in (Momentum(0.9), Wide(), Wide(b=lambda count: 0.1 * count), ClipByGlobalNorm(0.1)):
        hs.check_rule(rule)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (Fused(), "return 3.0 * op.apply(multiplied_and_added, t, g) - g"),
        (Unprotected(), "return op.wrap(g.value * g.value) + g"),
    ],
)
def test_the_line_whose_result_differs_under_jit_is_named(rule, line):
    with pytest.raises(
        ValueError, match=rf"^{rule.name}: test_rule\.py, line \d+: {re.escape(line)}: the"
    ) as caught:
        hs.check_rule(rule)
    assert "differs under jax.jit from operations taken one by one" in str(caught.value)


@pytest.mark.slow
def test_the_operation_that_is_not_numpys_is_named(monkeypatch):
    monkeypatch.setattr(JaxOp, "root", lambda self, x: 1 / jax.lax.rsqrt(x))
    with pytest.raises(
        ValueError, match=r"wide: test_rule\.py, line \d+: u = op\.where.*differs from NumPy's in"
    ):
        hs.check_rule(Wide())
