"""Every message of the packages, read from the source: the site's index of errors and log lines."""

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

PACKAGES = ("shared_spec/halfstep", "pkg_jax/halfstep_jax", "pkg_torch/halfstep_torch")
_LOGS = ("say_once", "warnings.warn", "_LOG.warning", "_say")
_HEAD = """\
# Every message

Find an error or a line of the log here. Names and numbers are `…`, so search for the words between them. The
first column says what happened, and the second what to do. [Troubleshooting](../troubleshooting.md)
begins with what you see.
"""


class Message(NamedTuple):
    """One text of the source.

    Attributes:
        kind: the error that is raised with it, "log", or "text", which another line raises or logs.
        text: the message, with `…` for what is filled in.
        file: where it is, relative to the repository.
        line: its line.
    """

    kind: str
    text: str
    file: str
    line: int


def said_in(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls that raise, warn or log: the kind of each, and the call with its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield ast.unparse(node.exc.func), node.exc
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _LOGS and node.args:
            advice = node.args[0]  # `Advice` has what it is about, and then its text
            is_about = isinstance(advice, ast.Call) and ast.unparse(advice.func) == "Advice"
            yield "log", ast.Call(node.func, advice.args[1:], [], lineno=node.lineno) if is_about else node


def text_of(node: ast.expr) -> str | None:
    """Return a literal text with `…` for what is filled in, or None if the expression is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(side) for side in (node.left, node.right)]
        return "".join(part or "…" for part in parts) if any(parts) else None
    return None


def messages(root: pathlib.Path) -> list[Message]:
    """Return every text that the packages raise or log, and every other sentence that is no docstring."""
    found: list[Message] = []
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        file, seen = path.relative_to(root).as_posix(), set()
        for kind, call in said_in(tree):
            if text := text_of(call.args[0]):
                found.append(Message(kind, _tidy(text), file, call.lineno))
            seen |= {id(node) for node in ast.walk(call)}
        seen |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp) and id(node) not in seen:
                text = _tidy(text_of(node) or "")
                seen |= {id(part) for part in ast.walk(node)} if text else set()
                if len(text.split()) > 5 and text.endswith("."):
                    found.append(Message("text", text, file, node.lineno))
    return found


def _tidy(text: str) -> str:
    return re.sub(r"(… ?)*…", "…", re.sub(r"\s+", " ", text)).strip()


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#$])", r"\\\1", text)


def page(root: pathlib.Path, source: str) -> str:
    """Return the index: a table for each kind of message, in the order of their words."""
    found = messages(root)
    # "error" is chosen where it is raised.
    titles = {"error": "TypeError or ValueError", "log": "Log lines and warnings"}
    titles |= {"text": "Advice, and parts of messages"}
    kinds = sorted({message.kind for message in found}, key=lambda kind: (kind in titles, kind))
    parts = [_HEAD]
    for kind in kinds:
        rows: dict[str, Message] = {}
        for message in found:
            if message.kind == kind:
                rows.setdefault(message.text, message)
        lines = ["| what happened | what to do | source |", "|---|---|---|"]
        for text in sorted(rows, key=lambda text: re.sub(r"^(…:?|[^\w]+) *", "", text).lower()):
            # Under a caller's name: "adamw: nu_dtype=... freezes. Use ..."
            cause, _, cure = re.sub(r"^…: ", "", text).partition(". ")
            where = f"{rows[text].file}#L{rows[text].line}"
            name = pathlib.PurePath(rows[text].file).stem
            link = f"[{_escaped(name)}]({source}/{where})"
            lines.append(f"| {_escaped(cause.rstrip('.'))} | {_escaped(cure)} | {link} |")
        parts.append(f"## {titles.get(kind, kind)}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)
