"""What a user installs: each package without the other's framework, and a wheel with packages alone."""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
write_vectors = runpy.run_path(str(ROOT / ".ci" / "release.py"))["write_vectors"]
# What each package must do without: the other's framework, the spec's judges, and test libraries.
_WITHOUT = {
    "halfstep_jax": ("torch", "halfstep_torch", "halfstep_spec", "flax", "chex", "pytest", "hypothesis"),
    "halfstep_torch": ("jax", "optax", "halfstep_jax", "halfstep_spec", "pytest", "hypothesis"),
    "halfstep_spec": ("halfstep", "jax", "torch", "optax", "ml_dtypes", "pytest"),
    "halfstep": (
        "halfstep_jax",
        "halfstep_torch",
        "halfstep_spec",
        "jax",
        "torch",
        "optax",
        "ml_dtypes",
        "pytest",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("package", _WITHOUT)
def test_a_package_imports_without_what_it_must_not_need(package):
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in _WITHOUT[package])
    code = f"import sys\n{blocked}import {package}\nassert {package}.__all__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_block_on_imports_does_block():
    code = "import sys\nsys.modules['optax'] = None\nimport halfstep_jax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "optax" in done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {"halfstep", "halfstep_jax", "halfstep_torch", "halfstep_spec"}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert not [name for name in names if name.endswith((".json", ".ipynb")) or "test" in name]
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.slow
def test_an_index_shows_the_readme_with_whole_addresses(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    head, _, text = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())) > 15
    assert not [link for link in links if not link.startswith("https://")]
    assert "/raw/main/docs/images/overview.svg)" in text


@pytest.mark.slow
def test_an_installed_wheel_and_an_archive_of_the_vectors_check_a_backend(wheel, tmp_path):
    install = ["pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(tmp_path), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=120)
    archive = tmp_path / "vectors.zip"
    write_vectors(archive)
    # Before the folders of the development environment.
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    adapter = str(ROOT / "examples" / "adapters" / "plain_python.py")
    command = [sys.executable, "-m", "halfstep_spec.check", adapter]

    def run(*arguments):
        return subprocess.run(
            [*command, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    without = run()
    assert without.returncode == 2
    assert "holds no manifest.json. Pass the golden vectors by --vectors." in without.stdout
    done = run("--vectors", str(archive))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"cases: 4\d\d passed, 0 failed", done.stdout)


def test_the_archive_of_the_vectors_depends_on_the_vectors_alone(tmp_path):
    for name in ("first.zip", "second.zip"):
        write_vectors(tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("first.zip", "second.zip"))
    assert first == second
    with zipfile.ZipFile(tmp_path / "first.zip") as file:
        assert {f"vectors/{path.name}" for path in (ROOT / "shared_spec" / "vectors").glob("*.json")} == set(
            file.namelist()
        )


@pytest.mark.slow
def test_the_tests_run_beside_a_plugin_that_warns_as_it_starts(tmp_path):
    """As pytest-benchmark does beside xdist: with warnings as errors, the whole run ended."""
    (tmp_path / "benchmark-1.dist-info").mkdir()
    (tmp_path / "benchmark-1.dist-info" / "METADATA").write_text("Name: benchmark\nVersion: 1\n")
    points = "[pytest11]\nbenchmark = benchmark_that_warns\n"
    (tmp_path / "benchmark-1.dist-info" / "entry_points.txt").write_text(points)
    plugin = "import warnings\n\ndef pytest_configure():\n    warnings.warn('disabled beside xdist')\n"
    (tmp_path / "benchmark_that_warns.py").write_text(plugin)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "tests/halfstep/test_memory.py"]
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = paths
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
