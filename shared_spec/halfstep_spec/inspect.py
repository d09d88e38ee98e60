"""Print what a state file holds.

python -m halfstep_spec.inspect run.safetensors
"""

import argparse
import collections
import sys
from typing import Any

from halfstep_spec.checkpoint.state_file import FileArray, read_state_file


def lines(header: dict[str, Any], arrays: dict[str, FileArray]) -> list[str]:
    """Return what is said of a file: the run, its recipes, and every array."""
    total = sum(array.bits.nbytes for array in arrays.values())
    said = [
        f"written by {header['writer']}, contract version {header['spec_version']}, "
        f"layout version {header['layout_version']}; its SHA-256 is right",
        f"{len(header['leaves'])} leaves, {len(arrays)} arrays, {total:,} bytes",
    ]
    users = collections.Counter(header["leaves"].values())
    for number, recipe in enumerate(header["recipes"]):
        said += ["", f"recipe {number}, of {users[number]} leaves:"]
        said += [f"  {_link(link)}" for link in recipe]
    said += ["", f"{'array':<40} {'stored as':<34} {'shape':<16} {'bytes':>10}"]
    for name, array in sorted(arrays.items()):
        label, shape = header["formats"].get(name), "x".join(map(str, array.bits.shape)) or "scalar"
        stored = format_label(label) if label else array.dtype
        said.append(f"{name:<40} {stored:<34} {shape:<16} {array.bits.nbytes:>10,}")
    return said


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
    said = [link["name"]]
    if link["count"] is not None:
        said.append(f"step {link['count']}")
    if link["seed"] is not None:
        said.append(f"seed {(link['seed'][0] << 32) | link['seed'][1]}")
    said += [f"{name} {value:.7g}" for name, value in link["numbers"].items() if value is not None]
    said += [name for name, value in link["options"].items() if value is True]
    for name, stored in link["arrays"].items():
        rounding = f" ({stored['rounding']})" if stored.get("rounding") else ""
        said.append(f"{name} in {format_label(stored['format'])}{rounding}")
    return ", ".join([*said, "passes float32 weights on"] if link["idle"] else said)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Print what a state file holds.")
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
