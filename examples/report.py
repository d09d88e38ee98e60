"""What the demo shows for its runs: the table, the picture, and the check of its own claim.

`python examples/report.py out/demo.json` prints the table and draws the picture again, without training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no window, no display needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from recipe import FLOAT32, NEAREST, STOCHASTIC, Outcome, Recipe

# Nats per character. Measured over seeds 0, 1 and 2 and both frameworks: another seed moves the float32 loss
# by up to 0.06, stochastic rounding by up to 0.003, nearest rounding by 0.35 to 0.37. Within FOLLOWS nobody
# could tell stochastic rounding from another seed; STALLS is five times that, and under a third of what was
# measured.
FOLLOWS = 0.02
STALLS = 0.1

# Colours of Okabe and Ito. float32 is drawn broad, so that it is seen under the line that covers it.
STYLES = {
    FLOAT32.name: {"color": "#b5b5b5", "linewidth": 6.0, "solid_capstyle": "round"},
    NEAREST.name: {"color": "#d55e00", "linewidth": 1.8},
    STOCHASTIC.name: {"color": "#0072b2", "linewidth": 1.8},
}
LABEL_COLORS = {FLOAT32.name: "#767676", NEAREST.name: "#d55e00", STOCHASTIC.name: "#0072b2"}


def by_framework(outcomes: list[Outcome]) -> dict[str, dict[str, Outcome]]:
    """Group the runs: framework, then row."""
    groups: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.framework, {})[outcome.row] = outcome
    return groups


def over_float32(outcome: Outcome, outcomes: list[Outcome]) -> float:
    """Return how far the run's last validation loss is above the float32 run of the same framework."""
    return outcome.losses[-1] - by_framework(outcomes)[outcome.framework][FLOAT32.name].losses[-1]


def table(outcomes: list[Outcome]) -> str:
    """Write one line per run, as a Markdown table."""
    head = [
        "framework",
        "weights",
        "validation loss",
        "vs float32",
        "bytes per parameter",
        "unchanged weights",
    ]
    lines = [head, ["---", "---", "--:", "--:", "--:", "--:"]]
    for outcome in outcomes:
        cells = [outcome.framework, outcome.row]
        difference = round(over_float32(outcome, outcomes), 3) + 0.0  # + 0.0: no minus before a zero
        cells += [f"{outcome.losses[-1]:.3f}", f"{difference:+.3f}"]
        cells += [f"{outcome.bytes_per_parameter:.1f}", f"{outcome.never_moved:.1%}"]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def broken_claims(outcomes: list[Outcome]) -> list[str]:
    """Say, in sentences, where the runs do not show what the demo is there to show; empty if they do."""
    problems = []
    for outcome in outcomes:
        difference = over_float32(outcome, outcomes)
        where = f"{outcome.framework}: the row '{outcome.row}' ends {difference:+.3f} over float32"
        if outcome.row == NEAREST.name and not difference > STALLS:
            problems.append(f"{where}; to show the stall it must be over +{STALLS}.")
        if outcome.row == STOCHASTIC.name and not abs(difference) < FOLLOWS:
            problems.append(f"{where}; to follow it must be within {FOLLOWS}.")
    if len({outcome.batches_crc32 for outcome in outcomes}) > 1:
        problems.append("The runs did not see the same batches.")
    return problems


def draw(path: Path, outcomes: list[Outcome], recipe: Recipe) -> None:
    """Draw the loss curves, one panel per framework, every line labelled at its end."""
    groups = by_framework(outcomes)
    figure, panels = plt.subplots(1, len(groups), figsize=(9.8, 4.2), sharey=True, squeeze=False)
    for axes, (framework, rows) in zip(panels[0], groups.items(), strict=True):
        draw_panel(axes, rows)
        axes.set_title(framework, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("updates")
    panels[0][0].set_ylabel("validation loss (nats per character)")
    title = "bfloat16 weights stall under nearest rounding, and follow float32 under stochastic rounding"
    figure.text(0.015, 0.975, title, fontsize=12, va="top")
    figure.text(0.015, 0.915, caption(groups, recipe), fontsize=9, color="#666666", va="top")
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path, dpi=150, pil_kwargs={"optimize": True})
    plt.close(figure)


def caption(groups: dict[str, dict[str, Outcome]], recipe: Recipe) -> str:
    """Say what was trained, and what the two dtypes cost."""
    rows = next(iter(groups.values()))
    wide, narrow = rows[FLOAT32.name], rows[STOCHASTIC.name]
    return (
        f"Character transformer, {wide.parameters:,} parameters. "
        f"AdamW, learning rate {recipe.learning_rate:g}. "
        f"Bytes per parameter, weights and state: float32 {wide.bytes_per_parameter:.0f}, "
        f"bfloat16 {narrow.bytes_per_parameter:.0f}."
    )


def draw_panel(axes: Axes, rows: dict[str, Outcome]) -> None:
    """Draw one framework's lines, without the loss before training: it is the same for all, and far above."""
    for name, outcome in rows.items():
        axes.plot(outcome.steps[1:], outcome.losses[1:], **STYLES[name])
    last = max(outcome.steps[-1] for outcome in rows.values())
    axes.set_xlim(0, last)
    low, high = axes.get_ylim()
    gap = (high - low) * 0.055
    heights = label_heights({name: outcome.losses[-1] for name, outcome in rows.items()}, gap)
    for name, height in heights.items():
        text = f" {name.removeprefix('bfloat16, ')}  {rows[name].losses[-1]:.2f}"
        axes.annotate(
            text, (last, height), annotation_clip=False, va="center", fontsize=10, color=LABEL_COLORS[name]
        )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def label_heights(values: dict[str, float], gap: float) -> dict[str, float]:
    """Place labels at their values, pushed upwards where two would be closer than `gap`.

    Values that agree to two decimals keep the order in which they came, so that all panels look alike.
    """
    heights: dict[str, float] = {}
    lowest = float("-inf")
    for name, value in sorted(values.items(), key=lambda item: round(item[1], 2)):
        lowest = heights[name] = max(value, lowest + gap)
    return heights


def main(argv: list[str] | None = None) -> None:
    """Print the table and draw the picture of a file of figures that the demo wrote."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("figures", type=Path, help="the file of figures; the picture is written beside it")
    source = parser.parse_args(argv).figures
    figures = json.loads(source.read_text())
    outcomes = [Outcome(**run) for run in figures["runs"]]
    draw(source.with_suffix(".png"), outcomes, Recipe(**figures["recipe"]))
    print(table(outcomes))


if __name__ == "__main__":
    main()
