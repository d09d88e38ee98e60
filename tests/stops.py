"""Where an average that is rounded to nearest stops: what theory says, for the tests of all three."""

# An average of g = 1 from 0, rounded to nearest, stops where b x + (1 - b) rounds back to x.
STOPS = {
    ("bfloat16", 0.9): 0.984375,
    ("bfloat16", 0.99): 0.8046875,
    ("bfloat16", 0.999): 0.25,
    ("bfloat16", 0.9999): 0.03125,
    ("float16", 0.9): 0.998046875,
    ("float16", 0.99): 0.9755859375,
    ("float16", 0.999): 0.755859375,
    ("float16", 0.9999): 0.25,
    # The scale is a power of two, and so changes nothing where a code has all its mantissa bits.
    ("float8_e4m3fn", 0.9): 0.75,
    ("float8_e4m3fn", 0.99): 0.21875,
    ("float8_e4m3fn", 0.999): 0.0234375,
}
