"""A run that goes from a mesh of JAX to one of PyTorch, and back, has the bits of one that stayed."""

import functools
import pathlib

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import halfstep_torch
from on_torch.processes import in_fresh_processes
from on_torch.sharded import shard

# Rows that two processes share evenly, or not; blocks of 128 lie along rows.
SHAPES = {"dense/kernel": (8, 256), "dense/bias": (256,), "head/kernel": (5, 130)}
RECIPES = {"default": {}, "eight_bit": {"recipe": "eight_bit", "param_storage": "split16"}}


def numbers(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def go_on_in_torch(rank: int, folder: str) -> None:
    """Two processes make step 3 and 4 of each run, under `fully_shard`, with the state file of two steps."""
    for recipe, options in RECIPES.items():
        model = torch.nn.Module()
        for name, shape in SHAPES.items():
            outer, inner = name.split("/")
            if not hasattr(model, outer):
                model.add_module(outer, torch.nn.Module())
            zeros = torch.zeros(shape, dtype=torch.bfloat16)
            model.get_submodule(outer).register_parameter(inner, torch.nn.Parameter(zeros))
        fully_shard(model)
        make = functools.partial(halfstep_torch.AdamW, lr=1e-2, weight_decay=0.1, compile=False)
        optimizer = make(model.named_parameters(), **options)
        halfstep_torch.load_state(pathlib.Path(folder, f"{recipe}-jax"), model, optimizer)
        for step in (3, 4):
            for name, p in model.named_parameters():
                assert isinstance(p, DTensor)
                grad = torch.from_numpy(numbers(step)[name.replace(".", "/")]).bfloat16()
                p.grad = shard(grad, p.device_mesh, p.placements)
            optimizer.step()
        halfstep_torch.save_state(pathlib.Path(folder, f"{recipe}-torch"), model, optimizer)


@pytest.mark.slow
def test_a_run_goes_from_a_jax_mesh_to_fully_sharded_torch_and_back(tmp_path: pathlib.Path):
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import halfstep_jax

    def on_a_mesh(tx, axis: str | None, count: int):
        """Return where parameters and their state lie on so many devices, and a step there."""
        mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
        like = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in SHAPES.items()}
        rows = {name: P(axis) if shape[0] % count == 0 else P() for name, shape in SHAPES.items()}
        placed = {name: NamedSharding(mesh, spec) for name, spec in rows.items()}
        state_placed = halfstep_jax.state_shardings(tx, like, placed)

        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return placed, state_placed, jax.jit(step, out_shardings=(placed, state_placed))

    def bf16(arrays):
        return {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}

    runs = {}
    for recipe, options in RECIPES.items():
        tx = halfstep_jax.adamw(1e-2, weight_decay=0.1, **options)
        placed, state_placed, step = on_a_mesh(tx, "x", 4)
        params = jax.device_put(bf16(numbers(0)), placed)
        state = jax.jit(tx.init, out_shardings=state_placed)(params)
        for t in range(1, 6):
            params, state = step(params, state, jax.device_put(bf16(numbers(t)), placed))
            if t == 2:
                halfstep_jax.save_state(tmp_path / f"{recipe}-jax", params, state, tx)
        assert len(params["dense/kernel"].sharding.device_set) == 4
        runs[recipe] = tx, params, state
    in_fresh_processes(2, functools.partial(go_on_in_torch, folder=str(tmp_path)))
    for recipe, (tx, *expected) in runs.items():
        like = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in SHAPES.items()}
        loaded = halfstep_jax.load_state(tmp_path / f"{recipe}-torch", like, tx)
        placed, state_placed, step = on_a_mesh(tx, "x", 2)
        params, state = jax.device_put(loaded, (placed, state_placed))
        found = step(params, state, jax.device_put(bf16(numbers(5)), placed))
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(tuple(expected)), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), recipe
