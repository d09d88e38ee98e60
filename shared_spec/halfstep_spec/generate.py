"""Write the golden vectors, or compare them with the results of the spec.

python -m halfstep_spec.generate
python -m halfstep_spec.generate --check
python -m halfstep_spec.generate --rule my_rule.py --to vectors
"""

import argparse
import json
import pathlib
import sys

from halfstep_spec import SPEC_VERSION, user_rule
from halfstep_spec.cases import FILES
from halfstep_spec.schema import SCHEMA
from halfstep_spec.vectors import FOLDER, canonical, file_text, manifest_text


def build() -> dict[str, str]:
    """Return the text of every vector file, of their schema and of the manifest, by file name."""
    return _folder(
        {name: file_text(name, notes, cases(), SPEC_VERSION) for name, (notes, cases) in FILES.items()}
    )


def build_for(path: pathlib.Path) -> dict[str, str]:
    """Return the same for the rules that a user's file defines: a vector file for each."""
    rules = {rule.name: rule for rule in user_rule.classes_of(path)}
    return _folder(
        {
            name: file_text(name, user_rule.NOTES, user_rule.cases_of(rule), SPEC_VERSION)
            for name, rule in rules.items()
        }
    )


def _folder(texts: dict[str, str]) -> dict[str, str]:
    named = {f"{name}.json": text for name, text in texts.items()}
    others = {"schema.json": canonical(SCHEMA), "manifest.json": manifest_text(texts, SPEC_VERSION)}
    return named | others


def differing(built: dict[str, str], folder: pathlib.Path = FOLDER) -> list[str]:
    """Return the names of files in `folder` that are missing, superfluous, or differ by a byte."""
    found = {path.name for path in folder.glob("*.json")}
    stale = [name for name, text in built.items() if name not in found or (folder / name).read_text() != text]
    return sorted(stale + list(found - built.keys()))


def changed_answers(built: dict[str, str], folder: pathlib.Path = FOLDER) -> list[str]:
    """Return "file#key" of each published case of this SPEC_VERSION with outputs that would change."""
    changed = []
    for path in sorted(folder.glob("*.json")):
        old = json.loads(path.read_text())
        if "cases" not in old or old["spec_version"] != SPEC_VERSION:
            continue
        new = _answers(json.loads(built.get(path.name, '{"cases": []}')))
        changed += [f"{path.name}#{key}" for key, outputs in _answers(old).items() if new.get(key) != outputs]
    return changed


def _answers(data: dict) -> dict[str, dict]:
    return {case["key"]: case["outputs"] for case in data["cases"]}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Write or check the golden vectors.")
    parser.add_argument("--check", action="store_true", help="compare bytes, write nothing")
    parser.add_argument(
        "--rewrite", action="store_true", help="change published answers without a new SPEC_VERSION"
    )
    parser.add_argument("--rule", type=pathlib.Path, help="a Python file of your own that defines a rule")
    parser.add_argument(
        "--to", type=pathlib.Path, help="the folder of its vectors; beside the file unless given"
    )
    arguments = parser.parse_args(argv)
    if arguments.rule:
        return _write_for(arguments.rule, arguments.to or arguments.rule.with_suffix(".vectors"))
    built = build()
    if arguments.check:
        stale = differing(built)
        print(f"{len(built)} files, {len(stale)} differ" + (f": {', '.join(stale)}" if stale else ""))
        return bool(stale)
    changed = changed_answers(built)
    if changed and not arguments.rewrite:
        print(f"generate: {len(changed)} published answers would change: {', '.join(changed[:8])}")
        print("Within one SPEC_VERSION files only grow. Raise SPEC_VERSION and say why in CHANGELOG.md.")
        return 1
    for name, text in built.items():
        (FOLDER / name).write_text(text)
    print(f"wrote {len(built)} files")
    return 0


def _write_for(path: pathlib.Path, folder: pathlib.Path) -> int:
    try:
        built = build_for(path)
    except (ValueError, OSError) as error:
        print(error)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in built.items():
        (folder / name).write_text(text)
    print(f"wrote {len(built)} files to {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
