"""LAMB as a whole optimizer, and LAMB16: the order of their links. No arithmetic.

Contract: L3, L4. What LAMB16 set out to do, and what of it is kept: `docs/lamb16.md`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from halfstep_jax.rules.adam import scale_by_adam
from halfstep_jax.rules.learning_rate import scale_by_learning_rate
from halfstep_jax.rules.trust_ratio import scale_by_tempered_trust_ratio, scale_by_trust_ratio
from halfstep_jax.rules.weight_decay import add_decayed_weights
from halfstep_jax.storage.state_dtypes import StateDType, scaled
from halfstep_jax.weights.weight_storage import with_param_storage

LAMB16_MU = scaled("float8_e4m3fn", 128)
LAMB16_NU = scaled("ufloat8_e5m3", 128)


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[Any], Any] | None = None,
    mu_dtype: StateDType | None = None,
    *,
    nu_dtype: StateDType | None = None,
    mu_rounding: str = "auto",
    nu_rounding: str = "stochastic",
    param_storage: str = "stochastic",
    bias_correction: bool = True,
    max_norm: jax.typing.ArrayLike | None = 10.0,
    exact: bool = False,
    axis_names: Sequence[str] | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """LAMB for weights in bfloat16, float16 or float32: Adam, with a learning rate for each leaf.

    Chains `scale_by_adam`, `add_decayed_weights`, `scale_by_trust_ratio`, `scale_by_learning_rate` and the
    weight storage, by default `round_stochastically`. In float32 throughout, and with
    `max_norm=None`, it is `optax.lamb` to within rounding.

    Args:
        learning_rate: a number >= 0, a float32 scalar array, or a schedule. A step moves a leaf by about this
            share of its norm.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added under the root.
        weight_decay: a number >= 0, a float32 scalar array, or a schedule. The decay is part of the update
            whose norm is taken.
        mask: which leaves decay, as in `add_decayed_weights`.
        mu_dtype: "float32", "bfloat16", "float16" or a format (`scaled`, `codebook`); None: bfloat16 for
            bfloat16 params, else float32.
        nu_dtype: likewise, and "ufloat8_e6m2".
        mu_rounding: "auto", "stochastic", "nearest" or "nearest_unchecked"; see `scale_by_adam`.
        nu_rounding: likewise.
        param_storage: how 16-bit weights are stored, as in `adamw`. Under "split8", "split16" and "master"
            norms too are those of the float32 weights.
        bias_correction: present in v1 and the final paper, absent in v3. Without decay and `eps` the ratio
            cancels it up to rounding.
        max_norm: an upper bound on the norm of a weight, as in `scale_by_trust_ratio`: without one, steps at
            a constant rate grow with the weights. None for no bound, as `optax.lamb` has it.
        exact: add integers, so that norms, and with them the step, have the same bits in any order, on any
            mesh, and in torch, as in `scale_by_trust_ratio`.
        axis_names: inside `jax.shard_map`, the mesh axes over which arrays are cut, as in
            `scale_by_trust_ratio`.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform, the last before `optax.apply_updates`: what scales or averages its updates stands
        inside of `store_params`. Its updates are float32.

    Raises:
        TypeError: whatever the transforms raise.
        ValueError: whatever the transforms raise, or if `param_storage` is not a weight storage.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = jnp.ones(4)
        >>> tx = lamb(0.5)
        >>> updates, _ = tx.update(jnp.ones(4), tx.init(params), params)
        >>> print(optax.apply_updates(params, updates))
        [0.5 0.5 0.5 0.5]

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes",
        ICLR 2020, algorithm 2; arXiv:1904.00962, v1 and v3 for `bias_correction` (contract L3).
    """
    adam = scale_by_adam(
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        mu_rounding=mu_rounding,
        nu_rounding=nu_rounding,
        bias_correction=bias_correction,
        seed=seed,
    )
    trust = scale_by_trust_ratio(max_norm=max_norm, exact=exact, axis_names=axis_names)
    return _chained("lamb", adam, weight_decay, mask, trust, learning_rate, param_storage, seed)


def lamb16(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[Any], Any] | None = None,
    mu_dtype: StateDType | None = LAMB16_MU,
    *,
    nu_dtype: StateDType | None = LAMB16_NU,
    mu_rounding: str = "auto",
    nu_rounding: str = "stochastic",
    param_storage: str = "stochastic",
    bias_correction: bool = True,
    max_norm: jax.typing.ArrayLike | None = 10.0,
    trust_power: jax.typing.ArrayLike | None = 0.382,
    exact: bool = False,
    axis_names: Sequence[str] | None = None,
    seed: jax.typing.ArrayLike = 0,
) -> optax.GradientTransformationExtraArgs:
    """LAMB with 16 bits of state per parameter: LAMB16's goal, in formats that preserve the moments.

    `lamb` with its first moment in float8_e4m3fn and its second, rounded stochastically, in ufloat8_e5m3,
    each in blocks of 128 with a scale: 2.02 bytes per parameter; and with LAMB16's trust ratio:

        ratio = clamp((((1e-3 / learning_rate) |p|) / |u|)^trust_power, 0, 2), but 1 where |p| or |u| is 0

    so that a step is proportional to learning_rate^(1 - trust_power). As published, LAMB16 keeps under 1 % of
    the momentum of a large layer: it divides by the norm over n, where the block's largest magnitude is
    wanted. `docs/lamb16.md` has the figures.

    Args:
        learning_rate: as in `lamb`.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        eps_root: added under the root.
        weight_decay: as in `lamb`.
        mask: which leaves decay, as in `add_decayed_weights`.
        mu_dtype: as in `lamb`.
        nu_dtype: as in `lamb`.
        mu_rounding: "auto", "stochastic", "nearest" or "nearest_unchecked"; see `scale_by_adam`.
        nu_rounding: likewise.
        param_storage: how 16-bit weights are stored, as in `lamb`.
        bias_correction: as in `lamb`. The published code has none.
        max_norm: an upper bound on the norm of a weight, as in `lamb`.
        trust_power: a number in (0, 1), that of the published code unless given, or None for LAMB's own
            ratio. Not 1: the learning rate would cancel, and a schedule do nothing.
        exact: as in `lamb`: the same norms in torch. The power still differs by ulps, but for None.
        axis_names: as in `lamb`.
        seed: of the random words, for moments and weights alike.

    Returns:
        An Optax transform, the last before `optax.apply_updates`: what scales or averages its updates stands
        inside of `store_params`. Its updates are float32.

    Raises:
        TypeError: whatever the transforms raise.
        ValueError: whatever the transforms raise, or if `trust_power` is outside (0, 1).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
        >>> tx = lamb16(1e-2)
        >>> state = tx.init(params)
        >>> optax.tree.get(state, "mu")["w"].dtype, optax.tree.get(state, "nu_scale")["w"].shape
        (dtype(float8_e4m3fn), (64, 1))

    Source: vxst, "LAMB16", 2024, https://github.com/vxst/LAMB16, for the aim and the ratio; LAMB as in `lamb`
        (contract L4).
    """
    adam = scale_by_adam(
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        mu_rounding=mu_rounding,
        nu_rounding=nu_rounding,
        bias_correction=bias_correction,
        seed=seed,
    )
    if trust_power is None:
        trust = scale_by_trust_ratio(max_norm=max_norm, exact=exact, axis_names=axis_names)
    else:
        trust = scale_by_tempered_trust_ratio(
            learning_rate, trust_power, max_norm=max_norm, exact=exact, axis_names=axis_names
        )
    return _chained("lamb16", adam, weight_decay, mask, trust, learning_rate, param_storage, seed)


def _chained(caller: str, adam, weight_decay, mask, trust, learning_rate, param_storage: str, seed):
    """Return the links in LAMB's order: the trust ratio sees the decay, the learning rate scales it."""
    links = [adam, add_decayed_weights(weight_decay, mask), trust, scale_by_learning_rate(learning_rate)]
    return with_param_storage(caller, param_storage, links, seed)
