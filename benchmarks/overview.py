"""Draws the pictures of README.md and of the site's home page, from the newest records.

python benchmarks/overview.py   # writes overview.svg, overview-dark.svg and language-model.svg in docs/images

The first two are of `make peers`. Left: what arrives of small updates. Right: bytes per parameter against
distance from float32. The other is of `make language-model`: the share of float32's improvement of the loss.
"""

from __future__ import annotations

import io
import math
import pathlib
from collections.abc import Callable

import matplotlib
from comparison import newest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"
# Colours of Okabe and Ito; text, lines and background of the page.
LIGHT = {"ours": "#0072b2", "theirs": "#d55e00", "ink": "#24292f", "faint": "#8c8c8c", "page": "#ffffff"}
DARK = {"ours": "#56b4e9", "theirs": "#e69f00", "ink": "#e6e6e6", "faint": "#8c8c8c", "page": "#1e2129"}
OURS = "halfstep_torch, "
BARS = {
    "halfstep_torch, default": "halfstep",
    "halfstep_torch, one_pass": "halfstep one_pass",
    "rollfast adamw, bfloat16 state": "rollfast",
    "HeavyBall AdamW, bfloat16 state": "HeavyBall",
    "optimi AdamW (Kahan)": "optimi",
    "torchao AdamW8bit, stochastic": "torchao 8-bit",
    "torchao _AdamW, stochastic": "torchao 16-bit",
    "torch AdamW(fused)": "torch fused",
    "optax.adamw": "optax",
    "bitsandbytes AdamW8bit": "bitsandbytes 8-bit",
}
"""The libraries of the left panel, from the top."""
# Of the right panel: what is written beside a point, and where, in points.
LABELS = {
    "halfstep_torch, full_precision": ("full_precision", -9, -3),
    "halfstep_torch, near_float32": ("near_float32", 8, -3),
    "halfstep_torch, default": ("default", -1, -14),
    "halfstep_torch, feedback": ("default with feedback", 8, -3),
    "halfstep_torch, eight_bit, feedback": ("eight_bit with feedback", 3, -16),
    "halfstep_torch, eight_bit": ("eight_bit", -5, -13),
    "halfstep_torch, one_pass": ("one_pass", -8, 2),
    "halfstep_torch, four_bit": ("four_bit", -8, -4),
    "torchao _AdamW, stochastic": ("as the default: torchao 16-bit,", -12, -41),
    "HeavyBall AdamW, bfloat16 state": ("", 2, 0),
    "torchastic AdamW": ("HeavyBall, torchastic, rollfast", -12, -53),
    "rollfast adamw, bfloat16 state": ("", 2, 0),
    "optax.adamw": ("", 0, 0),
    "torch AdamW(fused)": ("torch fused, optax", 8, -3),
    "torchao AdamW8bit, stochastic": ("torchao 8-bit", 8, -6),
    "torchao AdamW4bit, stochastic": ("torchao 4-bit", -8, -3),
    "torchao AdamWFp8, stochastic": ("torchao fp8", 8, 0),
    "bitsandbytes AdamW8bit": ("bitsandbytes 8-bit", 2, 7),
    "optimi AdamW (Kahan)": ("optimi", 8, -3),
    "HeavyBall AdamW, ecc bf16+8": ("HeavyBall ecc", 8, -3),
    "adamw-bf16 AdamWBF16": ("adamw-bf16", 8, -4),
    "flashoptim-jax flash_adamw": ("flashoptim-jax", 1, 10),
}
TIES = [
    "torchao _AdamW, stochastic",
    "HeavyBall AdamW, bfloat16 state",
    "torchastic AdamW",
    "rollfast adamw, bfloat16 state",
]
"""Libraries with the bytes of the default, and a distance within 0.01 of its own."""
OTHER_BATCHES = 0.12
"""The distance of a float32 run with other batches, measured in notebook 5."""


def points(record: dict) -> dict[str, tuple[float, float]]:
    """Return the bytes and the distance of every AdamW in PyTorch and of other libraries, by name."""
    rows = {row["key"]: row["figures"] for row in record["rows"]}
    return {
        name: (2 + rows["state"][name]["bytes per parameter"], figures["distance"])
        for name, figures in rows["network"].items()
        if math.isfinite(figures.get("distance", math.nan))
        and name not in ("torch Muon", "halfstep_jax, default")
    }


