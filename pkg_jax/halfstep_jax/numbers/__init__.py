"""Scalars and arrays of float32: exactness, rounding, random words, moments, norms."""
