"""Every link by itself, straight before `optax.apply_updates` and before a link of Optax: jit changes no bit.

What comes after a link adds its updates to weights. Where a link's last product is not protected, XLA fuses
product and sum. Some weights then differ from the weights of a step that is taken op by op.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from halfstep_jax.rules.trust_ratio import scale_by_tempered_trust_ratio
from on_jax.steps import assert_trees_same, take_step

SIZE = 600
LINKS = {
    "scale_by_adam": hs.scale_by_adam,
    "nesterov": functools.partial(hs.scale_by_adam, nesterov=True, eps_root=1e-6),
    "scale_by_adan": hs.scale_by_adan,
    "scale_by_lion": hs.scale_by_lion,
    "trace": functools.partial(hs.trace, 0.9, nesterov=True),
    "add_decayed_weights": functools.partial(hs.add_decayed_weights, 0.3),
    "absolute decay": functools.partial(hs.add_decayed_weights, 0.3, absolute=True),
    "scale_by_learning_rate": functools.partial(hs.scale_by_learning_rate, 0.3),
    "scale_by_trust_ratio": hs.scale_by_trust_ratio,
    "tempered trust ratio": functools.partial(
        scale_by_tempered_trust_ratio, learning_rate=1e-3, trust_power=0.382
    ),
    "clip_by_global_norm": functools.partial(hs.clip_by_global_norm, 300.3),
    "exact clip": functools.partial(hs.clip_by_global_norm, 300.3, exact=True),
    "round_stochastically": hs.round_stochastically,
    "compensate": hs.compensate,
    "store_state": lambda: hs.store_state(hs.scale_by_adam(mu_dtype="float32"), "bfloat16"),
    "split_params": lambda: hs.split_params(hs.scale_by_learning_rate(0.3)),
    "keep_master_params": lambda: hs.keep_master_params(hs.scale_by_learning_rate(0.3)),
}
QUICK = ("scale_by_learning_rate", "scale_by_trust_ratio", "clip_by_global_norm")
STORES = ("round_stochastically", "compensate", "split_params", "keep_master_params")


def integers(seed: int, least: int) -> jax.Array:
    """Return integers of both signs: the sum of their squares is exact in any order, and so is a norm."""
    rng = np.random.default_rng(seed)
    values = rng.integers(least, 30, SIZE) * rng.choice([-1, 1], SIZE)
    return jnp.asarray(values.astype(np.float32))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LINKS]
)
def test_a_link_alone_gives_under_jit_the_bits_that_it_gives_op_by_op(name):
    dtype = "bfloat16" if name in STORES else "float32"
    params = {"w": integers(0, 1).astype(dtype)}
    gradient = {"w": integers(1, 0)}
    # Half of a product is exact: what is fused with it, or taken out of it, is ours.
    for behind in ([],) if name in STORES else ([], [optax.scale(0.5)]):
        tx = optax.chain(LINKS[name](), *behind)
        step = functools.partial(take_step, tx)
        expected = step(*step(params, tx.init(params), gradient), gradient)
        actual = jax.jit(step)(*jax.jit(step)(params, tx.init(params), gradient), gradient)
        assert_trees_same(actual, expected, name)
        assert (actual[0]["w"] != params["w"]).any()
