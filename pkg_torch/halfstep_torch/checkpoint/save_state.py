"""Weights and optimizer state to a state file and back, so that a run resumes bit for bit.

Contract: section T. `halfstep_jax` reads and writes the same files.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.checkpoint.header import Recipe, check_names, make_header, paired, read_recipes
from halfstep.checkpoint.state_file import FileArray, bytes_of, file_array, read_state_file, write_state_file
from halfstep.hyperparameters import Values
from halfstep_torch.checkpoint.recipe import arrays_of, idle_places, recipe_of
from halfstep_torch.checkpoint.weights_in_codes import weights_of_the_model
from halfstep_torch.distributed.agreement import Attempt, agree
from halfstep_torch.distributed.collectives import by_mesh, gather_whole
from halfstep_torch.distributed.shards import is_sharded, local_part, window_of
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.signals import between_steps
from halfstep_torch.leaves.group_names import StateDict
from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.links.chain import HEADER
from halfstep_torch.links.link import Link
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.optimizer_state.saved_state import checked_entry, load, with_headers
from halfstep_torch.say_once import say_once
from halfstep_torch.sharded.slots import new_state
from halfstep_torch.storage.stored_moment import State


class _Stepped(NamedTuple):
    """A parameter that the optimizer steps.

    Attributes:
        param: the weights.
        group: the index of its group.
        plan: the plan of its step.
        links: the links of the chain, each with the values of the parameter's group.
    """

    param: Tensor
    group: int
    plan: Plan
    links: list[tuple[Link, Values]]


@between_steps
@torch.no_grad()
def save_state(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Write weights, state, counts and seeds to one file, from which either package can resume.

    `docs/how-to/checkpoints.md` has the layout. The file is safetensors, and appears when it is complete. It
    does not contain the model's buffers. Steps of other threads wait until it is written. With DTensors all
    processes call it together, gather one array at a time, and the first process writes the file. Any other
    mesh, or a single process, can load it.

    Args:
        path: the path of the file. An existing file is replaced.
        model: the model. All its parameters are written, including parameters that are not optimized.
        optimizer: the optimizer of the model's parameters.

    Raises:
        TypeError: if it is not an `Optimizer`, or a file cannot hold a parameter's dtype.
        ValueError: if the model lacks a parameter of the optimizer, or two parameters have the same name.
        OSError: if writing fails.
        RuntimeError: if the last load failed while it copied.

    Example:
        >>> import pathlib, tempfile, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamW(model.named_parameters(), lr=1e-3, seed=7)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.safetensors"
        >>> hs.save_state(path, model, optimizer)
        >>> hs.load_state(path, model, optimizer)

    Source: ours (contract T).
    """
    caller = "save_state"
    optimizer = check_optimizer(caller, optimizer)
    weights, stepped = _parameters(caller, model, optimizer)
    optimizer.check_loaded()
    meshes = list(by_mesh(filter(is_sharded, weights.values())))
    writes = not meshes or torch.distributed.get_rank() == 0
    arrays = {f"params/{leaf}": _file_array(caller, leaf, p, writes) for leaf, p in weights.items()}
    recipes, formats = {leaf: [] for leaf in weights}, {}
    group_of = functools.cache(optimizer._group)
    for leaf, (param, group, plan, links) in stepped.items():
        kept = optimizer.state.get(param, {})
        state = kept if "step" in kept else new_state(param, plan)
        _, _, others = checked_entry(caller, group_of(group), leaf, param, kept)
        if others:
            say_once(
                f"{caller}: the state of {leaf!r} has {', '.join(others)} of another library, "
                "which the file does not hold. Save it apart, or use state_dict()."
            )
        recipes[leaf] = recipe_of(plan, links, int(state["step"]))
        state = {**state, **weights_of_the_model(param, plan, state)}
        for key, field, label in arrays_of(plan):
            name = f"{field}/{leaf}"
            arrays[name] = _file_array(caller, name, state[key], writes, codes=True)
            formats |= {name: label} if label else {}
    with Attempt() as attempt:
        if writes:
            write_state_file(path, make_header("halfstep_torch", recipes, formats), arrays)
    agree(caller, meshes, attempt.error, [{} for _ in meshes])
    if attempt.error is not None:
        raise attempt.error


