"""The demo's text, batches and first weights: the same numbers for both frameworks."""

import importlib

import numpy as np

recipe = importlib.import_module("recipe")
text = importlib.import_module("text")


def test_batches_are_a_function_of_the_seed():
    corpus = text.load_text()
    first, again, other = (list(corpus.batches(3, 4, 8, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(np.array(first) != np.array(other))


def test_what_follows_is_the_text_one_character_on():
    corpus = text.load_text()
    for characters, following in (next(corpus.batches(1, 4, 8, 0)), corpus.validation_windows(5, 8)):
        assert characters.dtype == following.dtype == np.int32
        np.testing.assert_array_equal(characters[:, 1:], following[:, :-1])


def test_first_weights_are_bfloat16_values():
    for name, weight in recipe.initial_weights(recipe.Recipe(), 103).items():
        assert weight.dtype == np.float32, name
        assert not np.any(weight.view(np.uint32) & 0xFFFF), name
