"""optax.adamw, held against the contract.

python -m halfstep_spec.check examples/adapters/optax_adamw.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def number(case, name):
    """Return a number of a case."""
    return float(case.inputs[name].bits.view(np.float32))


def to_jax(array, bits=None):
    """Return patterns as an array of their own dtype."""
    bits = array.bits if bits is None else bits
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(array.dtype))


def to_patterns(rows, like):
    """Return arrays, one a step, as the patterns that a case expects."""
    stacked = np.stack([np.asarray(row) for row in rows])
    return like.dtype, stacked.view(f"uint{8 * stacked.itemsize}")


def adam_step(case):
    """Steps of optax.adamw; it keeps the second moment in the dtype of the weights, all to nearest."""
    a, i = case.arguments, case.inputs
    p, g, mu, nu = (to_jax(i[name]) for name in ("p", "g", "mu", "nu"))
    plain = all(isinstance(a[name], str) for name in ("mu_dtype", "nu_dtype"))
    rounded = {a[f"{name}_rounding"] for name in ("mu", "nu") if a[f"{name}_dtype"] != "float32"}
    nearest = rounded <= {"nearest"} and (a["param_storage"] == "nearest" or p.dtype == jnp.float32)
    if not plain or not nearest or a["decay"] != "decoupled" or nu.dtype != p.dtype:
        raise NotImplementedError("formats, roundings and weight storages that it does not have")
    betas = number(case, "b1"), number(case, "b2")
    tx = optax.adamw(
        number(case, "learning_rate"),
        *betas,
        number(case, "eps"),
        number(case, "eps_root"),
        mu_dtype=mu.dtype,
        weight_decay=number(case, "weight_decay"),
        nesterov=bool(a.get("nesterov")),
    )
    first, *rest = tx.init(p)
    count = jnp.asarray(i["count"].bits).astype(jnp.int32).reshape(())
    state, update, rows = (first._replace(count=count, mu=mu, nu=nu), *rest), jax.jit(tx.update), []
    for gradient in g:
        updates, state = update(gradient, state, p)
        p = optax.apply_updates(p, updates)
        rows.append((p, state[0].mu, state[0].nu))
    columns = zip(("p", "mu", "nu"), zip(*rows, strict=True), strict=True)
    return {name: to_patterns(column, case.outputs[name]) for name, column in columns}
