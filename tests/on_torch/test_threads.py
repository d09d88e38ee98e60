"""Threads that share an optimizer: steps, saves and loads come one after the other."""

import concurrent.futures
import contextlib
import copy
import pickle
import unittest.mock

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.checkpoint import save_state
from on_torch.steps import assert_same_snapshots, snapshot, step_by_ones


def test_threads_that_share_an_optimizer_step_one_after_the_other():
    """As in Hogwild: every step is whole, and counted."""
    params = {name: torch.nn.Parameter(torch.ones(4000, dtype=torch.bfloat16)) for name in "abc"}
    optimizer, alone = (hs.AdamW(ps.items(), compile=False) for ps in (params, copy.deepcopy(params)))
    for each in (optimizer, alone):
        for p in each.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(optimizer.step) for _ in range(30)]:
            done.result()
    for _ in range(30):
        alone.step()
    assert_same_snapshots(snapshot(optimizer), snapshot(alone))
    assert pickle.loads(pickle.dumps(optimizer)).state


def test_a_file_that_is_saved_while_another_thread_steps_is_of_one_step(tmp_path, monkeypatch):
    model = torch.nn.Linear(8, 8)
    optimizer = hs.AdamW(model.named_parameters(), compile=False)
    step_by_ones(optimizer)
    before, write = snapshot(optimizer), save_state.write_state_file
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def write_beside_a_step(*args):
            with contextlib.suppress(concurrent.futures.TimeoutError):
                pool.submit(optimizer.step).result(timeout=0.05)
            write(*args)

        monkeypatch.setattr(save_state, "write_state_file", write_beside_a_step)
        hs.save_state(tmp_path / "run", model, optimizer)
    assert [int(kept["step"]) for kept in optimizer.state.values()] == [2, 2]
    hs.load_state(tmp_path / "run", model, optimizer)
    assert_same_snapshots(snapshot(optimizer), before)


BETWEEN_STEPS = {
    "save_state": lambda optimizer, model, path: hs.save_state(path, model, optimizer),
    "load_state": lambda optimizer, model, path: hs.load_state(path, model, optimizer),
    "state_dict": lambda optimizer, *_: optimizer.state_dict(),
    "load_state_dict": lambda optimizer, *_: optimizer.load_state_dict(optimizer.state_dict()),
    "float32_state_dict": lambda optimizer, *_: hs.float32_state_dict(optimizer),
    "load_float32_state_dict": lambda optimizer, *_: hs.load_float32_state_dict(
        optimizer, hs.float32_state_dict(optimizer)
    ),
    "float32_params": lambda optimizer, *_: hs.float32_params(optimizer),
    "set_float32_params": lambda optimizer, *_: hs.set_float32_params(
        optimizer, hs.float32_params(optimizer)
    ),
    "schedule_free_eval_params": lambda optimizer, *_: hs.schedule_free_eval_params(optimizer),
    "eval": lambda optimizer, *_: optimizer.eval(),
    "train": lambda optimizer, *_: optimizer.train(),
}


@pytest.mark.parametrize("call", BETWEEN_STEPS)
def test_steps_of_other_threads_wait_for_what_reads_or_sets_a_run(call, tmp_path):
    model = torch.nn.Linear(2, 2)
    make = hs.AdamW if "float32_state" in call else hs.AdamWScheduleFree
    optimizer = make(model.named_parameters(), compile=False)
    step_by_ones(optimizer)
    hs.save_state(tmp_path / "run", model, optimizer)
    lock = optimizer._lock = unittest.mock.MagicMock()
    BETWEEN_STEPS[call](optimizer, model, tmp_path / "run")
    assert lock.__enter__.called
