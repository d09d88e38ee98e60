"""Other libraries' ways to train on two processes, unmodified, over our optimizers: `make clients`."""

import functools
import importlib.util
import os
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import halfstep_torch as hs
from on_torch.clients import needs
from on_torch.processes import in_fresh_processes

STEPS, GOES_ON = 2, 2


def as_launched(rank: int) -> None:
    """Tell this process what torchrun would."""
    world = str(dist.get_world_size())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "TORCHELASTIC_RUN_ID": "here"}
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ.update(address, **ranks, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, ACCELERATE_USE_CPU="true")


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = ((96, 128), (128, 100), (100, 64))
    return torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes)).to(torch.bfloat16)


def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Every process has the same samples, so that gradients are those of one."""
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    return model(x).float().square().mean()


def alone(steps: int, **options) -> list[torch.Tensor]:
    """Return the weights after some steps in one process."""
    model = layers()
    optimizer = adamw(model, **options)
    for step in range(steps):
        loss(model, step).backward()
        optimizer.step(zero_grad=True)
    return whole(model)


def adamw(model: torch.nn.Module, **options) -> hs.AdamW:
    return hs.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1, compile=False, **options)


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    params = (p.detach() for p in model.parameters())
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in params]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def accelerate_shards_what_it_is_given(rank: int, folder: str) -> None:
    """Model and optimizer are made before `prepare`, which swaps the parameters in.

    accelerate takes DDP on CPUs: that it is FSDP is set by hand, and all else is as it comes.
    """
    as_launched(rank)
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    options = {"auto_wrap_policy": "no_wrap", "cpu_ram_efficient_loading": False}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    fsdp = {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    vars(accelerator.state).update(fsdp)
    model = layers()
    model, optimizer = accelerator.prepare(model, adamw(model, recipe="eight_bit"))
    vars(accelerator.state).update(fsdp)  # `prepare` looks at the devices again
    for step in range(STEPS + GOES_ON):
        if step == STEPS:
            accelerator.save_state(f"{folder}/accelerate")
            loss(model, 99).backward()
            optimizer.step()
            accelerator.load_state(f"{folder}/accelerate")
            optimizer.zero_grad()
        accelerator.backward(loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_same(whole(model), alone(STEPS + GOES_ON, recipe="eight_bit"))


def trainer_trains_two_processes(rank: int, folder: str) -> None:
    """Under accelerate, which takes DDP on CPUs; resumed from a checkpoint, the same bits go on."""
    as_launched(rank)
    from on_torch.test_clients import Trainers, weights

    runs = Trainers(pathlib.Path(folder))
    model = runs.run("optimizers", 4)
    dist.barrier()
    again = runs.run("optimizers", 4, resume=str(pathlib.Path(folder, "optimizers", "checkpoint-2")))
    assert torch.equal(weights(model), weights(again))
    others = [torch.empty_like(weights(model)) for _ in range(dist.get_world_size())]
    dist.all_gather(others, weights(model))
    assert all(torch.equal(x, others[0]) for x in others)


def torchtitan_helpers():
    """Return torchtitan's own functions for state; the rest of it asks for more libraries."""
    found = importlib.util.find_spec("torchtitan")
    assert found is not None
    assert found.submodule_search_locations
    path = pathlib.Path(found.submodule_search_locations[0], "components/optimizer/utils.py")
    spec = importlib.util.spec_from_file_location("titan_optimizer_utils", path)
    assert spec is not None
    assert spec.loader is not None
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    return helpers


def as_torchtitan_builds(model: torch.nn.Module) -> hs.AdamW:
    """Return an optimizer of groups with names and with entries that torch's own optimizers read."""
    named, shared = list(model.named_parameters()), {"lr": 1e-2, "fused": True, "foreach": False}
    groups = []
    for ending, decay in (("weight", 0.1), ("bias", 0.0)):
        chosen = [(name, p) for name, p in named if name.endswith(ending)]
        names, params = (list(column) for column in zip(*chosen, strict=True))
        groups.append({"params": params, "param_names": names, "weight_decay": decay, **shared})
    return hs.AdamW(groups, compile=False, recipe="eight_bit")


def torchtitan_saves_and_loads(rank: int, folder: str, loads: bool) -> None:
    helpers, model = torchtitan_helpers(), layers()
    fully_shard(model)
    optimizer, start = as_torchtitan_builds(model), 0
    if loads:
        helpers.init_optim_state(optimizer)
        saved = {**model.state_dict(), **helpers.get_flat_optim_state_dict(optimizer)}
        dcp.load(saved, checkpoint_id=f"{folder}/titan")
        model.load_state_dict({name: saved[name] for name in model.state_dict()})
        helpers.load_flat_optim_state_dict(optimizer, saved)
        start = STEPS
    for step in range(start, STEPS + (GOES_ON if loads else 0)):
        loss(model, step).backward()
        optimizer.step(zero_grad=True)
    if not loads:
        helpers.init_optim_state(optimizer)  # finds state, and does nothing
        saved = {**model.state_dict(), **helpers.get_flat_optim_state_dict(optimizer)}
        dcp.save(saved, checkpoint_id=f"{folder}/titan")
        return
    expected = layers()
    optimizer = as_torchtitan_builds(expected)
    for step in range(STEPS + GOES_ON):
        loss(expected, step).backward()
        optimizer.step(zero_grad=True)
    assert_same(whole(model), whole(expected))


def lightning_shards_in_configure_model(rank: int, folder: str) -> None:
    as_launched(rank)
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Net(lightning.LightningModule):
        def configure_model(self):
            if not hasattr(self, "layers"):
                self.layers = layers()
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, _):
            return loss(self.layers, self.current_epoch)

        def configure_optimizers(self):
            return adamw(self.layers, recipe="eight_bit")

    def fit(steps: int, path: str | None = None):
        net = Net()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            max_epochs=steps,
            use_distributed_sampler=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            **quiet,
        )
        # An epoch is a step.
        trainer.fit(net, torch.utils.data.DataLoader(torch.zeros(1)), ckpt_path=path)
        return net, trainer

    _, trainer = fit(STEPS)
    trainer.save_checkpoint(f"{folder}/lightning")
    net, _ = fit(STEPS + GOES_ON, f"{folder}/lightning")
    assert all(isinstance(p, DTensor) for p in net.parameters())
    assert_same(whole(net), alone(STEPS + GOES_ON, recipe="eight_bit"))


@needs("accelerate")
def test_accelerate_shards_a_model_and_its_optimizer(tmp_path):
    in_fresh_processes(2, functools.partial(accelerate_shards_what_it_is_given, folder=str(tmp_path)))


@needs("transformers")
def test_trainer_trains_and_resumes_to_the_bit_in_two_processes(tmp_path):
    in_fresh_processes(2, functools.partial(trainer_trains_two_processes, folder=str(tmp_path)))


@needs("torchtitan")
def test_torchtitan_saves_four_processes_and_goes_on_in_two(tmp_path):
    for count, loads in ((4, False), (2, True)):
        check = functools.partial(torchtitan_saves_and_loads, folder=str(tmp_path), loads=loads)
        in_fresh_processes(count, check)


@needs("lightning")
def test_lightning_shards_a_model(tmp_path):
    in_fresh_processes(2, functools.partial(lightning_shards_in_configure_model, folder=str(tmp_path)))
