"""halfstep_jax as a backend: op by op, under jit, and under jit over eight devices."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import halfstep_jax as hs
from backends.protocol import (
    MEANS,
    Backend,
    adafactor_links,
    codes_of,
    link_of,
    offset_of,
    ratio_numbers,
    rule_arguments,
    scalar,
    seed_of,
    stored_links,
    stored_names,
    unrefused,
)
from halfstep.random_words import threefry2x32
from halfstep.rules.adafactor import inverse_power
from halfstep.rules.adamw_fed_back import AdamWFedBack
from halfstep.rules.adamw_in_codes import AdamWInCodes
from halfstep.rules.sgd_fed_back import SGDFedBack
from halfstep_jax.numbers.global_norm import global_norm
from halfstep_jax.numbers.moments import bias_correction
from halfstep_jax.numbers.norms import Norms, norms
from halfstep_jax.numbers.op import JaxOp
from halfstep_jax.numbers.random_words import leaf_keys
from halfstep_jax.rules.clip import clip
from halfstep_jax.rules.trust_ratio import ScaleByTemperedTrustRatio, ScaleByTrustRatio
from halfstep_jax.storage.formats import Format
from halfstep_jax.storage.relative import to_unit
from halfstep_jax.xla.exact import opaque_zero
from halfstep_spec.vectors import Array, Case

_DEVICES = 8
_ALIASES = {
    "adam_step": (hs.adam, hs.adamw),
    "lion_step": (functools.partial(hs.lion, weight_decay=0), hs.lion),
    "trace_step": (lambda rate, decay, **options: hs.sgd(rate, decay, **options), None),
    "lamb_step": (
        None,
        lambda rate, **options: (hs.lamb16 if "trust_power" in options else hs.lamb)(
            rate, **{"max_norm": None, **options}
        ),
    ),
}
"""By op: the alias without decay, and that with decoupled decay."""
_WRAPPERS = {
    "nearest": lambda tx, seed: tx,
    "stochastic": lambda tx, seed: optax.chain(tx, hs.round_stochastically(seed)),
    "compensated": lambda tx, seed: optax.chain(tx, hs.compensate()),
    "split8": lambda tx, seed: hs.split_params(tx, 8, seed=seed),
    "split16": lambda tx, seed: hs.split_params(tx, 16, seed=seed),
    "master": lambda tx, seed: hs.keep_master_params(tx),
}


def to_numpy(array: Array) -> np.ndarray:
    """Return an array of patterns as a NumPy array of its own dtype."""
    return array.bits.view(getattr(ml_dtypes, array.dtype, array.dtype))


def from_jax(values) -> Array:
    """Return a JAX array as patterns."""
    values = np.asarray(values)
    return Array.of(values.view(f"u{values.itemsize}"), str(values.dtype))


class JaxBackend(Backend):
    """JAX, on its default device.

    Attributes:
        mode: "eager", "jit" or "sharded" (jit, arrays in eight parts along their only axis).
    """

    def __init__(self, mode: str):
        self.mode = mode
        if mode == "sharded":
            assert jax.device_count() >= _DEVICES, (
                "set --xla_force_host_platform_device_count=8 before importing jax"
            )
            mesh = Mesh(np.array(jax.devices()[:_DEVICES]), ("x",))
            self._split = NamedSharding(mesh, PartitionSpec("x"))

    def _compiled(self, function):
        return function if self.mode == "eager" else jax.jit(function)

    def _put(self, array: Array):
        """Place a vector; sharded, pad its end to a multiple of the devices: indices stay what they are."""
        values = to_numpy(array)
        if self.mode != "sharded" or values.ndim != 1:
            return jnp.asarray(values)
        padded = np.concatenate([values, np.zeros(-values.size % _DEVICES, values.dtype)])
        return jax.device_put(padded, self._split)

    def fold(self, case: Case) -> dict[str, Array]:
        zero = jnp.zeros(1, jnp.uint32)
        key = jnp.asarray(case.inputs["key"].bits)
        words = self._compiled(threefry2x32)((key[:1], key[1:]), (zero, jnp.asarray(case.inputs["x"].bits)))
        return {"key": from_jax(jnp.concatenate(words))}

    def leaf_id(self, case: Case) -> dict[str, Array]:
        return {"id": Array.of(np.array([hs.leaf_id(case.arguments["leaf"])], np.uint32))}

    def leaf_key(self, case: Case) -> dict[str, Array]:
        leaves, roles = [hs.leaf_id(case.arguments["leaf"])], [case.arguments["role"]]

        def key(seed, step):
            keys = leaf_keys(seed, step, leaves, roles)
            return jnp.concatenate([keys.k0[0], keys.k1[0]])

        return {
            "key": from_jax(
                self._compiled(key)(*(jnp.asarray(to_numpy(case.inputs[n])) for n in ("seed", "step")))
            )
        }

    def random_words(self, case: Case) -> dict[str, Array]:
        a = case.arguments

        def words(seed, step):
            return hs.random_words(seed, step, a["leaf"], a["role"], tuple(a["shape"]), offset_of(case))

        step = jnp.asarray(to_numpy(case.inputs["step"]))
        return {"words": from_jax(self._compiled(words)(jnp.asarray(case.inputs["seed"].bits), step))}

    def round_to(self, case: Case) -> dict[str, Array]:
        a = case.arguments
        x = self._put(case.inputs["x"])
        words = self._put(case.inputs["words"]) if "words" in case.inputs else None
        y = self._compiled(functools.partial(hs.round_to, dtype=a["dtype"], saturate=a["saturate"]))(
            x, words=words
        )
        return {"y": from_jax(y[: case.inputs["x"].bits.size])}

    def bias_correction(self, case: Case) -> dict[str, Array]:
        counts = jnp.asarray(to_numpy(case.inputs["count"]))
        b = np.float32(scalar(case, "b"))
        correction = self._compiled(functools.partial(bias_correction, b))
        return {"correction": from_jax(jnp.stack([correction(t) for t in counts]))}

    def round_stochastically(self, case: Case) -> dict[str, Array]:
        size = case.inputs["p"].bits.size
        params, updates = (_tree(case, self._put(case.inputs[name])) for name in ("p", "u"))
        tx = hs.round_stochastically(seed_of(case))
        state = optax.tree.set(tx.init(params), count=jnp.int32(to_numpy(case.inputs["step"]) - 1))

        def apply(params, updates, state):
            updates, _ = tx.update(updates, state, params)
            return updates, optax.apply_updates(params, updates)

        emitted, applied = self._compiled(apply)(params, updates, state)
        return {"u": from_jax(_leaf(emitted)[:size]), "p": from_jax(_leaf(applied)[:size])}

    def encode(self, case: Case) -> dict[str, Array]:
        a = case.arguments
        fmt = Format(a["dtype"], a["scaled"], a["block_size"], 0, 0, **codes_of(case))
        x, words = (self._split_rows(case.inputs[n]) if n in case.inputs else None for n in ("x", "words"))

        def there_and_back(x, words):
            stored = fmt.encode(x, words, keep_nonzero=a["keep_nonzero"])
            return stored, fmt.decode(stored, words)

        stored, values = self._compiled(there_and_back)(x, words)
        outputs = {"codes": from_jax(stored.codes), "values": from_jax(values)}
        return outputs | ({} if stored.scale is None else {"scale": from_jax(stored.scale)})

    def to_unit(self, case: Case) -> dict[str, Array]:
        m, v = (self._put(case.inputs[name]) for name in ("m", "v"))
        z = self._compiled(lambda m, v: to_unit(m, v, opaque_zero()))(m, v)
        return {"z": from_jax(z[: case.inputs["v"].bits.size])}

    def _split_rows(self, array: Array):
        """Place a vector; sharded, in eight parts along its first axis, if that can be divided."""
        values = to_numpy(array)
        whole = self.mode != "sharded" or not values.shape or values.shape[0] % _DEVICES
        return jnp.asarray(values) if whole else jax.device_put(values, self._split)

    def step(self, case: Case) -> dict[str, Array]:
        i = case.inputs
        put = self._put if i["p"].bits.ndim == 1 else self._split_rows
        names = stored_names(case)
        tx = _transform(case)
        # A row or a column that is not in use has one element, and nothing to divide.
        placed = {name: self._split_rows for name in names if i[name].bits.size == 1}
        p, *stored = (_stored(case, name, placed.get(name, put)(i[name])) for name in ("p", *names))
        fields = [_field(case, name) for name in names]
        given = dict(zip(fields, stored, strict=True))
        count = jnp.int32(to_numpy(i["count"]))
        state = _with_fields(tx.init(p), {"count": count, "outer_count": count, **given})

        def step(params, state, gradient):
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        step, rows = self._compiled(step), []
        for bits in i["g"].bits:
            gradient = _tree(case, put(Array(i["g"].dtype, bits)))
            p, state = step(p, state, gradient)
            now = (optax.tree.get(state, field) for field in fields)
            rows.append([np.asarray(_leaf(tree))[: bits.size] for tree in (p, *now)])
        columns = zip(("p", *names), zip(*rows, strict=True), strict=True)
        return {name: from_jax(np.stack(column)) for name, column in columns}

    def mean(self, case: Case) -> dict[str, Array]:
        def means(x):
            op = JaxOp("mean", opaque_zero())
            return {n: op.bare(op.mean(op.wrap(x), axis)) for n, axis in MEANS.items()}

        made = self._compiled(means)(self._split_rows(case.inputs["x"]))
        return {n: from_jax(x) for n, x in made.items()}

    def inverse_power(self, case: Case) -> dict[str, Array]:
        def power(t, c):
            op = JaxOp("inverse_power")
            return op.bare(inverse_power(op.float32(t), op.wrap(c), op))

        counts, powers = (jnp.asarray(to_numpy(case.inputs[n])) for n in ("count", "power"))
        return {"y": from_jax(self._compiled(power)(counts[:, None], powers))}

    def norm(self, case: Case) -> dict[str, Array]:
        return {"norm": from_jax(self._compiled(norms)(self._put(case.inputs["x"])).whole)}

    def global_norm(self, case: Case) -> dict[str, Array]:
        arrays = [self._put(x) for _, x in sorted(case.inputs.items())]
        exact = case.arguments.get("exact", True)
        return {"norm": from_jax(self._compiled(functools.partial(global_norm, exact=exact))(arrays))}

    def clip(self, case: Case) -> dict[str, Array]:
        def clipped(u, norm, max_norm):
            op = JaxOp("clip_by_global_norm", opaque_zero())
            # Of a norm that is given alone nobody knows that of 2^-64 u: it is given as an infinite one.
            (u,) = clip([op.wrap(u)], Norms(norm, jnp.float32(jnp.inf)), op.wrap(max_norm), op)
            return op.bare(u)

        if "norm" not in case.inputs:
            tx = hs.clip_by_global_norm(scalar(case, "max_norm"), **case.arguments)
            return {"u": self._link_alone(tx, case.inputs["u"])}
        operands = (self._put(case.inputs[name]) for name in ("u", "norm", "max_norm"))
        return {"u": from_jax(self._compiled(clipped)(*operands)[: case.inputs["u"].bits.size])}

    def accumulate(self, case: Case) -> dict[str, Array]:
        g = case.inputs["g"]
        tx = hs.accumulate_gradients(optax.identity(), 1000, g.dtype, case.inputs["seed"].bits)
        rows = [{case.arguments["leaf"]: self._put(Array(g.dtype, bits))} for bits in g.bits]
        state = tx.init(rows[0])._replace(outer_count=jnp.asarray(to_numpy(case.inputs["count"])))
        update, totals = self._compiled(tx.update), []
        for row in rows:
            _, state = update(row, state)
            totals.append(state.acc_grads[case.arguments["leaf"]][: g.bits.shape[1]])
        return {"total": from_jax(jnp.stack(totals))}

    def ema_params(self, case: Case) -> dict[str, Array]:
        i, leaf = case.inputs, case.arguments["leaf"]
        ema = hs.ema_params(scalar(case, "decay"), i["seed"].bits)
        state = ema.init({leaf: self._put(i["average"])})
        state = state._replace(count=jnp.asarray(to_numpy(i["count"])))
        update, averages = self._compiled(ema.update), []
        for bits in i["p"].bits:
            average, state = update({leaf: self._put(Array(i["p"].dtype, bits))}, state)
            averages.append(average[leaf][: bits.size])
        return {"average": from_jax(jnp.stack(averages))}

    def newton_schulz(self, case: Case) -> dict[str, Array]:
        axes = {name: tuple(case.arguments[name]) for name in ("reduction_axis", "output_axis")}
        tx = hs.scale_by_muon(beta=0.0, nesterov=False, scale=None, mu_dtype="float32", **axes)
        x = jnp.asarray(to_numpy(case.inputs["x"]))
        return {"factor": from_jax(self._compiled(lambda x: tx.update(x, tx.init(x))[0])(x))}

    def trust_ratio(self, case: Case) -> dict[str, Array]:
        if "u" in case.inputs:
            tx = hs.scale_by_trust_ratio(**ratio_numbers(case), **case.arguments)
            return {"u": self._link_alone(tx, case.inputs["u"], case.inputs["p"])}
        numbers = {name: np.float32(value) for name, value in ratio_numbers(case).items()}
        power = numbers.pop("power", None)
        rule = ScaleByTrustRatio() if power is None else ScaleByTemperedTrustRatio(power, 1.0)
        unbounded = {"trust_coefficient": 1.0, "min_norm": 0.0, "max_norm": np.inf, "eps": 0.0}
        unbounded |= {"min_ratio": 0.0, "max_ratio": np.inf, "trust_power": power or 1.0}

        def ratio(p_norm, u_norm):
            op = JaxOp(rule.name, opaque_zero())
            n = types.SimpleNamespace(**{name: op.number(x) for name, x in (unbounded | numbers).items()})
            return op.bare(rule.ratio(op.wrap(p_norm), op.wrap(u_norm), op.wrap(jnp.float32(1)), n, op))

        norms = (jnp.asarray(to_numpy(case.inputs[name])) for name in ("p_norm", "u_norm"))
        return {"ratio": from_jax(self._compiled(ratio)(*norms))}

    def _link_alone(self, tx: Any, u: Array, p: Array | None = None) -> Array:
        """Return what a link makes of updates."""
        size = u.bits.size
        u, p = self._put(u), None if p is None else self._put(p)
        return from_jax(self._compiled(lambda u, p: tx.update(u, tx.init(u), p)[0])(u, p)[:size])

    def store_state_step(self, case: Case) -> dict[str, Array]:
        """Take steps from a new state; scales stand where the state's own tree has its arrays."""
        i, put = case.inputs, self._split_rows
        tx = optax.chain(*stored_links(case, hs))
        p = _tree(case, put(i["p"]))
        state, rows = tx.init(p), []
        names = stored_names(case)

        def step(params, state, gradient):
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        step = self._compiled(step)
        for bits in i["g"].bits:
            p, state = step(p, state, _tree(case, put(Array(i["g"].dtype, bits))))
            stored: Any = optax.tree.get(state, "StoreStateState")
            inner: Any = stored.inner_state
            scale: Any = stored.scale
            kept = {name: getattr(inner, name) for name in names if not name.endswith("_scale")}
            kept |= {
                f"{name}_scale": scale[f"{name}/{case.arguments['leaf']}"]
                for name in kept
                if f"{name}_scale" in i
            }
            rows.append([np.asarray(_leaf(tree)) for tree in (p, *(kept[name] for name in names))])
        columns = zip(("p", *names), zip(*rows, strict=True), strict=True)
        return {name: from_jax(np.stack(column)) for name, column in columns}


