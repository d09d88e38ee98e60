"""The tag of a state in codes: which formats its arrays have, so that none is read as codes of another.

A dict of one scalar. Its key names the formats, so that states of other formats have another structure:
checkpoint libraries that go by names refuse them, and so does a traced step. Its value is the same in one
word, for libraries that go by the order of leaves; a traced step cannot read it.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from halfstep.random_words import leaf_id
from halfstep.storage.formats import Format
from halfstep.storage.labels import Label
from halfstep_jax.leaf_calls import Tree

_FIELD = "formats"
_REMEDY = (
    "Restore with the transform of the run that saved it, and change the recipe then: moments by to_optax "
    "and from_optax, weights by float32_params and set_float32_params."
)


def tag_of(formats: Mapping[str, Format | None]) -> str:
    """Return the tag of arrays by their names in a state; "" where all are numbers of a plain dtype.

    It has letters, digits, "_" and "-" alone, which all checkpoint libraries take in names.

    Example:
        >>> tag_of({"mu": Format("mulaw8", relative=True), "nu": Format("uroot8", scaled=True)})
        'mu_relative_mulaw8-nu_uroot8_128'
        >>> tag_of({"mu": None, "nu": Format("bfloat16")})
        ''
    """
    return "-".join(_part(name, fmt.label) for name, fmt in formats.items() if fmt and fmt.in_codes)


def new_tag(tag: str) -> Tree:
    """Return the tag of a new state, in an array of its own; `optax.EmptyState()` for none."""
    return {tag: jnp.array(np.uint32(leaf_id(tag)))} if tag else optax.EmptyState()


def check_tag(caller: str, state: Tree, due: str) -> None:
    """Refuse a state that is not of the formats of a tag.

    Raises:
        ValueError: if it has another tag. If its array has another value too, unless that is traced, or 0 as
            in a state of zeros.
    """
    formats = getattr(state, _FIELD, None)
    tags = dict(formats) if isinstance(formats, Mapping) else {}
    _compare(caller, "", ", ".join(tags), due)
    for tag, word in tags.items():
        _check_word(caller, tag, word)


def check_tags(caller: str, made: Tree, state: Tree) -> None:
    """Refuse a state, of any nesting, that is not of the formats of the one that its transform makes."""
    found, due = dict(_tags(state)), dict(_tags(made))
    for path in [*due, *found]:
        _compare(caller, path, found.get(path, ""), due.get(path, ""))
    check_words(caller, state)


def check_words(caller: str, state: Tree) -> None:
    """Refuse a state, of any nesting, with tags that have the words of others."""
    for path, word in jax.tree_util.tree_leaves_with_path(state):
        if _is_tag(path):
            _check_word(caller, path[-1].key, word)


def _check_word(caller: str, tag: str, word: Tree) -> None:
    if isinstance(word, Tracer | jax.ShapeDtypeStruct):
        return
    words, due = np.asarray(word), leaf_id(tag)
    if wrong := words[(words != due) & (words != 0)].tolist():
        raise ValueError(
            f"{caller}: the tag {tag} of the state is {wrong[0]:#x}, and not {due:#x}: its arrays are of "
            f"another recipe, and were put here by their order. {_REMEDY}"
        )


def _part(name: str, label: Label) -> str:
    kind = ["relative"] if label.get("relative") else []
    further = [str(label[key]) for key in ("block_size", "scale") if key in label]
    return "_".join([name, *kind, label["dtype"], *further])


def _compare(caller: str, path: str, found: str, due: str) -> None:
    if found != due:
        where = f" at {path}" if path else ""
        raise ValueError(
            f"{caller}: the state{where} has {found or 'no codes'}, and this transform keeps "
            f"{due or 'no codes'}: it is of another recipe. {_REMEDY}"
        )


def _tags(state: Tree) -> Iterator[tuple[str, str]]:
    """Yield the place of every tag in a state, and the tag."""
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        if _is_tag(path):
            yield jax.tree_util.keystr(path[:-2], simple=True, separator="/"), path[-1].key


def _is_tag(path: tuple) -> bool:
    return path[-2:-1] == (jax.tree_util.GetAttrKey(_FIELD),) and hasattr(path[-1], "key")
