"""What training GPT-2 small, of 124 million parameters, takes in memory and time, by the optimizer.

    make peers-memory
    python benchmarks/peers_memory.py [--only TEXT ...] [--json benchmarks/results/NAME.json]

Each optimizer trains in a process of its own; two are on float32 weights. Prints
bytes of state per parameter, as counted; the most memory that the process held in a step, less what it held
before there was a model, in GB; and seconds of processor time of a step, with its forward and backward pass
over 32 tokens, and of the optimizer alone: the least of the steps behind the first. A small step of the same
optimizer comes before the model, so that libraries and compilers are not counted. Products of the model in
torch are of float32, a matrix at a time: a processor without bfloat16 takes fifty times as long for them.
`comparison.py --write` makes a table of the newest record.
"""

import argparse
import datetime
import importlib.metadata
import json
import logging
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import peers
import torch
from runs import BETAS, tensors_in
from timing import QUIET, in_quiet_process, machine

import halfstep_jax
from report import print_table

LAYERS, WIDTH, HEADS, WORDS, PLACES, TOKENS = 12, 768, 12, 50257, 1024, 32
STEPS = 3
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Of each process: what it frees goes back to the system, not into a heap that is full of holes."""
_NUMBERS = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.1}
TORCH = (
    *("torch AdamW, float32", "torch AdamW(fused)", "torchao _AdamW, stochastic"),
    *("torchao AdamW8bit, stochastic", "torchao AdamW4bit, stochastic", "bitsandbytes AdamW8bit"),
)
RECIPES = ("default", "one_pass", "eight_bit", "four_bit")
JAX = ("optax.adamw, float32", "optax.adamw", *(f"halfstep_jax, {name}" for name in RECIPES))
ENTRIES = (*TORCH, *(f"halfstep_torch, {name}" for name in RECIPES), *JAX)


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of GPT-2 small, whose head is its embedding."""
    found: dict[str, tuple[int, ...]] = {"words": (WORDS, WIDTH), "places": (PLACES, WIDTH)}
    for i in range(LAYERS):
        found |= {f"{i}.{name}": (WIDTH,) for name in ("scale1", "shift1", "scale2", "shift2")}
        for name, (ins, outs) in {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}.items():
            found |= {f"{i}.{name}": (ins * WIDTH, outs * WIDTH), f"{i}.{name}_bias": (outs * WIDTH,)}
    return found | {"scale": (WIDTH,), "shift": (WIDTH,)}


PARAMETERS = sum(map(math.prod, shapes().values()))


def weights() -> dict[str, np.ndarray]:
    """Return first weights in float32."""
    rng = np.random.default_rng(0)
    return {
        name: np.ones(shape, np.float32) if "scale" in name
        else np.zeros(shape, np.float32) if len(shape) == 1
        else rng.standard_normal(shape, np.float32) * np.float32(0.02)
        for name, shape in shapes().items()
    }  # fmt: skip


def loss(of: Any, w: dict[str, Any], tokens: Any) -> Any:
    """Return the mean loss of the next token; `of` has the operations of a framework."""
    x = of.take(w["words"], tokens) + w["places"][: len(tokens)]
    for i in range(LAYERS):
        p = {name.split(".")[1]: value for name, value in w.items() if name.startswith(f"{i}.")}
        h = of.norm(x, p["scale1"], p["shift1"])
        x = x + of.times(of.attend(of.times(h, p["qkv"]) + p["qkv_bias"]), p["out"]) + p["out_bias"]
        h = of.norm(x, p["scale2"], p["shift2"])
        x = x + of.times(of.gelu(of.times(h, p["up"]) + p["up_bias"]), p["down"]) + p["down_bias"]
    return of.next_token(of.times(of.norm(x, w["scale"], w["shift"]), w["words"].T), tokens)


