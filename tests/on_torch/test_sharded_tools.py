"""What works on an optimizer from outside, where parameters are DTensors."""

import functools
import pathlib

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

import halfstep_torch as hs
from on_torch.processes import in_processes
from on_torch.sharded import RECIPES, Holder, Run, assert_same_bits, layouts, same_bits, shard
from on_torch.steps import step_by_ones


def adamw(params, **options) -> hs.Optimizer:
    return hs.AdamW(params, lr=1e-2, weight_decay=0.1, compile=False, **options)


def float32_weights_are_those_of_one_process(rank: int) -> None:
    for recipe in ("compensated", "split8", "split16", "master", "default"):
        make = functools.partial(adamw, **RECIPES[recipe])
        alone = Run(make).steps(1, 1)
        wanted = hs.float32_params(alone.optimizer)
        shifted = {name: value + 2.0**-10 * value for name, value in wanted.items()}
        hs.set_float32_params(alone.optimizer, shifted)
        for layout, mesh, place in layouts():
            run = Run(make, place).steps(1, 1)
            values = hs.float32_params(run.optimizer)
            assert all(
                same_bits(values[name].to_local(), shard(wanted[name], mesh, p.placements).to_local())
                for name, p in run.params.items()
            ), f"{recipe}, {layout}"
            hs.set_float32_params(run.optimizer, shifted)
            assert_same_bits(run, alone, f"{recipe}, {layout}")


def weights_in_codes_are_those_of_one_process(rank: int) -> None:
    """New codes, and those of after two steps: in the state, and as they are read. Borders cut rows, too."""
    make = functools.partial(adamw, param_storage="int8", mu_dtype=hs.relative("int4", 32, min_size=0))
    run_of = functools.partial(Run, make, dtype=torch.float32)
    expected = [run_of().steps(1, last) for last in (0, 2)]
    for layout, _, place in layouts():
        for last, alone in zip((0, 2), expected, strict=True):
            run = run_of(place).steps(1, last)
            found, wanted = (hs.stored_params(x.optimizer) for x in (run, alone))
            assert found.keys() == wanted.keys() == run.params.keys()
            for name, stored in wanted.items():
                assert same_bits(found[name].codes, stored.codes), f"{layout}, {last}: {name}"
                assert same_bits(found[name].decode(), stored.decode()), f"{layout}, {last}: {name}"
        assert_same_bits(run, alone, layout)


def averages_are_those_of_one_process(rank: int) -> None:
    alone = Run(adamw)
    whole = AveragedModel(Holder(alone), multi_avg_fn=hs.ema_params(Holder(alone), 0.9))
    for t in range(3):
        alone.steps(t + 1, t + 1)
        whole.update_parameters(Holder(alone))
    for layout, mesh, place in layouts():
        run = Run(adamw, place)
        averaged = AveragedModel(Holder(run), multi_avg_fn=hs.ema_params(Holder(run), 0.9))
        for t in range(3):
            run.steps(t + 1, t + 1)
            averaged.update_parameters(Holder(run))
        for (name, p), q in zip(averaged.module.named_parameters(), whole.module.parameters(), strict=True):
            assert same_bits(p.to_local(), shard(q.detach(), mesh, p.placements).to_local()), (
                f"{name}, {layout}"
            )


def schedule_free_averages_are_those_of_one_process(rank: int) -> None:
    """Steps, what `eval` puts into the model, and the weights that `train` gives back; blocks are cut."""
    lead = hs.scaled("int8", 128, min_size=0)
    make = functools.partial(hs.AdamWScheduleFree, warmup_steps=2, lead_dtype=lead, compile=False)
    alone, averaged = (Run(make).steps(1, 2) for _ in range(2))
    averaged.optimizer.eval()
    for layout, _, place in layouts():
        run = Run(make, place).steps(1, 2)
        assert_same_bits(run, alone, f"schedule-free, {layout}")
        run.optimizer.eval()
        assert_same_bits(run, averaged, f"averaged, {layout}")
        run.optimizer.train()
        assert_same_bits(run, alone, f"trained on, {layout}")


