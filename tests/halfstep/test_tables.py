"""What is printed for people: at most 100 columns, equal weights as one, the same in a notebook."""

import pytest

from halfstep.description import ArrayDescription, Description
from halfstep.diagnosis import Diagnosis, MomentDiagnosis
from halfstep.memory_report import MemoryReport

DEEP = "model.encoder.block_with_a_long_name.layers.{}.attention.self_attention.projection_of_{}.weight"
LONG = "asked for codes of int4 in blocks of 32 with fine scales, but 64 elements are fewer than min_size"


def rows(leaf, shape=(64, 128), why="asked for", per_device=None):
    weight = ArrayDescription(leaf, "weight", shape, "bfloat16", "stochastic", 16384, "round_stochastically")
    mu = ArrayDescription(leaf, "exp_avg", shape, "int8, " * 12, "feedback", 8192, why, True, per_device)
    return weight, mu


DESCRIPTION = Description(
    tuple(
        row
        for i in range(6)
        for q in "qk"
        for row in rows(DEEP.format(i, q), (8, 8) if i == 5 else (64, 128), LONG)
    )
)
DIAGNOSIS = Diagnosis(
    updates_lost=0.5,
    decay_lost=None,
    leaves={DEEP.format(0, "q") * 2: 0.5},
    moments={
        "exp_avg": MomentDiagnosis({"float8_e4m3fn, blocks of 128": 5, "bfloat16": 1}, 1, 1, 1, "", 1, 1)
    },
    sums_rounded=1.0,
    norm=1.0,
    plain_norm=2.0,
    nonfinite={"weights": 0.25},
    out_of_range={"embed.weight": 0.5},
    advice=("Rounding drops half of the updates. " * 5,),
)
PARTS = {name: MemoryReport(1, {"weights": 2}, {"weights": 2}, 4, 4) for name in ("group 0", "a" * 200)}
NBYTES = {"weights": 2**37, "gradients": 2**37, "nu": 2**36}
MEMORY = MemoryReport(2**36, NBYTES, dict.fromkeys(NBYTES, 1), 2**40, 2**33, PARTS)


@pytest.mark.parametrize("report", [DESCRIPTION, DIAGNOSIS, MEMORY], ids=lambda x: type(x).__name__)
def test_a_report_has_at_most_100_columns_and_an_html_form(report):
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    shown = report._repr_html_()
    assert shown.count("<tr>") == 1 + len(report.table().rows)
    assert all(line.split("  ")[0] for line in lines if not line.startswith(" "))


def test_equal_weights_are_one_entry_and_their_bytes_are_added():
    lines = str(DESCRIPTION).splitlines()
    headings = [line for line in lines if line.startswith("model")]
    assert len(headings) == 2
    assert headings[0].endswith("weight x10  [64, 128]")
    assert headings[1].endswith("projection_of_*.weight x2  [8, 8]")
    assert "163.84 kB" in lines[2]  # ten weights of 2^14 bytes


def test_what_differs_in_bytes_of_one_device_is_no_equal_weight():
    found = Description((*rows("a.weight"), *rows("b.weight", per_device=4096)))
    assert "a.weight  [64, 128]" in str(found)
    assert "b.weight  [64, 128]" in str(found)
    assert "per device" in str(found)


def test_names_are_escaped_in_html():
    shown = Description(rows("<script>alert(1)</script>"))._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


def test_what_is_saved_is_said():
    assert "It saves 755.91 GB, 8.59 GB per device: 69% of AdamW in float32." in str(MEMORY)
    wide = MemoryReport(1, {"weights": 20, "gradients": 0}, {"weights": 20, "gradients": 0}, 16, 16)
    assert "Nothing is saved beside AdamW in float32." in str(wide)