class _Times(torch.autograd.Function):
    """A product of float32 copies, which nothing keeps."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x.float() @ w.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, *upstream):
        (g,), (x, w) = upstream, ctx.saved_tensors
        g = g.float()
        return (g @ w.float().T).to(x.dtype), (x.float().T @ g).to(w.dtype)


class InTorch:
    """Operations of torch."""

    times, gelu = staticmethod(_Times.apply), staticmethod(torch.nn.functional.gelu)

    @staticmethod
    def take(w, tokens):
        """Return rows."""
        return torch.nn.functional.embedding(tokens, w)

    @staticmethod
    def norm(x, scale, shift):
        """Return a normalized x."""
        return torch.nn.functional.layer_norm(x, (WIDTH,), scale, shift)

    @staticmethod
    def attend(qkv):
        """Return what heads attend to."""
        q, k, v = qkv.float().reshape(len(qkv), 3, HEADS, -1).permute(1, 2, 0, 3)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(0, 1).reshape(len(qkv), WIDTH).to(qkv.dtype)

    @staticmethod
    def next_token(logits, tokens):
        """Return the loss."""
        return torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])


class InJax:
    """Operations of JAX."""

    times, gelu = staticmethod(jnp.matmul), staticmethod(jax.nn.gelu)

    @staticmethod
    def take(w, tokens):
        """Return rows."""
        return w[tokens]

    @staticmethod
    def norm(x, scale, shift):
        """Return a normalized x."""
        return jax.nn.standardize(x) * scale + shift

    @staticmethod
    def attend(qkv):
        """Return what heads attend to."""
        q, k, v = qkv.reshape(len(qkv), 3, HEADS, -1).transpose(1, 0, 2, 3)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(len(qkv), WIDTH)

    @staticmethod
    def next_token(logits, tokens):
        """Return the loss."""
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:-1].astype(jnp.float32), tokens[1:])
        return losses.mean()


def _maker(name: str) -> Callable[..., Any]:
    if name in ("torch AdamW, float32", "optax.adamw, float32"):
        name = {"torch": "torch AdamW(fused)", "optax": "optax.adamw"}[name[:5]]
    if name.startswith("halfstep_jax"):
        recipe = name.split(", ")[1].replace("default", "sixteen_bit")
        numbers = {"b1": BETAS[0], "b2": BETAS[1], "eps": _NUMBERS["eps"], "recipe": recipe}
        tx = halfstep_jax.adamw(_NUMBERS["lr"], weight_decay=_NUMBERS["weight_decay"], **numbers)
        return lambda: peers.optax_pair(tx)
    entry = next(entry for entry in peers.entries() if entry.name == name)
    return lambda *params: entry.make(*params, **_NUMBERS, **entry.arguments[0])


def _memory(field: str) -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def _forget_most() -> None:
    """Let the most memory that the process has held be what it holds now."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


class _Torch:
    def __init__(self, name: str, arrays: dict[str, np.ndarray]):
        dtype = torch.float32 if name.endswith("float32") else torch.bfloat16
        self.w = {key: torch.nn.Parameter(torch.from_numpy(x).to(dtype)) for key, x in arrays.items()}
        self.optimizer = _maker(name)(list(self.w.values()))

    def gradients(self, tokens) -> None:
        loss(InTorch, self.w, torch.from_numpy(tokens)).backward()

    def update(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def state(self) -> int:
        return sum(x.nbytes for x in tensors_in(list(self.optimizer.state.values())))


class _Jax:
    """A step is one program, whose weights and state are donated; that of the update alone comes last."""

    def __init__(self, name: str, arrays: dict[str, np.ndarray]):
        dtype = jnp.float32 if name.endswith("float32") else jnp.bfloat16
        init, self._update = _maker(name)()
        w = {key: jnp.asarray(x, dtype) for key, x in arrays.items()}
        self.held: Any = (w, init(w))

        def step(w, state, tokens):
            g = jax.grad(lambda w: loss(InJax, w, tokens))(w)
            return self._update(w, state, g)

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._alone = jax.jit(self._update, donate_argnums=(0, 1))

    def gradients(self, tokens) -> None:
        self.held = jax.block_until_ready(self._step(*self.held, tokens))

    def update(self) -> None:
        """The update is in the step."""

    clear = update

    def alone(self) -> None:
        g = jax.tree.map(jnp.zeros_like, self.held[0])
        jax.block_until_ready(g)
        start = time.process_time()
        self.held = jax.block_until_ready(self._alone(*self.held, g))
        self.seconds = time.process_time() - start

    def state(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.held[1]))


