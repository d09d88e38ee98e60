"""The data of the page *Try it*, as a script: golden vectors of rounding, and bytes per parameter."""

import json
import pathlib
import re

_LIBRARIES = {
    "torch AdamW(fused)": "torch.optim.AdamW, bfloat16",
    "optax.adamw": "optax.adamw, bfloat16",
    "torchao AdamW8bit, stochastic": "torchao AdamW8bit",
    "torchao AdamW4bit, stochastic": "torchao AdamW4bit",
    "bitsandbytes AdamW8bit": "bitsandbytes AdamW8bit",
}
_FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e3m4")


def vectors(root: pathlib.Path) -> list[list]:
    """Return every golden vector of rounding to a 16- or 8-bit float.

    A vector is dtype, saturate, inputs, words (None: nearest) and outputs, as patterns.
    """
    found = []
    for name in ("round_nearest", "round_stochastic"):
        for case in json.loads((root / "shared_spec" / "vectors" / f"{name}.json").read_text())["cases"]:
            arguments, inputs = case["arguments"], case["inputs"]
            if arguments["dtype"] in _FORMATS:
                words = inputs["words"]["bits"] if "words" in inputs else None
                row = [arguments["dtype"], arguments["saturate"], inputs["x"]["bits"], words]
                found.append([*row, case["outputs"]["y"]["bits"]])
    return found


def sizes(root: pathlib.Path) -> list[list]:
    """Return name, bytes of weight, gradient and state per parameter, and whether it is halfstep's."""
    recipes = re.findall(
        r"^\| `(\w+)`[^|]*\|[^|]*\| ([\d.]+) \|", (root / "docs" / "recipes.md").read_text(), re.M
    )
    record = json.loads(max((root / "benchmarks" / "results").glob("*-silent_failures-cpu.json")).read_text())
    (state,) = (row["figures"] for row in record["rows"] if row["key"] == "state")
    theirs = [[name, 4 + state[key]["bytes per parameter"], False] for key, name in _LIBRARIES.items()]
    ours = [[f"halfstep {name}", 2 + float(size), True] for name, size in recipes]
    return [["AdamW, float32", 16, False], *theirs, *ours]


def script(root: pathlib.Path) -> str:
    """Return the script that the page loads before `try.js`."""
    data = {"vectors": vectors(root), "sizes": sizes(root)}
    return f"globalThis.HALFSTEP = {json.dumps(data, separators=(',', ':'))};\n"