@between_steps
@torch.no_grad()
def load_state(path: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Load the weights and the state from a file written by `save_state` of either package.

    Steps and seeds come from the file. Numbers such as betas must be the same in the optimizer and the file,
    except for learning rates and weight decay, which the optimizer keeps. Everything is checked before
    anything is set. If setting fails (no memory left, an interrupt), `step` raises until a load succeeds.

    Args:
        path: the path of a file from `save_state`.
        model: a model with the names, shapes and dtypes of the saved run.
        optimizer: the optimizer of its parameters, built as in the saved run.

    Raises:
        TypeError: if it is not an `Optimizer`.
        ValueError: if the file is not a state file, is damaged, has a later version, or differs from model or
            chain. The message has the place. Also if it has state of transforms that only Optax has.
        OSError: if reading fails.

    Source: ours (contract T).
    """
    caller = "load_state"
    optimizer = check_optimizer(caller, optimizer)
    weights, stepped = _parameters(caller, model, optimizer)
    header, arrays = read_state_file(caller, path)
    recipes: dict[str, Recipe] = {leaf: [] for leaf in weights}
    recipes |= {leaf: recipe_of(plan, links, 0) for leaf, (_, _, plan, links) in stepped.items()}
    saved = read_recipes(caller, header, recipes)
    due = {f"params/{leaf}" for leaf in weights}
    kept = {leaf: list(arrays_of(plan)) for leaf, (_, _, plan, links) in stepped.items()}
    due |= {f"{field}/{leaf}" for leaf, rows in kept.items() for _, field, _ in rows}
    check_names(caller, "array", arrays, due)
    read = {leaf: _tensor(caller, f"params/{leaf}", arrays, p.dtype, p.shape) for leaf, p in weights.items()}
    states = {}
    for leaf, (param, _, plan, _) in stepped.items():
        states[param] = {"step": torch.tensor(_step(caller, leaf, saved[leaf]))}
        for key, field, _ in kept[leaf]:
            spec = plan.arrays[key]
            states[param][key] = _tensor(
                caller, f"{field}/{leaf}", arrays, spec.dtype, spec.shape(tuple(param.shape))
            )
    for leaf, param in weights.items():
        _check_writable(caller, leaf, local_part(param))

    def set_weights() -> None:
        for leaf, param in weights.items():
            local_part(param).copy_(read[leaf][window_of(param).box])

    state_dict = _state_dict(optimizer, states, _seeds(caller, stepped, recipes, saved))
    load(optimizer, state_dict, set_weights)


def _parameters(
    caller: str, model: torch.nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, _Stepped]]:
    """Return the parameters of a model by leaf name, and the optimized parameters."""
    groups = [i for i, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    links = optimizer.bound_links()
    stepped = {
        leaf: _Stepped(param, i, plan, links[i])
        for (leaf, param, plan), i in zip(optimizer.plans(), groups, strict=True)
    }
    names = {id(row.param): leaf for leaf, row in stepped.items()}
    weights: dict[str, Tensor] = {}
    named = dict(model.named_parameters())
    for leaf_of_model, param in zip(leaf_names(list(named)), named.values(), strict=True):
        leaf = names.pop(id(param), None) or leaf_of_model
        if leaf in weights or (leaf in stepped and stepped[leaf].param is not param):
            raise ValueError(f"{caller}: two parameters have the name {leaf!r}. Give the optimizer names.")
        weights[leaf] = param
    if names:
        leaf = next(iter(names.values()))
        raise ValueError(
            f"{caller}: the optimizer's parameter {leaf!r} is not one of the model. Pass its own model."
        )
    return weights, stepped


def _check_writable(caller: str, leaf: str, param: Tensor) -> None:
    """Raise ValueError for an expanded weight, which cannot be written."""
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise ValueError(
            f"{caller}: the weight {leaf!r} is an expanded tensor, which cannot be written. "
            "Clone it in the model before you load."
        )


def _step(caller: str, leaf: str, recipe: Recipe) -> int:
    """Return the step of a weight, which is the count of all its links."""
    counts = {link["count"] for link in recipe} - {None}
    if len(counts) > 1:
        raise ValueError(
            f"{caller}: the links of {leaf!r} have different counts, {sorted(counts)}; in torch a "
            "parameter has one step. Load the file in halfstep_jax."
        )
    return min(counts, default=0)


def _seeds(
    caller: str, stepped: Mapping[str, _Stepped], recipes: Mapping[str, Recipe], saved: Mapping[str, Recipe]
) -> dict[tuple[int, int], list[int]]:
    """Return the seeds in the file by group and link index, one each or two for `store_state`."""
    seeds: dict[tuple[int, int], list[int]] = {}
    for leaf, (_, group, plan, links) in stepped.items():
        rest = iter(paired(saved[leaf], recipes[leaf]))
        for place in (*plan.rule_indices, *idle_places(plan, links)):
            seed_here = links[place][0].seed
            count = len(seed_here) if isinstance(seed_here, (tuple, list)) else 1
            words = [next(rest)["seed"] for _ in range(count)]
            if None in words:
                continue
            seed = [(high << 32) | low for high, low in words]
            before = seeds.setdefault((group, place), seed)
            if before != seed:
                raise ValueError(
                    f"{caller}: {links[place][0].name} has the seed {seed} at {leaf!r} and {before} at "
                    "another weight of the group; a param group has one. Put them into groups of their own."
                )
    return seeds


def _state_dict(
    optimizer: Optimizer, states: Mapping[Tensor, State], seeds: Mapping[tuple[int, int], list[int]]
) -> StateDict:
    """Return the optimizer's state dict with other state and seeds."""
    # The current state is replaced, so it may be one that could not be saved.
    state_dict = with_headers(optimizer, {**torch.optim.Optimizer.state_dict(optimizer), "state": {}})
    params = [param for group in optimizer.param_groups for param in group["params"]]
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    state_dict["state"] = {i: states[param] for i, param in zip(ids, params, strict=True)}
    for number, group in enumerate(state_dict["param_groups"]):
        group_seeds = list(group[HEADER]["seeds"])
        for (owner, place), seed in seeds.items():
            if owner == number:
                group_seeds[place] = tuple(seed) if isinstance(group_seeds[place], (tuple, list)) else seed[0]
        group[HEADER] = {**group[HEADER], "seeds": group_seeds, "counts": ""}
    return state_dict


def _file_array(caller: str, name: str, x: Tensor, writes: bool, codes: bool = False) -> Any:  # or None
    """Return a tensor for the file, 8-bit codes as bytes, or None in a process that writes no file."""
    if is_sharded(x):
        x = gather_whole([x])[0]
    if not writes:
        return None
    flat = x.detach().cpu().contiguous().reshape(-1)
    return file_array(caller, name, _dtype_of(x.dtype, codes), x.shape, flat.view(torch.uint8).numpy())


def _tensor(
    caller: str, name: str, arrays: Mapping[str, FileArray], dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Return a copy of an array from a file, with its dtype and shape checked."""
    due = _dtype_of(dtype, codes=not name.startswith("params/"))
    data = torch.from_numpy(bytes_of(caller, name, arrays[name], due, shape))
    # torch cannot view an empty array in another dtype, because its stride is 0.
    return data.view(dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)


def _dtype_of(dtype: torch.dtype, codes: bool) -> str:
    """Return the name of a torch dtype in a file."""
    if codes and dtype.itemsize == 1:
        return "uint8"
    return "uint16" if codes and dtype == torch.int16 else dtype_name(dtype)