def reports_tell_this_process_from_all(rank: int) -> None:
    """State per rank is the state over the ranks, to within a block per leaf, where no block is cut."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(64, 255)).to(torch.bfloat16)
    fully_shard(model)
    optimizer = hs.AdamW(model.named_parameters(), recipe="eight_bit", compile=False)
    for _ in range(2):  # the second time with state
        report, sizes = hs.memory_report(model, optimizer), state_sizes(hs.describe(optimizer))
        assert report.total_per_device == sum(here + 8 for _, here in sizes.values()) + 4 * sum(
            p.to_local().numel() for p in model.parameters()
        )
        count = torch.distributed.get_world_size()
        for total, here in sizes.values():
            assert abs(here - total / count) <= 2 * 128
        assert "per device" in str(report)
        assert "per device" in str(hs.describe(optimizer))
        step_by_ones(optimizer)
    for (total, on_one), p in zip(sizes.values(), model.parameters(), strict=True):
        arrays = [x for x in optimizer.state[p].values() if hasattr(x, "to_local")]
        assert on_one == sum(x.to_local().numel() * x.element_size() for x in arrays)
        assert total == sum(x.numel() * x.element_size() for x in arrays)


def state_sizes(description) -> dict[str, tuple[int, int]]:
    """Return the bytes that are kept for every weight, in all and in this process."""
    sizes: dict[str, tuple[int, int]] = {}
    for row in description.arrays:
        if row.name != "weight":
            total, here = sizes.get(row.leaf, (0, 0))
            on_one = row.nbytes if row.per_device is None else row.per_device
            sizes[row.leaf] = total + row.nbytes, here + on_one
    return sizes


def a_state_file_goes_from_any_mesh_to_any_other(
    rank: int, folder: str, recipes=("units", "split16", "float8")
) -> None:
    """That of the package for JAX has the same names and arrays (`tests/twin/test_state_file.py`)."""
    for recipe in recipes:
        make = functools.partial(adamw, **RECIPES[recipe])
        expected = Run(make).steps(1, 4)
        placed = [lambda x: x]
        placed += [place for _, _, place in layouts()]
        for i, place in enumerate(placed):
            path = pathlib.Path(folder) / f"{recipe}{i}{f'-{rank}' if not i else ''}.safetensors"
            source = Run(make, place).steps(1, 2)
            hs.save_state(path, Holder(source), source.optimizer)
            torch.distributed.barrier()
            for other in (placed[0], placed[-i]):
                run = Run(make, other)
                hs.load_state(path, Holder(run), run.optimizer)
                assert_same_bits(run.steps(3, 4), expected, f"{recipe}, {i}")


def diagnoses_are_those_of_one_process(rank: int) -> None:
    """Of torch's optimizer, which loses much, and of ours, whose state is gathered from cut blocks, too."""

    def theirs(params):
        return torch.optim.AdamW([p for _, p in params], lr=1e-4, weight_decay=0.1)

    ours = functools.partial(adamw, param_storage="compensated", **RECIPES["units"])
    for name, make in {"torch": theirs, "ours": ours}.items():
        alone = Run(make).steps(1, 1)
        wanted = hs.diagnose(Holder(alone), alone.optimizer)
        assert wanted.norm > 0
        for layout, _, place in layouts():
            run = Run(make, place).steps(1, 1)
            before = local_copies(run)
            found = hs.diagnose(Holder(run), run.optimizer)
            assert all(same_bits(x, y) for x, y in zip(local_copies(run), before, strict=True))
            for field in ("updates_lost", "decay_lost", "leaves", "moments", "nonfinite"):
                assert getattr(found, field) == getattr(wanted, field), f"{name}, {layout}: {field}"
            assert abs(found.norm - wanted.norm) <= 2 * 24 * 2.0**-23 * wanted.norm
            # In bfloat16: eight bits, and one norm of norms more.
            assert abs(found.plain_norm - wanted.plain_norm) <= 3 * 2.0**-8 * wanted.plain_norm
    assert hs.diagnose(Holder(alone), theirs(list(alone.params.items()))).updates_lost > 0


def a_monitor_measures_the_whole_model(rank: int) -> None:
    def row_of(run: Run) -> dict[str, float]:
        watch = hs.Monitor(run.optimizer, every=1)
        watch.read()
        run.steps(2, 2)
        row = watch.read()
        assert row
        return row

    for recipe in ("default", "one_pass"):
        make = functools.partial(adamw, **RECIPES[recipe])
        wanted = row_of(Run(make).steps(1, 1))
        for layout, _, place in layouts():
            found = row_of(Run(make, place).steps(1, 1))
            for name, x in wanted.items():
                # Of a cut weight other elements are the first 16,384.
                close = 0.02 if name == "update_norm" else 1e-5
                assert abs(found[name] - x) <= close * abs(x), f"{recipe}, {layout}: {name}"


def local_copies(run: Run) -> list[torch.Tensor]:
    tensors = [x for p in run.params.values() for x in (p, *run.optimizer.state[p].values())]
    local = (x.to_local() if hasattr(x, "to_local") else x for x in tensors)
    return [x.detach().clone() for x in local]


