"""Print the content of a state file.

python -m halfstep_spec.inspect run.safetensors
"""

import argparse
import collections
import sys
from typing import Any

from halfstep_spec.checkpoint.state_file import FileArray, read_state_file


def lines(header: dict[str, Any], arrays: dict[str, FileArray]) -> list[str]:
    """Return the lines that describe a file: the run, its recipes, and every array."""
    total = sum(array.bits.nbytes for array in arrays.values())
    text = [
        f"written by {header['writer']}, contract version {header['spec_version']}, "
        f"layout version {header['layout_version']}; its SHA-256 is right",
        f"{len(header['leaves'])} leaves, {len(arrays)} arrays, {total:,} bytes",
    ]
    users = collections.Counter(header["leaves"].values())
    for number, recipe in enumerate(header["recipes"]):
        text += ["", f"recipe {number}, of {users[number]} leaves:"]
        text += [f"  {_link(link)}" for link in recipe]
    text += ["", f"{'array':<40} {'stored as':<34} {'shape':<16} {'bytes':>10}"]
    for name, array in sorted(arrays.items()):
        label, shape = header["formats"].get(name), "x".join(map(str, array.bits.shape)) or "scalar"
        stored = format_label(label) if label else array.dtype
        text.append(f"{name:<40} {stored:<34} {shape:<16} {array.bits.nbytes:>10,}")
    return text


def format_label(label: dict[str, Any]) -> str:
    """Return a format in words.

    Example:
        >>> format_label({"dtype": "int4", "block_size": 32, "relative": True})
        'relative int4, blocks of 32'
    """
    words = "relative " if label.get("relative") else ""
    words += label["dtype"] + (", fine scales" if label.get("scale") == "fine" else "")
    size = label.get("block_size", "")
    blocks = {"": "", "row": ", a block per row", None: ", one block"}
    return words + (blocks[size] if size in blocks else f", blocks of {size}")


def _link(link: dict[str, Any]) -> str:
    """Return one link of a recipe in words."""
    words = [link["name"]]
    if link["count"] is not None:
        words.append(f"step {link['count']}")
    if link["seed"] is not None:
        words.append(f"seed {(link['seed'][0] << 32) | link['seed'][1]}")
    words += [f"{name} {value:.7g}" for name, value in link["numbers"].items() if value is not None]
    words += [name for name, value in link["options"].items() if value is True]
    for name, stored in link["arrays"].items():
        rounding = f" ({stored['rounding']})" if stored.get("rounding") else ""
        words.append(f"{name} in {format_label(stored['format'])}{rounding}")
    return ", ".join([*words, "passes float32 weights on"] if link["idle"] else words)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m halfstep_spec.inspect", description="Print what a state file holds."
    )
    parser.add_argument("file")
    try:
        print("\n".join(lines(*read_state_file(parser.parse_args(argv).file))))
    except BrokenPipeError:
        return 0
    except (OSError, ValueError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
