"""What is installed is what was tried: constraints.txt pins each package, those too that others bring."""

import importlib.metadata
import importlib.util
import pathlib
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]
BEGUN = "# By hand.\na_b==1.0\n"


@pytest.fixture(scope="module", name="lock")
def the_command() -> Any:
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons bring other packages")
def test_every_package_that_development_brings_is_pinned_as_it_is_installed(lock):
    pins = lock.pins(lock.CONSTRAINTS.read_text())
    asked, seen, wrong = [("halfstep", "dev")], set(), {}
    while asked:
        name, extra = asked.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        version = importlib.metadata.version(name).split("+")[0]
        if name != "halfstep" and pins.get(name) != version:
            wrong[name] = version
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                brought = lock.canonical(needed.name)
                if not brought.startswith(lock.WITH_TORCH):
                    asked += [(brought, part) for part in ("", *needed.extras)]
    assert not wrong, "run `make lock`"
    assert len(seen) > 80


def test_a_lock_keeps_what_is_written_by_hand_and_has_the_rest_once(lock):
    once = lock.locked(BEGUN, [{"a-b": "1.0", "c": "2"}, {"c": "2", "halfstep": "0.1", "nvidia-x": "3"}])
    assert once == f"{BEGUN}{lock.BROUGHT}\nc==2\n"
    assert lock.locked(once, [{"d": "4"}]) == f"{BEGUN}{lock.BROUGHT}\nd==4\n"
    assert lock.pins(once) == {"a-b": "1.0", "c": "2"}


def test_two_versions_of_a_package_are_refused(lock):
    with pytest.raises(ValueError, match="c is 2 in one environment and 3 in another"):
        lock.locked(BEGUN, [{"c": "2"}, {"c": "3"}])
