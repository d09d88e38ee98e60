"""Print the content of a state file.

python -m halfstep.inspect run.safetensors
"""

import argparse
import collections
import os
import sys

from halfstep.checkpoint.header_form import Header
from halfstep.checkpoint.state_file import read_state_file
from halfstep.storage.labels import label_text
from halfstep.text_table import text_table


def lines(path: str | os.PathLike[str]) -> list[str]:
    """Return lines that describe a state file with its run, its recipes, and every array."""
    header, arrays = read_state_file("inspect", path, numbers=False)
    total = sum(array.data.nbytes for array in arrays.values())
    text = [
        f"written by {header['writer']}, contract version {header['spec_version']}, "
        f"layout version {header['layout_version']}; its SHA-256 is right",
        f"{len(header['leaves'])} leaves, {len(arrays)} arrays, {total:,} bytes",
    ]
    users = collections.Counter(header["leaves"].values())
    for number, recipe in enumerate(header["recipes"]):
        text += ["", f"recipe {number}, of {users[number]} leaves:", *(f"  {_link(link)}" for link in recipe)]
    rows = []
    for name, array in sorted(arrays.items()):
        label, shape = header["formats"].get(name), "x".join(map(str, array.shape)) or "scalar"
        stored = label_text(label) if label else array.dtype
        rows.append((name, stored, shape, f"{array.data.nbytes:,}"))
    return [*text, "", *text_table(("array", "stored as", "shape", "bytes"), rows, right={3}).splitlines()]


def _link(link: Header) -> str:
    """Return a description of a link in a recipe."""
    words = [link["name"]]
    if link["count"] is not None:
        words.append(f"step {link['count']}")
    if link["seed"] is not None:
        words.append(f"seed {(link['seed'][0] << 32) | link['seed'][1]}")
    words += [f"{name} {value:.7g}" for name, value in link["numbers"].items() if value is not None]
    words += [name for name, value in link["options"].items() if value is True]
    for name, stored in link["arrays"].items():
        rounding = f" ({stored['rounding']})" if stored.get("rounding") else ""
        words.append(f"{name} in {label_text(stored['format'])}{rounding}")
    return ", ".join([*words, "passes float32 weights on"] if link["idle"] else words)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m halfstep.inspect", description="Print what a state file holds."
    )
    parser.add_argument("file")
    try:
        print("\n".join(lines(parser.parse_args(argv).file)))
    except BrokenPipeError:
        return 0
    except (OSError, ValueError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
