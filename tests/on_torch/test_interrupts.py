"""Signals and failures in the middle of a step: weights, moments and counts agree."""

import gc
import hashlib
import itertools
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch.autograd import grad_mode

import halfstep_torch as hs
from halfstep_torch import launch
from halfstep_torch.engine.signals import SignalsWait
from on_torch.steps import give_gradients, parameters, run, snapshot

SHAPES = [(100, 100)] + [(40, 17)] * 8
NEEDS_TIMER = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers that send signals")


class Interrupted(Exception):
    """What the handler of a signal raises."""


def named(shapes=SHAPES):
    return parameters(shapes={f"w{i}": shape for i, shape in enumerate(shapes)})


def digest(optimizer):
    return hashlib.sha256(b"".join(x.tobytes() for x in snapshot(optimizer))).hexdigest()


def counts(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [int(optimizer.state[param]["step"]) if optimizer.state[param] else 0 for param in params]


@pytest.fixture(autouse=True)
def interrupt():
    """Python's own handler: what a shell starts in the background begins with none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def alarm():
    """Return what lets a handler raise `Interrupted` after some seconds."""

    def handler(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    # In a process that has imported JAX, its callback runs in each collection, and Python drops what is
    # raised there.
    gc.disable()
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    gc.enable()
    signal.signal(signal.SIGALRM, before)


def interrupted_steps(alarm, signals: int, **options) -> int:
    """Step under signals at random times, hold every state against a run without; return how many came."""
    pairs, undisturbed = named(), named()
    optimizer, reference = (hs.AdamW(of, lr=1e-2, seed=3, **options) for of in (pairs, undisturbed))
    rng, came, whole = np.random.default_rng(0), 0, 0
    run(undisturbed, reference, [0])
    run(pairs, optimizer, [0])
    start = time.perf_counter()
    run(undisturbed, reference, [1])
    duration, expected = time.perf_counter() - start, {2: digest(reference)}
    run(pairs, optimizer, [1])
    for i in range(signals):
        (count,) = set(counts(optimizer))
        give_gradients(pairs, count)
        start = time.perf_counter()
        try:
            # Weights change late in a step, and after a step that was broken off the next takes longer.
            alarm(rng.uniform(*((duration / 2, 1.5 * duration) if i % 2 else (1e-5, duration))))
            optimizer.step()
            alarm(0)
            # The first may have waited for others: then most signals would come too late.
            duration = min(duration, time.perf_counter() - start)
        except Interrupted:
            came += 1
        assert torch.is_grad_enabled()
        (now,) = set(counts(optimizer))
        whole += now > count
        if now not in expected:
            run(undisturbed, reference, [count])
            expected[now] = digest(reference)
        assert digest(optimizer) == expected[now]
    assert whole > signals // 4
    return came


@NEEDS_TIMER
@pytest.mark.parametrize("recipe", [None, "eight_bit"])
def test_a_step_is_whole_whenever_a_signal_comes(alarm, recipe):
    assert interrupted_steps(alarm, 10, compile=False, recipe=recipe) > 3


@NEEDS_TIMER
@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
def test_a_step_is_whole_whenever_one_of_many_signals_comes(alarm, compile):
    assert interrupted_steps(alarm, 100, compile=compile) > 30


def send_in_step(monkeypatch, how_often):
    """Let a signal come as often after the first batch is stepped and before it is counted."""
    run_batch, to_come = launch.run_batch, [signal.SIGINT] * how_often

    def run_and_send(batch, *others):
        waiting = run_batch(batch, *others)
        while to_come:
            signal.raise_signal(to_come.pop())
        return waiting

    monkeypatch.setattr(launch, "run_batch", run_and_send)


def test_an_interrupt_is_raised_once_the_step_is_whole(monkeypatch):
    pairs = named([(4, 4), (3,)])
    optimizer = hs.AdamW([{"params": pairs[:1]}, {"params": pairs[1:]}], compile=False)
    give_gradients(pairs, 0)
    send_in_step(monkeypatch, 1)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert counts(optimizer) == [1, 1]
    assert signal.getsignal(signal.SIGINT) is before


def test_gradients_are_on_again_wherever_a_handler_raises_while_they_are_switched():
    pairs = named([(4, 4)])
    optimizer = hs.AdamW(pairs, compile=False)
    for at in range(100):
        give_gradients(pairs, at)
        left = itertools.count(-at)

        def raise_in_grad_mode(frame, event, _, left=left):
            if frame.f_code.co_filename == grad_mode.__file__ and next(left) == 0:
                raise Interrupted

        sys.setprofile(raise_in_grad_mode)
        try:
            optimizer.step()
        except Interrupted:
            assert torch.is_grad_enabled(), at
        else:
            break
        finally:
            sys.setprofile(None)
    assert 4 < at < 99


def test_a_second_interrupt_does_not_wait(monkeypatch):
    pairs = named([(4, 4), (3,)])
    optimizer = hs.AdamW([{"params": pairs[:1]}, {"params": pairs[1:]}], compile=False)
    give_gradients(pairs, 0)
    send_in_step(monkeypatch, 2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert counts(optimizer) == [0, 0]
    assert signal.getsignal(signal.SIGINT) is before


@NEEDS_TIMER
def test_each_of_two_signals_is_handled_where_the_first_raises(alarm):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("SIGTERM"))
    try:
        with pytest.raises(Interrupted), SignalsWait():
            [*map(signal.raise_signal, (signal.SIGALRM, signal.SIGTERM))]
        assert came == ["SIGTERM"]
    finally:
        signal.signal(signal.SIGTERM, before)


@NEEDS_TIMER
def test_handlers_are_back_where_a_signal_comes_before_it_is_told_to_wait(alarm, monkeypatch):
    exchange, before = signal.signal, signal.getsignal(signal.SIGINT)

    def exchange_and_send(number, handler):
        exchange(number, handler)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(signal, "signal", exchange_and_send)
    with pytest.raises(Interrupted), SignalsWait():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_could_not_be_put_back_is_called_nevertheless(monkeypatch):
    came, before = [], {number: signal.getsignal(number) for number in signal.valid_signals()}
    signal.signal(signal.SIGTERM, lambda *_: came.append("SIGTERM"))

    def refuse(*_):
        raise Interrupted

    try:
        with pytest.raises(Interrupted), SignalsWait():
            monkeypatch.setattr(signal, "signal", refuse)
        signal.raise_signal(signal.SIGTERM)
        assert came == ["SIGTERM"]
    finally:
        monkeypatch.undo()
        for number in (number for number in before if signal.getsignal(number) is not before[number]):
            signal.signal(number, before[number])


def test_what_was_stepped_before_a_failure_is_counted(monkeypatch):
    pairs = named([(4, 4), (3,)])
    optimizer = hs.AdamW([{"params": pairs[:1]}, {"params": pairs[1:]}], compile=False)
    run_batch, weights = launch.run_batch, pairs[1][1].detach().clone()

    def fail_at_the_second(batch, *others):
        if batch.slots[0].owner is pairs[1][1]:
            raise RuntimeError("no memory left")
        return run_batch(batch, *others)

    monkeypatch.setattr(launch, "run_batch", fail_at_the_second)
    give_gradients(pairs, 0)
    with pytest.raises(RuntimeError, match="no memory left"):
        optimizer.step()
    assert counts(optimizer) == [1, 0]
    assert torch.equal(pairs[1][1], weights)


def test_a_step_in_another_thread_leaves_signals_alone():
    pairs = named([(4, 4)])
    optimizer = hs.AdamW(pairs, compile=False)
    give_gradients(pairs, 0)
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert counts(optimizer) == [1]
