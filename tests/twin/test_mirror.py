"""The packages and the reference have the same names in the same files, or `docs/mirror.md` says why not."""

import ast
import pathlib
import re

import halfstep_jax
import halfstep_torch

ROOT = pathlib.Path(__file__).parents[2]
SHARED = "shared_spec/halfstep"
FOLDERS = {
    "jax": "pkg_jax/halfstep_jax",
    "torch": "pkg_torch/halfstep_torch",
    "spec": "shared_spec/halfstep_spec",
}


def explained(section: str) -> dict[str, set[str]]:
    """Return what a section of docs/mirror.md lists: of every name, the second column of its row."""
    text = (ROOT / "docs" / "mirror.md").read_text()
    table = text.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`[^|]+`) \| ([a-z, ]+) \|", table, flags=re.MULTILINE)
    rows = [(name, column) for names, column in rows for name in re.findall("`([^`]+)`", names)]
    listed = [name for name, _ in rows]
    assert len(listed) == len(set(listed)), f"{section} lists a name twice"
    return {name: set(column.split(", ")) for name, column in rows}


def files(folder: str) -> dict[str, pathlib.Path]:
    root = ROOT / folder
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}


def holders() -> dict[str, set[str]]:
    """Return which packages have a file, for every file of any; what they share is in both."""
    found: dict[str, set[str]] = {}
    for package, folder in FOLDERS.items():
        for file in files(folder):
            found.setdefault(file, set()).add(package)
    return {file: found.get(file, set()) | {"jax", "torch"} for file in files(SHARED)} | {
        file: packages for file, packages in found.items() if file not in files(SHARED)
    }


def public_names(file: str, *folders: str) -> dict[str, str]:
    """Return the public definitions of a file, by name without case: `ScaleByLion` is `scale_by_lion`."""
    paths = [ROOT / folder / file for folder in folders]
    nodes = [node for path in paths if path.exists() for node in ast.parse(path.read_text()).body]
    names = [n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    names += [t.id for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    names += [n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    return {name.replace("_", "").lower(): name for name in names if not name.startswith("_")}


def test_a_public_name_of_one_package_alone_is_explained():
    names = {"jax": set(halfstep_jax.__all__), "torch": set(halfstep_torch.__all__)}
    both = names["jax"] & names["torch"]
    alone = {name: {package} for package in names for name in names[package] - both}
    assert alone == explained("Public names")


def test_a_file_that_not_all_three_have_is_explained():
    """A row that ends in a slash explains a folder."""
    rows, used, shared = explained("Files"), set(), files(SHARED)
    for file, found in holders().items():
        row = next((r for r in rows if file == r or (r.endswith("/") and file.startswith(r))), None)
        if found == FOLDERS.keys() or file in shared:
            assert row is None, f"{file} is in all three packages, or in halfstep"
            continue
        assert row is not None, f"{file} is in {found} alone"
        assert rows[row] == found, f"{file} is in {found}"
        used.add(row)
    assert used == rows.keys()


def test_a_name_of_the_reference_that_a_package_lacks_is_explained():
    """In the files that all three have; what is a function in one may be a class in another.

    What stands in `halfstep`, in whatever file, both packages have.
    """
    shared = {key for file in files(SHARED) for key in public_names(file, SHARED)}
    missing: dict[str, set[str]] = {}
    for file, found in holders().items():
        if found != FOLDERS.keys() or file.endswith("__init__.py"):
            continue
        names = {package: public_names(file, folder) for package, folder in FOLDERS.items()}
        for key, name in names["spec"].items():
            lacking = {package for package in ("jax", "torch") if key not in shared | names[package].keys()}
            if lacking:
                missing[name] = lacking
    assert missing == explained("Names of the reference")
