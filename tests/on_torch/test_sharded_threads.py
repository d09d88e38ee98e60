"""What went wrong elsewhere in sharded training: the threads where it was told, and that it does not here."""

import functools
import pathlib
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import halfstep_torch as hs
from on_torch.processes import in_processes
from on_torch.sharded import same_bits, shard

SHAPES = {"wide": (6, 4096), "odd": (1, 300), "bias": (3,)}
ROWS = (Shard(0),)
EIGHT_BIT = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}


THREADS: dict[str, Callable[[str], None]] = {}


def thread(check: Callable[[str], None]) -> Callable[..., None]:
    """Make a test of what two processes are to do, given a folder."""
    name = check.__name__
    THREADS[name] = check

    def test(tmp_path: pathlib.Path) -> None:
        in_processes(2, functools.partial(run_thread, name=name, folder=str(tmp_path)))

    return test


def run_thread(rank: int, name: str, folder: str) -> None:
    THREADS[name](folder)


class Model(torch.nn.Module):
    """Parameters over a mesh, or none, with the gradients of a step."""

    def __init__(self, placements=None):
        super().__init__()
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if placements else None
        self.placements = placements
        for name, x in self.tensors(0).items():
            self.register_parameter(name, torch.nn.Parameter(self.placed(x)))

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(s, generator=generator).bfloat16() for name, s in SHAPES.items()}

    def placed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.mesh is None else shard(x, self.mesh, self.placements)

    def train_to(self, optimizer, first: int, last: int) -> "Model":
        for step in range(first, last + 1):
            for name, grad in self.tensors(100 + step).items():
                self.get_parameter(name).grad = self.placed(grad)
            optimizer.step(zero_grad=True)
        return self

    def whole(self) -> list[torch.Tensor]:
        params = (p.detach() for p in self.parameters())
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in params]


def adamw(model: Model, **options) -> hs.AdamW:
    return hs.AdamW(model.named_parameters(), lr=1e-2, compile=False, **options)


def assert_same(model: Model, expected: Model) -> None:
    assert all(same_bits(x, y) for x, y in zip(model.whole(), expected.whole(), strict=True))


def parts(model: Model, optimizer: hs.AdamW, flat: bool = True) -> dict:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def saved(folder: str, name: str, steps: int = 2, placements=ROWS, **options):
    """Save a run after some steps; return the file, the model and its optimizer."""
    model = Model(placements)
    optimizer = adamw(model, **options)
    model.train_to(optimizer, 1, steps)
    dcp.save(parts(model, optimizer), checkpoint_id=f"{folder}/{name}")
    return f"{folder}/{name}", model, optimizer


def loaded(path: str, placements=ROWS, **options):
    """Load it into a model and an optimizer that have just been made."""
    model = Model(placements)
    optimizer = adamw(model, **options)
    state = parts(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=flat)
    return model, optimizer


def dtypes(optimizer: hs.AdamW) -> list[dict]:
    return [{key: x.dtype for key, x in entry.items()} for entry in optimizer.state.values()]


@thread
def test_flashoptim_3_kempnerforge_114_a_resumed_run_goes_on_as_it_was(folder: str) -> None:
    """There the loss went from 2.4 to 1785; a fresh optimizer had no state yet, so moments were reset."""
    for name, options in (("split8", {"param_storage": "split8"}), ("eight", EIGHT_BIT), ("fresh", {})):
        path, model, optimizer = saved(folder, name, **options)
        model.train_to(optimizer, 3, 4)
        again, optimizer = loaded(path, **options)
        assert_same(again.train_to(optimizer, 3, 4), model)


@thread
def test_flashoptim_6_an_axis_shorter_than_the_mesh_is_stepped(folder: str) -> None:
    model, alone = Model(ROWS), Model()
    assert model.get_parameter("odd").to_local().numel() == (300 if dist.get_rank() == 0 else 0)
    assert_same(model.train_to(adamw(model), 1, 2), alone.train_to(adamw(alone), 1, 2))