def trained(name: str) -> dict:
    """Train with an optimizer in this process, and return what that took."""
    kind = _Jax if name in JAX else _Torch
    tokens = np.random.default_rng(1).integers(0, WORDS, TOKENS)
    _small(kind, name)
    arrays = weights()
    before = _memory("VmRSS") - sum(x.nbytes for x in arrays.values())
    run = kind(name, arrays)
    arrays.clear()
    first, whole, update = 0, [], []
    for step in range(STEPS):
        start = time.process_time()
        run.gradients(tokens)
        between = time.process_time()
        run.update()
        end = time.process_time()
        run.clear()
        whole.append(end - start)
        update.append(end - between)
        if step == 0:
            first = _memory("VmHWM") - before
            _forget_most()
    peak = _memory("VmHWM") - before
    if isinstance(run, _Jax):
        update = [(run.alone(), run.seconds)[1] for _ in range(STEPS)]
    return {
        "name": name,
        "state": run.state() / PARAMETERS,
        "first peak": first / 1e9,
        "peak": peak / 1e9,
        "step": min(whole[1:]),
        "update": min(update[1:]),
    }


def _small(kind: type, name: str) -> None:
    """Take two steps of a small model, with which libraries are loaded and a step is compiled."""
    arrays = {"a": np.ones((64, 64), np.float32), "b": np.ones(64, np.float32)}
    if kind is _Torch:
        run = _Torch(name, arrays)
        for _ in range(2):
            for p in run.w.values():
                p.grad = torch.ones_like(p)
            run.update()
    else:
        init, update = _maker(name)()
        w = {key: jnp.asarray(x, jnp.bfloat16) for key, x in arrays.items()}
        jax.block_until_ready(jax.jit(update)(w, init(w), w))


def main() -> None:
    """Train with each optimizer, or with one in this process, whose row is printed."""
    parser = argparse.ArgumentParser(description="Memory and time of training, by the optimizer.")
    parser.add_argument("--only", nargs="*", default=[""], help="names that contain one of these")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    threads = in_quiet_process()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if arguments.alone:
        print(json.dumps(trained(arguments.alone)))
        return
    rows = []
    for name in ENTRIES:
        if any(text in name for text in arguments.only):
            command = [sys.executable, __file__, "--alone", name]
            done = subprocess.run(
                command, env={**os.environ, **QUIET, **RETURNED}, capture_output=True, text=True
            )
            if done.returncode:
                print(f"{name}: {done.stderr[-2000:]}", file=sys.stderr)
                continue
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], file=sys.stderr, flush=True)
    keys = ("state", "first peak", "peak", "step", "update")
    print_table(
        "<optimizer | bytes of state | peak GB, first step | peak GB | s per step | s of the optimizer",
        ((row["name"], *(f"{row[key]:.2f}" for key in keys)) for row in rows),
    )
    if arguments.json:
        about = machine(threads)
        about["versions"] |= {name: importlib.metadata.version(name) for name in ("torchao", "bitsandbytes")}
        record = {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release().split('-')[0]}",
            "machine": about,
            "load": os.getloadavg()[0],
            "parameters": PARAMETERS,
            "tokens": TOKENS,
            "steps": STEPS,
            "rows": rows,
            "not run": [name for name in ENTRIES if name not in {row["name"] for row in rows}],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
