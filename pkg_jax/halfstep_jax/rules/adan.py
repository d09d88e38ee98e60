"""The Adan update rule as an Optax transform. Contract: A11."""

from halfstep.rules import adan
from halfstep_jax.transform import transform_of


class ScaleByAdan(adan.ScaleByAdan):
    """Rescale updates by Adan: Adam with an average of the differences between gradients.

    With t = count + 1, d the gradient less the last one as it was stored (0 at t = 1), r_i = 1 / (1 - b_i^t):

        grad <- round(g)
        nu <- round((b3 nu) + ((1 - b3) (g + (b2 d))^2))
        mu <- round((b1 mu) + ((1 - b1) g))
        diff <- round((b2 diff) + ((1 - b2) d))
        u = ((mu r1) + (b2 (diff r2))) / (sqrt(nu r3) + eps)

    All in float32, each operation rounded once; u reads what was stored. The four dtypes are as in
    `scale_by_adam`; `mu_rounding` is for diff and grad too. Errors are those of `scale_by_adam`.

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.array([1.0, -2.0], jnp.bfloat16)}
        >>> tx = scale_by_adan(nu_dtype="bfloat16")
        >>> updates, state = tx.update({"w": jnp.array([0.5, -0.5])}, tx.init(params))
        >>> print(updates["w"].dtype, state.diff["w"].dtype)
        float32 bfloat16

    Source: X. Xie et al., "Adan", arXiv:2208.06677, algorithm 1, with rates written as 1 - b; Optax 0.2.8 has
        1 - b2 for b2 before the difference. Storage and rounding are ours (contract A11, F).
    """


scale_by_adan = transform_of(ScaleByAdan)
