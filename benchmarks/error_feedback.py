"""How far weights walk from float32's when errors of storing mu add up, and when steps feed them back.

    python benchmarks/error_feedback.py

Gradients are normal and independent, so that a moment is all noise: the hardest case. Adam's updates on
16,384 elements are summed, with mu in float32 and in four formats. The figure is the root mean square of the
distance between a format's sum and float32's sum, in learning rates. Prints it after 100 and 2,000 steps;
draws docs/images/error_feedback.png.
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import halfstep_jax as hs

matplotlib.use("Agg")  # files only: no display needed

import matplotlib.pyplot as plt

STEPS, SHAPE = 2000, (128, 128)
PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "images" / "error_feedback.png"
FORMATS = {
    "bfloat16": "bfloat16",
    "e4m3fn, blocks of 128": hs.scaled("float8_e4m3fn"),
    "relative e3m4": hs.relative("float8_e3m4"),
    "relative int4, blocks of 32": hs.relative("int4", 32),
}


def walk(mu_dtype, rounding: str) -> np.ndarray:
    """Return the root mean square of the distance after every step; nu is float32, so mu alone differs."""
    ours = hs.scale_by_adam(mu_dtype=mu_dtype, nu_dtype="float32", mu_rounding=rounding, seed=1)
    exact = hs.scale_by_adam(mu_dtype="float32", nu_dtype="float32")
    zeros = jnp.zeros(SHAPE)

    def step(carry, t):
        off, state, truth = carry
        g = jax.random.normal(jax.random.fold_in(jax.random.key(0), t), SHAPE)
        (u, state), (due, truth) = ours.update(g, state), exact.update(g, truth)
        off = off + (u - due)
        return (off, state, truth), jnp.sqrt(jnp.mean(off * off))

    start = (zeros, ours.init(zeros), exact.init(zeros))
    return np.asarray(jax.jit(lambda: jax.lax.scan(step, start, jnp.arange(STEPS))[1])())


def main() -> None:
    """Print the table and draw the picture."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    print("| mu | stochastic: 100, 2,000 steps | feedback: 100, 2,000 steps |\n|---|--:|--:|")
    walks = {
        name: [walk(fmt, rounding) for rounding in ("stochastic", "feedback")]
        for name, fmt in FORMATS.items()
    }
    for name, (stochastic, feedback) in walks.items():
        cells = (f"{x[99]:.3f}, {x[-1]:.3f}" for x in (stochastic, feedback))
        print(f"| {name} | {' | '.join(cells)} |")
        axes[0].plot(stochastic, label=name)
        axes[1].plot(feedback, label=name)
    for axis, title in zip(axes, ('mu_rounding="stochastic"', 'mu_rounding="feedback"'), strict=True):
        axis.set(xlabel="steps", yscale="log", title=title)
    axes[0].set_ylabel("distance from float32, in learning rates")
    axes[1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
