"""A backend in plain Python, integers and floats alone, written to show what a third backend needs.

python -m halfstep_spec.check examples/adapters/plain_python.py

A Python float is a double. A sum, product, quotient or square root of float32 numbers may be computed in
double and then rounded to float32. The result is as if rounded once, because a double has more than twice the
bits.
"""

import math
import struct

MASK = 0xFFFFFFFF
# Bits of exponent and mantissa, patterns of the largest number, of what comes past it and of NaN.
FORMATS = {
    "float32": (8, 23, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    "bfloat16": (8, 7, 0x7F7F, 0x7F80, 0x7FC0),
    "float16": (5, 10, 0x7BFF, 0x7C00, 0x7E00),
    "float8_e4m3fn": (4, 3, 0x7E, 0x7F, 0x7F),
    "float8_e5m2": (5, 2, 0x7B, 0x7C, 0x7E),
    "float8_e3m4": (3, 4, 0x6F, 0x70, 0x78),
}


# Numbers and patterns.


def f32(x):
    """Round a double to float32."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def pattern(x):
    """Return the pattern of a float32."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def number(bits):
    """Return the float32 of a pattern."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def to_number(code, dtype):
    """Return the number of a pattern of any float format."""
    exponent_bits, mantissa_bits, largest, past, _ = FORMATS[dtype]
    if dtype == "float32":
        return number(code)
    top = 1 << (exponent_bits + mantissa_bits)
    sign, magnitude = (-1.0 if code & top else 1.0), code & (top - 1)
    if magnitude > largest:
        return sign * math.inf if magnitude == past and past != FORMATS[dtype][4] else math.nan
    field, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    significand = mantissa + ((1 << mantissa_bits) if field else 0)
    return sign * math.ldexp(significand, max(field, 1) - bias - mantissa_bits)


def to_pattern(x, dtype, word=None, saturate=False):
    """Round a float32 to the pattern of a format: to nearest even, or by a word (R2, R3, R5, R6)."""
    exponent_bits, mantissa_bits, largest, past, nan = FORMATS[dtype]
    bits = pattern(x)
    sign = (bits >> 31) << (exponent_bits + mantissa_bits)
    if math.isnan(x):
        return sign | nan
    if math.isinf(x):
        return sign | (nan if saturate else past)
    field, significand = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    significand += (1 << 23) if field else 0
    exponent, smallest = max(field, 1) - 127, 2 - (1 << (exponent_bits - 1))
    drop = min(23 - mantissa_bits + max(0, smallest - exponent), 62)
    kept, rest = significand >> drop, significand & ((1 << drop) - 1)
    if word is None:
        up = 2 * rest > (1 << drop) or (2 * rest == (1 << drop) and drop > 0 and kept % 2 == 1)
    else:
        up = ((rest << 17 >> drop) + 1 >> 1) + (word >> 16) >> 16
    code = (max(exponent - smallest, 0) << mantissa_bits) + kept + int(up)
    return sign | min(code, largest if saturate else past)


# Random words (section W).


def threefry(key, counter):
    """Threefry-2x32 in 20 rounds."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) & MASK, (counter[1] + keys[1]) & MASK
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = (x + y) & MASK
            y = ((y << turn | y >> (32 - turn)) & MASK) ^ x
        x = (x + keys[(group + 1) % 3]) & MASK
        y = (y + keys[(group + 2) % 3] + group + 1) & MASK
    return x, y


def fnv(name):
    """FNV-1a of 32 bits."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = (value ^ byte) * 0x01000193 & MASK
    return value


def keys_of(seed, step, leaf, role):
    """Return k0 and k1 of a leaf (W4)."""
    k, kx = threefry(threefry(seed, (0, step)), (0, leaf))
    return k | 1, threefry((k, kx), (0, role))[1]


def mix(x):
    """The three-multiply finaliser (W8)."""
    x = (x ^ x >> 17) * 0xED5AD4BB & MASK
    x = (x ^ x >> 11) * 0xAC4C1B51 & MASK
    x = (x ^ x >> 15) * 0x31848BAB & MASK
    return x ^ x >> 14


def words(seed, step, name, role, count, offset=0):
    """Return the words of an array of so many elements; roles 0, 1 and 2 have the same, turned (W6, W8)."""
    k0, k1 = keys_of(seed, step, fnv(name), role if role > 2 else 0)
    indices = range(offset, offset + count)
    made = [mix((i & MASK) * k0 + k1 + 0x9E3779B9 * (i >> 32) & MASK) for i in indices]
    turn = {1: 8, 2: 16}.get(role, 0)
    return [(word << turn | word >> (32 - turn)) & MASK for word in made]


# Arithmetic (sections A, M).


def ema(average, value, b):
    """Return (b average) + ((1 - b) value)."""
    return f32(f32(b * average) + f32(f32(1 - b) * value))


def correction(b, count):
    """Return 1 - b^count by the complement binary power (M2)."""
    power, q = f32(1 - b), 0.0
    for k in range(31):
        if count >> k & 1:
            q = f32(q + f32(power * f32(1 - q)))
        power = f32(f32(2 * power) - f32(power * power))
    return q


def divide(a, b):
    """Return a / b as IEEE 754 has it, zeros, infinities and NaN included."""
    if math.isnan(a) or math.isnan(b) or (a == 0 == b):
        return math.nan
    if b == 0:
        return math.copysign(math.inf, a) * math.copysign(1.0, b)
    return math.nan if math.isinf(a) and math.isinf(b) else f32(a / b)


def root(x):
    """Return the square root of a float32."""
    return math.nan if x < 0 else f32(math.sqrt(x))


# What the vectors ask. A case's inputs are patterns; so are the outputs, with their dtype.


def values(array):
    """Return the numbers of an array of patterns."""
    return [to_number(code, array.dtype) for code in array.bits.ravel().tolist()]


def plain(case, name):
    """Return an input of one element: an integer, or the number of a float32."""
    array = case.inputs[name]
    bits = int(array.bits.item())
    return to_number(bits, array.dtype) if array.dtype in FORMATS else bits


def nested(flat, shape):
    """Return a flat list as lists in lists of a shape."""
    if not shape:
        return flat[0]
    size = len(flat) // shape[0] if shape[0] else 0
    return [nested(flat[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def answer(case, name, codes):
    """Return patterns as the output of a case: its dtype, in its shape."""
    due = case.outputs[name]
    return due.dtype, nested(codes, due.bits.shape)


def seed_of(case):
    """Return the two words of a seed."""
    return tuple(case.inputs["seed"].bits.tolist())


def fold(case):
    """Derive keys."""
    key, counters = case.inputs["key"].bits.tolist(), case.inputs["x"].bits.tolist()
    return {"key": answer(case, "key", list(threefry(key, (0, counters[0]))))}


def leaf_id(case):
    """Hash a name."""
    return {"id": answer(case, "id", [fnv(case.arguments["leaf"])])}


def leaf_key(case):
    """Derive the keys of a leaf."""
    leaf = fnv(case.arguments["leaf"])
    return {
        "key": answer(
            case, "key", list(keys_of(seed_of(case), plain(case, "step"), leaf, case.arguments["role"]))
        )
    }


def random_words(case):
    """Make the words of an array."""
    a, (high, low) = case.arguments, case.inputs["offset"].bits.tolist()
    drawn = words(
        seed_of(case), plain(case, "step"), a["leaf"], a["role"], math.prod(a["shape"]), high << 32 | low
    )
    return {"words": answer(case, "words", drawn)}


def round_to(case):
    """Round float32 to a format."""
    xs = values(case.inputs["x"])
    drawn = case.inputs["words"].bits.ravel().tolist() if "words" in case.inputs else [None] * len(xs)
    a = case.arguments
    codes = [to_pattern(x, a["dtype"], word, a["saturate"]) for x, word in zip(xs, drawn, strict=True)]
    return {"y": answer(case, "y", codes)}


def bias_correction(case):
    """Complements of powers."""
    b = plain(case, "b")
    codes = [pattern(correction(b, t)) for t in case.inputs["count"].bits.tolist()]
    return {"correction": answer(case, "correction", codes)}


def clip(case):
    """Scale an update where the norm is past the bound (N3)."""
    if "norm" not in case.inputs:
        raise NotImplementedError("the norm of many arrays")
    norm, bound = plain(case, "norm"), plain(case, "max_norm")
    us = values(case.inputs["u"])
    if not norm <= bound:
        factor = divide(bound, norm)
        us = [f32(factor * u) for u in us]
    return {"u": answer(case, "u", [pattern(u) for u in us])}


def norm(case):
    """The norm of an array, its numbers brought near 1 first (L1)."""
    xs = values(case.inputs["x"])
    if any(map(math.isnan, xs)):
        return {"norm": answer(case, "norm", [FORMATS["float32"][4]])}
    top = max(map(abs, xs), default=0.0)
    if top == 0 or math.isinf(top):
        return {"norm": answer(case, "norm", [pattern(top)])}
    exponent = min(max(math.frexp(top)[1] - 1, -126), 126)
    total = sum(math.ldexp(x, -exponent) ** 2 for x in xs)
    return {"norm": answer(case, "norm", [pattern(f32(math.ldexp(math.sqrt(total), exponent)))])}


def apply(p, u, dtype, word, storage):
    """Return the update that a weight storage emits and the weight after it (P1, P2)."""
    if storage == "stochastic" and dtype != "float32":
        q = to_number(to_pattern(f32(p + u), dtype, word), dtype)
        u = -0.0 if q == p else f32(q - p)
    return u, to_pattern(f32(p + u), dtype)


def round_stochastically(case):
    """Apply updates to weights."""
    p = case.inputs["p"]
    ps, us = values(p), values(case.inputs["u"])
    drawn = words(seed_of(case), plain(case, "step"), case.arguments["leaf"], 0, len(ps))
    rows = [apply(*row, p.dtype, word, "stochastic") for *row, word in zip(ps, us, drawn, strict=True)]
    return {
        "u": answer(case, "u", [pattern(u) for u, _ in rows]),
        "p": answer(case, "p", [code for _, code in rows]),
    }


# Steps of Adam, Lion and momentum (A5, A9, A10), with state in plain dtypes.


def adam(h, t, g, m, v, store):
    """One element of Adam; `store` rounds a moment and returns what was stored."""
    v = store("nu", ema(v, f32(g * g), h["b2"]))
    m = store("mu", ema(m, g, h["b1"]))
    r1, r2 = divide(1.0, correction(h["b1"], t)), divide(1.0, correction(h["b2"], t))
    return divide(f32(m * r1), f32(root(f32(f32(v * r2) + h["eps_root"])) + h["eps"]))


def lion(h, t, g, m, _, store):
    """One element of Lion."""
    s = ema(m, g, h["b1"])
    store("mu", ema(m, g, h["b2"]))
    return s if math.isnan(s) else float(s > 0) - float(s < 0)


def trace(h, t, g, m, _, store):
    """One element of momentum."""
    m = store("trace", f32(g + f32(h["decay"] * m)))
    return f32(g + f32(h["decay"] * m)) if h["nesterov"] else m


# Of each rule: its function, its moments, and the rates by which "auto" judges them.
RULES = {
    "adam": (adam, {"mu": "b1", "nu": "b2"}),
    "lion": (lion, {"mu": "b2"}),
    "trace": (trace, {"trace": "decay"}),
}
ROLES = {"mu": 1, "trace": 1, "nu": 2}


def is_stochastic(asked, dtype, rate):
    """Whether a moment is rounded stochastically (F2, F3)."""
    if dtype == "float32":
        return False
    half_gap = 2.0 ** -(FORMATS[dtype][1] + 1)
    return asked == "stochastic" or (asked == "auto" and not half_gap < f32(f32(0.001) * f32(1 - rate)))


def take_steps(case, rule):
    """Take the steps of a case on every element."""
    a, (update, moments) = case.arguments, RULES[rule]
    p, gs = case.inputs["p"], case.inputs["g"]
    extra = a.keys() - {"decay", "leaf", "param_storage", "nesterov", "rounding", "accumulator_dtype"}
    formats = [case.inputs[name].dtype for name in moments]
    known = all(name.endswith(("_dtype", "_rounding")) for name in extra)
    scaled = any(
        isinstance(value, dict) or value in ("ufloat16_e7m9", "ufloat16_e7m9", "uroot4_e4m4", "feedback")
        for value in a.values()
    )
    if scaled or not known or a["param_storage"] not in ("nearest", "stochastic"):
        raise NotImplementedError(
            "formats with scales or roots, error feedback, and weights with more than themselves"
        )
    h = {
        name: plain(case, name)
        for name, x in case.inputs.items()
        if x.dtype == "float32" and not x.bits.shape
    }
    h["nesterov"] = bool(a.get("nesterov"))
    if rule == "adam" and h["nesterov"]:
        raise NotImplementedError("Nesterov momentum in Adam")
    if a["decay"] == "cautious":
        raise NotImplementedError("cautious decay")
    asked = {name: a.get(f"{name}_rounding", a.get("rounding")) for name in moments}
    random = {
        name: is_stochastic(asked[name], dtype, h[rate])
        for (name, rate), dtype in zip(moments.items(), formats, strict=True)
    }
    state = {name: values(case.inputs[name]) for name in moments}
    weights, size, step = values(p), p.bits.size, plain(case, "count")
    out = {name: [] for name in ("p", *moments)}
    for g_row in range(gs.bits.shape[0]):
        step += 1
        seed, leaf = seed_of(case), a["leaf"]
        drawn = {name: words(seed, step, leaf, ROLES.get(name, 0), size) for name in ("p", *moments)}
        for i in range(size):
            g = to_number(int(gs.bits[g_row].ravel()[i]), gs.dtype)

            def store(name, x, i=i, drawn=drawn):
                dtype = case.inputs[name].dtype
                code = to_pattern(x, dtype, drawn[name][i] if random[name] else None, saturate=True)
                out[name].append(code)
                state[name][i] = to_number(code, dtype)
                return state[name][i]

            w, wd = weights[i], h["weight_decay"]
            if a["decay"] == "l2" and wd:
                g = f32(g + f32(wd * w))
            old = [state[name][i] for name in moments] + [0.0]
            u = update(h, step, g, *old[:2], store)
            if a["decay"] == "decoupled" and wd:
                u = f32(u + f32(wd * w))
            _, code = apply(w, f32(-h["learning_rate"] * u), p.dtype, drawn["p"][i], a["param_storage"])
            weights[i] = to_number(code, p.dtype)
            out["p"].append(code)
    return {name: answer(case, name, codes) for name, codes in out.items()}


def adam_step(case):
    """Steps of Adam."""
    return take_steps(case, "adam")


def lion_step(case):
    """Steps of Lion."""
    return take_steps(case, "lion")


def trace_step(case):
    """Steps of momentum."""
    return take_steps(case, "trace")
