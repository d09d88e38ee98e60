"""The notebooks' figures: one palette, which people with any one kind of cone missing tell apart."""

import importlib.util
import itertools
import json
import pathlib
import re

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What linear RGB looks like where one kind of cone is missing: Machado, Oliveira and Fernandes, 2009.
SIGHT = {
    "all cones": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
WHITE = XYZ.sum(1)


def linear(color: str) -> np.ndarray:
    parts = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ np.clip(rgb, 0, 1) / WHITE
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.fixture(scope="module")
def palette() -> list[str]:
    spec = importlib.util.spec_from_file_location("look", FOLDER / "look.py")
    look = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(look)
    return [look.BLACK, look.BLUE, look.RED, look.SKY, look.PINK]


@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_colors_differ_by_20(palette, sight):
    seen = {color: lab(SIGHT[sight] @ linear(color)) for color in palette}
    for a, b in itertools.combinations(palette, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 20, (a, b)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_colors_of_the_palette_alone(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert re.search(r"^from look import ", code, re.MULTILINE)
    assert "rcParams" not in code
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b|\bcolor=\"\w+\"|\bcmap=", code)