def _bars(axes: Axes, record: dict, look: dict[str, str]) -> None:
    (row,) = (row for row in record["rows"] if row["key"] == "small")
    axes.axvline(1, color=look["faint"], lw=1, ls="--")
    for place, (name, label) in enumerate(reversed(BARS.items())):
        value = row["figures"][name]["1e-06"]
        color = look["ours" if name.startswith(OURS) else "theirs"]
        axes.barh(place, value, color=color, height=0.62)
        axes.text(value + 0.03, place, f"{value:.2f}", va="center", color=look["ink"], fontsize=9)
        axes.text(-0.03, place, label, va="center", ha="right", color=look["ink"], fontsize=9)
    axes.set(xlim=(0, 1.4), yticks=[], xticks=[0, 1], xlabel="movement of the weights, of what is right")
    axes.set_title(
        "Small updates that arrive, learning rate 1e-6", loc="right", fontsize=11, color=look["ink"]
    )


def _scatter(axes: Axes, record: dict, look: dict[str, str]) -> None:
    axes.axhline(OTHER_BATCHES, color=look["faint"], lw=1, ls="--")
    axes.text(
        13.4, OTHER_BATCHES * 1.1, "float32, other batches", ha="right", fontsize=8, color=look["faint"]
    )
    for name, (size, distance) in points(record).items():
        ours = name.startswith(OURS)
        color = look["ours" if ours else "theirs"]
        # Libraries that tie with the default are drawn beside it: points that coincide would hide each other.
        aside = TIES.index(name) * 0.16 + 0.18 if name in TIES else 0
        axes.plot(
            size + aside, distance, color=color, ls="", marker="o" if ours else "s", ms=8 if ours else 5
        )
        text, x, y = LABELS[name]
        place = {"textcoords": "offset points", "xytext": (x, y), "ha": "left" if x > 0 else "right"}
        axes.annotate(text, (size, distance), **place, fontsize=8, color=color)
    axes.set(yscale="log", xlim=(1, 13.6), ylim=(4e-4, 40))
    axes.set_yticks([0.001, 0.01, 0.1, 1, 10], ["0.001", "0.01", "0.1", "1", "10"])
    axes.minorticks_off()
    for text, height, key in (("halfstep", 22, "ours"), ("other libraries", 11, "theirs")):
        axes.text(13.4, height, text, ha="right", color=look[key], fontsize=9, weight="bold")
    axes.set_xlabel("bytes per parameter: weights and optimizer state")
    axes.set_title("Distance from float32, against bytes", loc="left", fontsize=11, color=look["ink"])


def _overview(figure: Figure, record: dict, look: dict[str, str]) -> None:
    figure.set_size_inches(11, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _bars(left, record, look)
    _scatter(right, record, look)
    figure.subplots_adjust(left=0.12, right=0.99, top=0.92, bottom=0.12, wspace=0.12)


def _language_model(figure: Figure, record: dict, look: dict[str, str]) -> None:
    gained = {row["name"]: record["start"] - row["losses"][-1] for row in record["rows"]}
    whole = gained["float32, torch AdamW"]
    figure.set_size_inches(11, 0.8 + 0.3 * len(gained))
    axes = figure.subplots()
    for place, (name, value) in enumerate(reversed(gained.items())):
        color = look["theirs" if "torch" in name else "ours"]
        axes.barh(place, value / whole, color=color, height=0.62)
        axes.text(value / whole + 0.01, place, f"{value / whole:.1%}", va="center", color=look["ink"])
        axes.text(-0.01, place, name, va="center", ha="right", color=look["ink"])
    axes.set(
        xlim=(0, 1.15), yticks=[], xticks=[0, 1], xlabel="improvement of the held-out loss, of float32's"
    )
    figure.subplots_adjust(left=0.22, right=0.99, top=0.98, bottom=0.6 / (0.8 + 0.3 * len(gained)))


def picture(record: dict, look: dict[str, str], draw: Callable[..., None] = _overview) -> str:
    """Return a picture as SVG, the same text for the same record."""
    settings = {
        **{"svg.fonttype": "none", "svg.hashsalt": "halfstep", "font.family": "sans-serif"},
        **{f"axes.spines.{side}": False for side in ("top", "right")},
        **{name: look["ink"] for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")},
        **{"axes.edgecolor": look["faint"], "axes.facecolor": look["page"], "font.size": 9},
    }
    with matplotlib.rc_context(settings):
        figure = Figure(facecolor=look["page"])
        draw(figure, record, look)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


PICTURES: dict[str, tuple[str, dict[str, str], Callable[..., None]]] = {
    "overview.svg": ("silent_failures", LIGHT, _overview),
    "overview-dark.svg": ("silent_failures", DARK, _overview),
    "language-model.svg": ("language_model", LIGHT, _language_model),
}
"""By name: the record, colours, and what draws it."""


def main() -> None:
    """Write the pictures."""
    for name, (record, look, draw) in PICTURES.items():
        (IMAGES / name).write_text(picture(newest(record), look, draw))


if __name__ == "__main__":
    main()
