"""Files and state dicts with anything in them: a reader takes them, or says by name what is wrong."""

import copy
import functools
import json
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import halfstep_jax
import halfstep_torch
from halfstep.checkpoint import state_file
from hunt.settings import EXAMPLES, SEED

FILES = EXAMPLES // 20
_HUNT = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
_SCALED = ("ufloat8_e5m3", 2, 0, 0)
_SCALARS = (None, True, -1, 0, 1, 2**31, 2**70, 0.5, float("nan"), "", "x", "bfloat16", [], [0], {}, {"a": 1})
_WRONG = st.one_of(st.sampled_from(_SCALARS), st.integers(), st.text(max_size=4), st.binary(max_size=4))
_DELETED = object()


def torch_run() -> tuple[torch.nn.Module, halfstep_torch.AdamW]:
    """Return a model and an optimizer that has taken a step."""
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    nu = halfstep_torch.scaled(*_SCALED)
    optimizer = halfstep_torch.AdamW(
        model.named_parameters(),
        lr=1e-3,
        weight_decay=0.01,
        nu_dtype=nu,
        param_storage="split8",
        compile=False,
    )
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def jax_run() -> tuple[Any, Any]:
    """Return weights, and the transform of the same run."""
    params = {"weight": jnp.ones((2, 3), jnp.bfloat16), "bias": jnp.ones(2, jnp.bfloat16)}
    nu = halfstep_jax.scaled(*_SCALED)
    return params, halfstep_jax.adamw(1e-3, weight_decay=0.01, nu_dtype=nu, param_storage="split8")


@functools.cache
def saved() -> bytes:
    """Return the bytes of a state file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run"
        halfstep_torch.save_state(path, *torch_run())
        return path.read_bytes()


def places(x: Any, way: tuple = ()) -> list[tuple]:
    """Return the way to everything in nested dicts and lists."""
    keys = x if isinstance(x, dict) else range(len(x)) if isinstance(x, list) else ()
    return [place for key in keys for place in ((*way, key), *places(x[key], (*way, key)))]


def changed(x: Any, way: tuple, wrong: Any) -> Any:
    """Return a copy with something else in one place, or nothing."""
    x = copy.deepcopy(x)
    *before, last = way
    inside = functools.reduce(lambda part, key: part[key], before, x)
    if wrong is _DELETED:
        del inside[last]
    else:
        inside[last] = wrong
    return x


def signed(entries: Any, header: Any) -> bytes:
    """Return a file whose digest is right, whatever it says of itself."""
    content = saved()
    size = int.from_bytes(content[:8], "little")
    entries["__metadata__"] = {"sha256": state_file._ZEROS.decode(), "halfstep": json.dumps(header)}
    entries = {"__metadata__": entries.pop("__metadata__"), **entries}
    text = json.dumps(entries, separators=(",", ":")).encode()
    whole = len(text).to_bytes(8, "little") + text + content[8 + size :]
    digest = state_file.hashlib.sha256(whole).hexdigest().encode()
    return whole[: state_file._PLACE] + digest + whole[state_file._PLACE + 64 :]


def refusal(load: Any) -> str | None:
    """Return what is said; None where it loads. A raw KeyError passes, and fails the test."""
    try:
        load()
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def assert_taken_or_refused_by_name(load: Any, names: tuple[str, ...], refused: bool = False) -> None:
    """An error of a library below does not say what was being done; `refused`: it must not be taken."""
    message = refusal(load)
    assert not refused if message is None else message.startswith(names)


def load_in_both(content: bytes, refused: bool = False) -> None:
    """Read a file in both packages, which must refuse it if that is said."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run"
        path.write_bytes(content)
        model, optimizer = torch_run()
        params, tx = jax_run()
        names = ("load_state: ",)
        assert_taken_or_refused_by_name(
            lambda: halfstep_torch.load_state(path, model, optimizer), names, refused
        )
        with jax.disable_jit():
            assert_taken_or_refused_by_name(lambda: halfstep_jax.load_state(path, params, tx), names, refused)


@pytest.mark.slow
@seed(SEED)
@settings(max_examples=FILES, **_HUNT)
@given(st.data())
def test_a_header_with_anything_in_it_is_taken_or_refused_by_name(data):
    content = saved()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    header = json.loads(entries.pop("__metadata__")["halfstep"])
    both = {"entries": entries, "header": header}
    json_values = st.one_of(st.sampled_from(_SCALARS), st.integers(), st.text(max_size=4), st.just(_DELETED))
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from([way for way in places(both) if len(way) > 1]))
        both = changed(both, way, data.draw(json_values))
    load_in_both(signed(both["entries"], both["header"]))


@pytest.mark.slow
@seed(SEED)
@settings(max_examples=FILES, **_HUNT)
@given(st.data())
def test_a_file_of_any_bytes_is_refused_by_name(data):
    content, where = saved(), st.integers(0, len(saved()))
    start, end, inside = data.draw(where), data.draw(where), data.draw(st.binary(max_size=12))
    damaged = content[:start] + inside + content[max(start, end) :]
    load_in_both(damaged, refused=damaged != content)


@pytest.mark.slow
@seed(SEED)
@settings(max_examples=EXAMPLES // 4, **_HUNT)
@given(st.data())
def test_a_state_dict_with_anything_in_it_is_taken_or_refused_by_name(data):
    _, optimizer = torch_run()
    state = optimizer.state_dict()
    tensors = st.sampled_from((torch.ones(2), torch.tensor(3), torch.ones(2, 3).to(torch.uint8)))
    for _ in range(data.draw(st.integers(1, 2))):
        way = data.draw(st.sampled_from(places(state)))
        state = changed(state, way, data.draw(st.one_of(_WRONG, tensors, st.just(_DELETED))))
    names = ("load_state_dict: ", "AdamW: ", "scaled")
    assert_taken_or_refused_by_name(lambda: optimizer.load_state_dict(state), names)
