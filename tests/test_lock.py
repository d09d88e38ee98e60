"""What is installed is what was tried: each package by version and hash, and each action by commit."""

import importlib.metadata
import importlib.util
import pathlib
import re
import sys
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]
ENVIRONMENTS = ("dev", "docs", "clients", "clients-jax", "peers", "release", "compilers")
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
    unlocked = {name for name, _ in seen} - {*hashes_of(lock, "dev"), "halfstep", "torch"}
    assert not unlocked, "run `make lock`"


def hashes_of(lock, environment):
    """Return the hashes of a lock by name; versions are those of constraints.txt."""
    pins, hashes = lock.pins(lock.CONSTRAINTS.read_text()), {}
    for line in lock.lock_of(environment).read_text().splitlines():
        found = re.fullmatch(r"([\w-]+)==(\S+) --hash=sha256:([0-9a-f]{64})", line)
        assert found, line
        name, version, hashes[name] = found.groups()
        assert pins[name] == version, f"{environment}: {name}; run `make lock`"
    return hashes


@pytest.mark.skipif(
    not (sys.version_info[:2] == (3, 11) and sys.platform == "linux"), reason="another platform has no locks"
)
def test_every_environment_has_a_lock_with_hashes_and_without_torch(lock):
    makefile = (ROOT / "Makefile").read_text()
    locks = {environment: hashes_of(lock, environment) for environment in ENVIRONMENTS}
    for environment, hashes in locks.items():
        assert f".ci/lock.py --install {environment}\n" in makefile
        assert "torch" not in hashes
        assert all(locks["dev"].get(name, digest) == digest for name, digest in hashes.items()), environment
    assert {"torchtitan", "labml"} <= locks["clients"].keys(), "those too that come without what they ask for"
    assert {"heavyball", "optax", "torchao"} <= locks["peers"].keys()


def test_a_lock_is_installed_by_hash_and_without_what_it_asks_for(lock, monkeypatch, tmp_path, capsys):
    ran = []
    monkeypatch.setattr(lock, "LOCKS", tmp_path)
    monkeypatch.setattr(lock.subprocess, "run", lambda command, check: ran.append(command))
    lock.install("dev")
    assert not ran
    assert "versions are held, and not hashes" in capsys.readouterr().out
    lock.lock_of("dev").write_text(lock.hashed([("torch", "2", "b"), ("c", "2", "b"), ("a", "1", "d")]))
    assert lock.lock_of("dev").read_text() == "a==1 --hash=sha256:d\nc==2 --hash=sha256:b\n"
    lock.install("dev")
    assert ran[0][-4:] == ["--require-hashes", "--no-deps", "-r", str(lock.lock_of("dev"))]


def test_actions_of_the_workflow_are_pinned_by_commit():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    used = re.findall(r"uses: (.*)", text)
    assert len(used) == 11
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action


def test_a_lock_keeps_what_is_written_by_hand_and_has_the_rest_once(lock):
    once = lock.locked(BEGUN, [{"a-b": "1.0", "c": "2"}, {"c": "2"}])
    assert once == f"{BEGUN}{lock.BROUGHT}\nc==2\n"
    assert lock.locked(once, [{"d": "4"}]) == f"{BEGUN}{lock.BROUGHT}\nd==4\n"
    assert lock.pins(once) == {"a-b": "1.0", "c": "2"}


def test_two_versions_of_a_package_are_refused(lock):
    with pytest.raises(ValueError, match="c is 2 in one environment and 3 in another"):
        lock.locked(BEGUN, [{"c": "2"}, {"c": "3"}])