@thread
def test_axolotl_2744_what_saves_at_the_end_saves_at_the_start(folder: str) -> None:
    """There 8-bit state failed to save at the end of the run, after which nothing was left."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for options in (EIGHT_BIT, {"param_storage": "split16"}, {"recipe": "eight_bit"}):
        model = Model(ROWS)
        optimizer = adamw(model, **options)
        for step in range(3):
            state = get_optimizer_state_dict(model, optimizer, options=full)
            assert dist.get_rank() or set(state["state"]) == set(SHAPES)
            model.train_to(optimizer, step + 1, step + 1)


@thread
def test_torchao_3314_torchtitan_4615_opentau_185_state_comes_back_in_its_dtypes(folder: str) -> None:
    """Codes of 8 bits as such, state of 16 bits, and float32 that is not cast to the weights."""
    wide = {"mu_dtype": "float32", "nu_dtype": "float32"}
    for name, options, kept in (
        ("codes", EIGHT_BIT, {torch.float8_e4m3fn, torch.uint8}),
        ("bf16", {}, {torch.bfloat16}),
        ("float32", wide, {torch.float32}),
    ):
        path, _, optimizer = saved(folder, name, **options)
        before = dtypes(optimizer)
        assert kept <= {dtype for entry in before for dtype in entry.values()}
        assert dtypes(loaded(path, **options)[1]) == before


@thread
def test_torchao_4912_bitsandbytes_2080_formats_are_those_of_the_whole(folder: str) -> None:
    """There a shard was small enough for 8 bits on one mesh, and not on another."""
    alone = [row.format for row in hs.describe(adamw(Model(), **EIGHT_BIT)).arrays]
    for placements in (ROWS, (Replicate(),)):
        rows = hs.describe(adamw(Model(placements), **EIGHT_BIT)).arrays
        assert [row.format for row in rows] == alone


@thread
def test_opentau_184_master_weights_are_the_ones_that_were_saved(folder: str) -> None:
    """There they were made anew from bfloat16."""
    path, _, optimizer = saved(folder, "master", param_storage="master")
    values, again = (hs.float32_params(o) for o in (optimizer, loaded(path, param_storage="master")[1]))
    assert all(same_bits(values[name].to_local(), again[name].to_local()) for name in SHAPES)
    assert any(
        (x.to_local() != x.to_local().bfloat16()).any() for x in again.values() if x.to_local().numel()
    )


@thread
def test_tt_metal_53212_the_bias_is_corrected_by_the_betas_that_were_saved(folder: str) -> None:
    path, model, optimizer = saved(folder, "betas", betas=(0.5, 0.7))
    model.train_to(optimizer, 3, 3)
    again, optimizer = loaded(path)  # made with others
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.7)
    assert_same(again.train_to(optimizer, 3, 3), model)


@thread
def test_prime_rl_1075_a_trainer_signs_every_array_of_the_state(folder: str) -> None:
    """There it read samples of each before saving and after loading, and arrays of 8 bits had no strides."""

    def signature(entry) -> object:
        if isinstance(entry, dict):
            return {key: signature(value) for key, value in entry.items()}
        if not isinstance(entry, torch.Tensor):
            return str(entry)
        x = entry.to_local() if isinstance(entry, DTensor) else entry
        count = min(x.numel(), 1000)
        samples = x.as_strided(size=(count,), stride=(max(x.numel() // 1000, 1),))
        return x.dtype, x.shape, [f"{sample:.3e}" for sample in samples]

    for name, options in (("signed", EIGHT_BIT), ("signed_split", {"param_storage": "split16"})):
        path, _, optimizer = saved(folder, name, **options)
        before = signature(optimizer.state_dict()["state"])
        assert signature(loaded(path, **options)[1].state_dict()["state"]) == before


@thread
def test_pytorch_async_save_has_the_state_of_its_call(folder: str) -> None:
    """Given a process group of its own, as its collectives would else cross those of training."""
    group = dist.new_group(backend="gloo")
    path, (model, optimizer) = f"{folder}/async", saved(folder, "async_before")[1:]
    future = dcp.async_save(parts(model, optimizer), checkpoint_id=path, process_group=group)
    model.train_to(optimizer, 3, 4)
    future.result()
    again, other = loaded(path)
    assert int(other.state[again.get_parameter("wide")]["step"]) == 2
    assert_same(again.train_to(other, 3, 4), model)
