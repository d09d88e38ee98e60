"""The demo's check of its own claim, and the labels of its picture."""

import importlib
import math

import pytest

recipe = importlib.import_module("recipe")
report = importlib.import_module("report")


def outcomes_with(nearest, stochastic):
    losses = {recipe.FLOAT32: 2.0, recipe.NEAREST: nearest, recipe.STOCHASTIC: stochastic}
    return [recipe.Outcome("Flax", row.name, steps=[1], losses=[loss]) for row, loss in losses.items()]


def test_a_stall_and_a_row_that_follows_are_what_is_claimed():
    assert report.broken_claims(outcomes_with(nearest=2.2, stochastic=2.01)) == []


@pytest.mark.parametrize(
    ("nearest", "stochastic", "named"),
    [
        (2.05, 2.0, "bfloat16, nearest"),
        (math.nan, 2.0, "bfloat16, nearest"),
        (2.2, 2.03, "bfloat16, stochastic"),
        (2.2, 1.97, "bfloat16, stochastic"),
        (2.2, math.nan, "bfloat16, stochastic"),
    ],
)
def test_a_row_that_breaks_the_claim_is_named(nearest, stochastic, named):
    (problem,) = report.broken_claims(outcomes_with(nearest, stochastic))
    assert named in problem


def test_other_batches_break_the_claim():
    outcomes = outcomes_with(nearest=2.2, stochastic=2.0)
    outcomes[0].batches_crc32 = 1
    assert report.broken_claims(outcomes) == ["The runs did not see the same batches."]


def test_labels_never_overlap():
    heights = report.label_heights({"a": 2.0, "b": 3.0, "c": 1.999}, gap=0.1)
    assert heights == {"a": 2.0, "b": 3.0, "c": 2.1}
