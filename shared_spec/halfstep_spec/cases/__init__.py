"""Which questions the golden vectors ask, and why.

One module per subject; inputs are chosen here and nowhere else.
"""

from halfstep_spec.cases import (
    adam,
    codebook,
    formats,
    lamb,
    moments,
    momentum,
    no_contraction,
    params,
    random_words,
    rounding,
    store_state,
    weights,
)

FILES = {
    "random_words": (random_words.NOTES, random_words.cases),
    "round_nearest": (rounding.NOTES, rounding.nearest_cases),
    "round_stochastic": (rounding.NOTES, rounding.stochastic_cases),
    "moments": (moments.NOTES, moments.cases),
    "params": (params.NOTES, params.cases),
    "no_contraction": (no_contraction.NOTES, no_contraction.cases),
    "adam": (adam.NOTES, adam.cases),
    "formats": (formats.NOTES, formats.cases),
    "weights": (weights.NOTES, weights.cases),
    "lion": (momentum.NOTES, momentum.lion_cases),
    "trace": (momentum.NOTES, momentum.trace_cases),
    "store_state": (store_state.NOTES, store_state.cases),
    "codebook": (codebook.NOTES, codebook.cases),
    "lamb": (lamb.NOTES, lamb.cases),
}
"""By file: what its flags mean, and the function that returns its cases."""
