"""A format as a state file names it, and in words."""

from typing import Any

Label = dict[str, Any]
"""Parts of a format by name: texts, numbers, None and truth values, as JSON has them."""


def label_text(label: Label) -> str:
    """Return a label in words.

    Example:
        >>> label_text({"dtype": "int4", "block_size": 32, "scale": "fine", "relative": True})
        'relative int4, blocks of 32, fine scales'
    """
    words = [("relative " if label.get("relative") else "") + label["dtype"]]
    if "block_size" in label:
        size = label["block_size"]
        words.append({"row": "a block per row", None: "one block"}.get(size, f"blocks of {size}"))
    if label.get("scale") == "fine":
        words.append("fine scales")
    return ", ".join(words)
