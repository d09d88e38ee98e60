"""Codebooks: every table on blocks chosen for their extremes, in every layout, and in whole steps."""

import numpy as np

from halfstep_spec.cases.formats import encode_case, format_inputs
from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.weights import trajectory
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.step import Step
from halfstep_spec.storage.state_dtypes import codebook
from halfstep_spec.storage.tables import TABLES
from halfstep_spec.vectors import Case
from halfstep_spec.weights.weight_storage import PARAM_STORAGES

NOTES = {
    "Sample": "values over several binades, two blocks a row, the second one short",
    "Layout": "other cuts into blocks",
    "Extremes": "blocks of zeros, of equal values, of more binades than codes have, of the largest floats",
    "NotFinite": "NaN and infinities in some blocks and not in others",
    "Positive": "a second moment: what is not zero is not stored as zero",
    "Neighbours": "every number of a table, and the two float32 numbers next to it",
    "Codebook": "ten steps of Adam, both moments as codes of tables",
}

_LAYOUTS = (
    ("row", (4, 6)),
    ("row", (4, 7)),
    (None, (3, 7)),
    (16, (4, 2, 3, 3)),
    (6, (3, 7)),
    (4, (3, 11)),
    (128, (3, 5)),
    (4, (9,)),
    (8, (0, 8)),
)


def cases() -> list[Case]:
    """Return the cases of codebook.json."""
    return [*_table_cases(), *_layout_cases(), *_step_cases()]


def _table_cases():
    for name, table in TABLES.items():
        inputs = format_inputs(table.signed) | {"Neighbours": _neighbours(name)}
        for flag, x in inputs.items():
            for rounding in ("nearest", "stochastic"):
                block_size = "row" if flag == "Neighbours" else 8
                fmt = codebook(name, block_size, 0, 0)
                yield encode_case(fmt, flag, x, rounding, NOTES)


def _neighbours(name: str) -> np.ndarray:
    """Return rows of a table and its neighbours above and below, the largest number of each row 1."""
    values = TABLES[name].values
    rows = [values, np.nextafter(values, np.float32(2)), np.nextafter(values, np.float32(-2))]
    rows = np.stack(rows)[:, 1:-1]
    # A neighbour of zero is subnormal (contract A8).
    rows = np.where(np.abs(rows) < 2.0**-126, np.float32(0), rows)
    return np.concatenate([rows, np.ones((3, 1), np.float32)], axis=1)


def _layout_cases():
    for block_size, shape in _LAYOUTS:
        x = reals(f"layout {shape}", int(np.prod(shape)), (-6, 2)).reshape(shape)
        yield encode_case(codebook("dynamic8", block_size, 0, 0), "Layout", x, "stochastic", NOTES)


def _step_cases():
    for block_size in (4, "row", None, 128):
        for rounding in ("nearest", "stochastic"):
            yield _steps(block_size, rounding)
    for storage in PARAM_STORAGES.keys() - {"stochastic"}:
        yield _steps(4, "stochastic", storage)


def _steps(block_size, mu_rounding: str, param_storage: str = "stochastic") -> Case:
    adam = ScaleByAdam(
        mu_dtype=codebook("dynamic8", block_size, 0, 0),
        nu_dtype=codebook("udynamic8", block_size, 0, 0),
        mu_rounding=mu_rounding,
        seed=7,
    )
    step = Step(adam, 0.1, param_storage=param_storage)
    return trajectory(step, 1e-3, ("Codebook",), ("F8", "F10"))