def float32_state_is_that_of_one_process(rank: int) -> None:
    make = functools.partial(adamw, param_storage="split16", **RECIPES["units"])
    alone = Run(make).steps(1, 2)
    wanted = hs.float32_state_dict(alone.optimizer)
    for layout, mesh, place in layouts():
        run = Run(make, place).steps(1, 2)
        found = hs.float32_state_dict(run.optimizer)
        for i, p in enumerate(run.params.values()):
            for key, whole in wanted["state"][i].items():
                x = found["state"][i][key]
                here = shard(whole, mesh, p.placements).to_local() if whole.dim() else whole
                assert same_bits(x.to_local() if hasattr(x, "to_local") else x, here), layout
        # From whole arrays and from shards, the same rounding.
        expected = Run(make).steps(1, 0)
        hs.load_float32_state_dict(expected.optimizer, wanted)
        for source in (wanted, found):
            fresh = Run(make, place)
            hs.load_float32_state_dict(fresh.optimizer, source)
            assert_same_bits(fresh, expected, layout)
    torch.optim.AdamW(run.params.values()).load_state_dict(found)


class Layers(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 256))
        self.to(torch.bfloat16)

    def backward(self, rank: int) -> None:
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(rank)).bfloat16()
        self(x).float().square().mean().backward()


def released_gradients_step_as_after_backward(rank: int) -> None:
    models = [Layers(), Layers()]
    optimizers = []
    for model in models:
        fully_shard(model)
        optimizers.append(hs.AdamW(model.named_parameters(), recipe="eight_bit", compile=False))
    hs.release_gradients(optimizers[0])
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.backward(rank)
            if model is models[0]:
                assert all(p.grad is None for p in model.parameters())
            optimizer.step(zero_grad=True)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert same_bits(p.to_local(), q.to_local())
    cut = hs.AdamW(models[1].named_parameters(), mu_dtype=hs.scaled("int8", 96, min_size=0, min_ndim=0))
    with pytest.raises(RuntimeError, match=r"the step of '.*bias' needs words of other processes"):
        hs.release_gradients(cut)
    with pytest.raises(RuntimeError, match=r"only after backward. Step after that, or use fully_shard"):
        hs.release_gradients(hs.AdamW(Layers().named_parameters()))


def parameters_that_fully_shard_replaced_are_missed_by_name(rank: int) -> None:
    model = Layers()
    optimizer = hs.AdamW(model.named_parameters())
    fully_shard(model)
    model.backward(rank)
    with pytest.raises(
        RuntimeError, match=r"fully_shard has replaced it since. Call fully_shard\(model\) first"
    ):
        optimizer.step()


def a_sharded_model_can_be_moved(rank: int) -> None:
    """As trainers move a model to the host between phases: torch then swaps its tensors."""
    model = Layers()
    fully_shard(model)
    hs.register_names(model)
    optimizer = hs.AdamW(model.parameters())
    for dtype in (torch.float32, torch.bfloat16):
        model.backward(rank)
        optimizer.step(zero_grad=True)
        model.cpu()
        model.to(dtype).to(torch.bfloat16)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def state_follows_parameters_that_are_replaced_by_shards(rank: int) -> None:
    model = Layers()
    optimizer = hs.AdamW(model.named_parameters())
    model.backward(rank)
    optimizer.step(zero_grad=True)
    fully_shard(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    model.backward(rank)
    with pytest.raises(
        TypeError, match=r"would be a DTensor .*\. Load it by load_state_dict, once the model"
    ):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_tools_treat_a_shard_as_it_is_in_the_whole(tmp_path: pathlib.Path):
    in_processes(
        2,
        float32_weights_are_those_of_one_process,
        weights_in_codes_are_those_of_one_process,
        averages_are_those_of_one_process,
        schedule_free_averages_are_those_of_one_process,
        reports_tell_this_process_from_all,
        float32_state_is_that_of_one_process,
        a_monitor_measures_the_whole_model,
        released_gradients_step_as_after_backward,
        parameters_that_fully_shard_replaced_are_missed_by_name,
        a_sharded_model_can_be_moved,
        state_follows_parameters_that_are_replaced_by_shards,
        functools.partial(
            a_state_file_goes_from_any_mesh_to_any_other, folder=str(tmp_path), recipes=("units",)
        ),
    )


@pytest.mark.slow
def test_tools_that_read_everything_treat_a_shard_as_it_is_in_the_whole(tmp_path: pathlib.Path):
    in_processes(
        2,
        diagnoses_are_those_of_one_process,
        functools.partial(a_state_file_goes_from_any_mesh_to_any_other, folder=str(tmp_path)),
    )
