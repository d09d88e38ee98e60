"""How the figures of the five notebooks look: one palette, which the colour-blind tell apart too."""

import matplotlib.pyplot as plt
from matplotlib_inline.backend_inline import set_matplotlib_formats

# tests/test_notebooks.py: at least 20 in CIELAB between any two, also without red, green or blue cones.
BLACK, BLUE, RED, SKY, PINK = "#222222", "#0072b2", "#d55e00", "#56b4e9", "#cc79a7"
GREY = "#6f6f6f"  # lines of reference and words alone


def shades(color: str, count: int) -> list[tuple[float, ...]]:
    """Return shades of a color from light to full, for lines that have an order."""
    rgb = plt.matplotlib.colors.to_rgb(color)
    weights = [0.35 + 0.65 * i / max(1, count - 1) for i in range(count)]
    return [tuple(1 - w * (1 - part) for part in rgb) for w in weights]


set_matplotlib_formats("svg")
plt.rcParams.update(
    {
        "figure.figsize": (8, 4),
        "figure.dpi": 100,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.prop_cycle": plt.cycler(color=[BLUE, RED, SKY, PINK, BLACK]),
        "axes.titlelocation": "left",
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }
)