def _with_fields(state, values: dict[str, Any]):
    """Return a state with other values of all fields of these names: `optax.tree.set` stops at the first."""
    if not isinstance(state, tuple):
        return state
    if not hasattr(state, "_fields"):
        return tuple(_with_fields(part, values) for part in state)
    fields = zip(state._fields, state, strict=True)
    return state._replace(**{n: values[n] if n in values else _with_fields(x, values) for n, x in fields})


def _field(case: Case, name: str) -> str:
    """Return the state's field for a name of a case."""
    kept = {"compensated": "compensation", "master": "master"}
    return kept.get(case.arguments["param_storage"], "extra") if name == "extra" else name


def _transform(case: Case) -> optax.GradientTransformationExtraArgs:
    """Return the public alias that a case asks for; under L2 decay, behind a link of that.

    A rule without an alias stands in a chain.
    """
    a, options = case.arguments, unrefused(rule_arguments(case, hs))
    decay, rate, storage = scalar(case, "weight_decay"), scalar(case, "learning_rate"), a["param_storage"]
    if case.op == "adafactor_step":
        return _WRAPPERS[storage](optax.chain(*adafactor_links(case, hs)), seed_of(case))
    if case.op == "adamw_in_codes_step":
        return hs.as_transform(AdamWInCodes(rate, **options, weight_decay=decay))
    if "rates" in case.inputs:
        first, rates = int(case.inputs["count"].bits), case.inputs["rates"].bits.view(np.float32)
        rate = lambda count: jnp.asarray(rates)[count - first]  # noqa: E731
    if case.op == "adamw_fed_back_step":
        l2 = a["decay"] == "l2"
        tx = hs.as_transform(AdamWFedBack(rate, **options, weight_decay=0.0 if l2 else decay))
        return optax.chain(hs.add_decayed_weights(decay), tx) if l2 else tx
    if case.op == "sgd_fed_back_step":
        tx = hs.as_transform(SGDFedBack(rate, **options))
        return optax.chain(hs.add_decayed_weights(decay), tx) if decay else tx
    if case.op not in _ALIASES:
        decayed = hs.add_decayed_weights(decay, cautious=a["decay"] == "cautious")
        chained = [link_of(case, hs), decayed, hs.scale_by_learning_rate(rate)]
        return _WRAPPERS[storage](optax.chain(*chained), seed_of(case))
    plain, decayed = _ALIASES[case.op]
    if a["decay"] == "cautious":
        options["cautious"] = True
    if a["decay"] in ("decoupled", "cautious"):
        return decayed(rate, **options, weight_decay=decay, param_storage=storage)
    inside = plain(rate, **options, param_storage="nearest")
    return _WRAPPERS[storage](optax.chain(hs.add_decayed_weights(decay), inside), seed_of(case))


def _tree(case: Case, leaf):
    """Nest a leaf in dicts, so that its key path is the case's leaf name."""
    for key in reversed(case.arguments["leaf"].split("/")):
        leaf = {key: leaf}
    return leaf


def _stored(case: Case, name: str, leaf):
    """Nest a leaf as the state does: scales stand by name."""
    return {case.arguments["leaf"]: leaf} if name.endswith("_scale") else _tree(case, leaf)


def _leaf(tree):
    (leaf,) = jax.tree.leaves(tree)
    return leaf
