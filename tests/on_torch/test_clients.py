"""Other libraries' training loops, unmodified, over our optimizers: `make clients`."""

import dataclasses
import importlib
import pathlib

import pytest
import torch

import halfstep_torch as hs
from on_torch.clients import module_of, needs, weights
from on_torch.steps import by_muon


class Trainers:
    """Runs of transformers.Trainer over a tiny model, in bfloat16."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def run(self, way: str, steps: int, resume: str | None = None) -> torch.nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
        config = LlamaConfig(**sizes, num_attention_heads=2)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        options = {"lr": 1e-2, "weight_decay": 0.1, "param_storage": "split16"}
        optimizers, by_class = (None, None), None
        if way == "optimizers":
            optimizers = (hs.AdamW(model.named_parameters(), **options), None)
        else:
            by_class = (hs.AdamW, options)
        arguments = TrainingArguments(
            str(self.folder / way),
            max_steps=4,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            save_steps=2,
            logging_steps=1,
            disable_tqdm=True,
            seed=3,
        )
        tokens = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
        trainer = Trainer(
            model, arguments, train_dataset=tokens, optimizers=optimizers, optimizer_cls_and_kwargs=by_class
        )
        trainer.train(resume_from_checkpoint=resume)
        state = trainer.optimizer.state[model.lm_head.weight]
        assert int(state["step"]) == steps
        assert state["extra_bits"].dtype == torch.int16
        return trainer.model


@needs("transformers")
@pytest.mark.parametrize("way", ["optimizers", "optimizer_cls_and_kwargs"])
def test_trainer_trains_and_resumes_to_the_bit(way, tmp_path):
    runs = Trainers(tmp_path)
    whole = runs.run(way, 4)
    resumed = runs.run(way, 4, resume=str(tmp_path / way / "checkpoint-2"))
    assert torch.equal(weights(whole), weights(resumed))


@needs("accelerate")
def test_accelerate_saves_and_loads_to_the_bit(tmp_path):
    from accelerate import Accelerator

    def start():
        torch.manual_seed(0)
        model = torch.nn.Linear(16, 4).to(torch.bfloat16)
        optimizer = hs.AdamW(model.named_parameters(), lr=1e-2, **hs.recipes.one_pass)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler)

    def step(accelerator, model, optimizer, scheduler, seed):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    run = start()
    step(*run, 1)
    run[0].save_state(str(tmp_path))
    step(*run, 2)
    other = start()
    other[0].load_state(str(tmp_path))
    step(*other, 2)
    assert torch.equal(weights(run[1]), weights(other[1]))
    assert run[2].param_groups[0]["lr"] == other[2].param_groups[0]["lr"] == 1e-2 / 4


@needs("lightning")
def test_lightning_resumes_to_the_bit(tmp_path):
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(16, 4)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            optimizer = hs.AdamW(self.named_parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}

    def fit(epochs: int, path: str | None = None):
        net = Net()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            precision="bf16-true",
            accelerator="cpu",
            enable_checkpointing=False,
            default_root_dir=tmp_path,
            **quiet,
        )
        trainer.fit(net, torch.utils.data.DataLoader(x, batch_size=8), ckpt_path=path)
        return net, trainer

    whole, _ = fit(2)
    _, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(2, str(tmp_path / "half.ckpt"))
    assert whole.layer.weight.dtype == torch.bfloat16
    assert torch.equal(weights(whole), weights(resumed))


@needs("lightning")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_lightning_clips_gradients_of_mixed_precision(precision, tmp_path):
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 4)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean() * 1e3

        def configure_optimizers(self):
            return hs.SGD(self.named_parameters(), lr=1.0)

    net = Net()
    before = weights(net).detach().clone()
    trainer = lightning.Trainer(
        max_steps=1,
        precision=precision,
        accelerator="cpu",
        gradient_clip_val=0.125,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, torch.utils.data.DataLoader(torch.ones(8, 16), batch_size=8))
    # Up to what 16-bit gradients and the clipping's 1e-6 beside the norm leave.
    assert abs(torch.linalg.vector_norm(weights(net) - before).item() / 0.125 - 1) < 2**-7


@pytest.mark.clients
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("torchao", "AdamW8bit"),
        ("torchao", "AdamW4bit"),
        ("torchao", "AdamWFp8"),
        ("bitsandbytes", "AdamW8bit"),
        ("bitsandbytes", "Lion8bit"),
    ],
)
@pytest.mark.parametrize("recipe", ["full_precision", "eight_bit"])
def test_codes_of_another_library_move_in_as_their_values(library, name, recipe):
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 128).to(torch.bfloat16)
    theirs = getattr(pytest.importorskip(f"{library}.optim"), name)(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(torch.randn(4, 256).to(torch.bfloat16)).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    make = hs.Lion if name.startswith("Lion") else hs.AdamW
    keys = ["exp_avg"] if make is hs.Lion else ["exp_avg", "exp_avg_sq"]

    def value(state, place, key):
        if library == "torchao":
            return state[key].dequantize() if hasattr(state[key], "codes") else state[key].float()
        codes = state[f"state{place}"]
        if codes.is_floating_point():
            return codes
        table, absmax = state[f"qmap{place}"], state[f"absmax{place}"]
        return (table[codes.long()].reshape(-1, 256) * absmax[:, None]).reshape(codes.shape)

    values = {
        i: {"step": 3} | {key: value(theirs.state[p], place, key) for place, key in enumerate(keys, 1)}
        for i, p in enumerate(model.parameters())
    }
    states = []
    for saved in (theirs.state_dict(), {"state": values, "param_groups": [{"params": [0, 1]}]}):
        ours = make(model.named_parameters(), recipe=recipe)
        hs.load_float32_state_dict(ours, saved)
        states.append(ours.state)
    for p in model.parameters():
        assert all(torch.equal(states[0][p][key], states[1][p][key]) for key in states[1][p])


@needs("transformers")
def test_the_factory_gives_trainer_names_its_decay_rule_and_muon(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}

    def trainer_of(**options):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).to(torch.bfloat16)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
        )
        tokens = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
        made = Trainer(
            model,
            arguments,
            train_dataset=tokens,
            optimizer_cls_and_kwargs=(hs.integrations.transformers, options),
        )
        made.train()
        return made

    def ours(optimizer):
        return getattr(optimizer, "optimizer", optimizer)

    trainer = trainer_of(lr=1e-3, weight_decay=0.1, recipe="one_pass")
    groups = ours(trainer.optimizer).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert "model.embed_tokens.weight" in groups[0]["param_names"]
    assert all("norm" in name for name in groups[1]["param_names"])
    stepped = by_muon(ours(trainer_of(optimizer="muon", lr=1e-3).optimizer))
    assert stepped["model.layers.0.self_attn.q_proj.weight"]
    assert not stepped["model.embed_tokens.weight"]


@needs("torchtitan")
def test_torchtitan_builds_ours_by_its_own_config():
    from torchtitan.components.optimizer import ParamGroupConfig

    from halfstep_torch.integrations.torchtitan import HalfstepOptimizers

    torch.manual_seed(0)
    model, told = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).bfloat16() for _ in "12")
    told.load_state_dict(model.state_dict())
    adamw = {"lr": 1e-2, "recipe": "one_pass"}
    config = HalfstepOptimizers.Config(
        param_groups=[
            ParamGroupConfig(pattern="bias$", optimizer_name="AdamW", optimizer_kwargs={**adamw, "lr": 2e-2}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw),
        ],
        implementation="for-loop",
        optimizer_factory_kwargs_by_name={"AdamW": {"seed": 5}},
    )
    container = config.build(model_parts=[model])
    [optimizer] = container.optimizers
    assert type(optimizer) is hs.AdamW
    assert optimizer.param_groups[1]["param_names"] == ["0.weight", "1.weight"]
    alone = hs.AdamW(
        [{"params": [pair], "lr": 2e-2 if "bias" in pair[0] else 1e-2} for pair in told.named_parameters()],
        recipe="one_pass",
        seed=5,
    )
    for net, step in ((model, container.step), (told, alone.step)):
        for _ in range(2):
            net(torch.ones(2, 8).bfloat16()).float().square().sum().backward()
            step()
            net.zero_grad()
    assert torch.equal(weights(model), weights(told))
    saved = container.state_dict()
    container.load_state_dict(saved)


def lines_of(trainer: str) -> list[str]:
    """Return the first literal lines in a trainer's section."""
    text = (pathlib.Path(__file__).parents[2] / "docs/how-to/trainers.md").read_text()
    return text.split(f"\n## {trainer}\n")[1].split("```\n")[1].splitlines()


@needs("verl")
def test_verl_builds_ours_by_the_lines_of_its_page(monkeypatch):
    """By verl's own config and function, in one process."""
    hydra = pytest.importorskip("hydra")
    verl = module_of(monkeypatch, "verl.workers.config.optimizer")
    configs = pathlib.Path(verl.__file__).parents[2] / "trainer/config"
    with hydra.initialize_config_dir(str(configs), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=lines_of("verl"))["actor_rollout_ref"]["actor"]
    assert config["fsdp_config"]["model_dtype"] == "bf16"
    # As its omega_conf_to_dataclass does; the name of the class is that of the package.
    optim = hydra.utils.instantiate({**config["optim"], "_target_": f"{verl.__name__}.FSDPOptimizerConfig"})
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = verl.build_optimizer(model.parameters(), optim)
    assert type(optimizer) is hs.AdamW
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    model(torch.ones(2, 64, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["extra_bits"].dtype == torch.uint8


@needs("lerobot")
def test_lerobot_parses_builds_saves_and_loads_ours(monkeypatch, tmp_path):
    """By its own config, and by its own functions for state; the rest of it asks for cameras and videos."""
    draccus = pytest.importorskip("draccus")
    besides = "datasets", "datasets.table", "pandas", "pyarrow", "pyarrow.dataset", "pyarrow.parquet"
    own = "lerobot.utils.utils", "lerobot.datasets.backward_compatibility"
    module_of(monkeypatch, "lerobot.datasets.utils", *besides, *own, "PIL", "torchvision", "imageio")
    lerobot = module_of(monkeypatch, "lerobot.optim.optimizers")
    importlib.import_module("halfstep_torch.integrations.lerobot")

    @dataclasses.dataclass
    class Train:
        optimizer: lerobot.OptimizerConfig

    def step(model, optimizer):
        model(torch.ones(2, 8).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    lines = ["--optimizer.type=halfstep", "--optimizer.recipe=eight_bit", "--optimizer.lr=0.01"]
    config = draccus.parse(Train, args=lines).optimizer
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).bfloat16()
    optimizer = config.build(dict(model.named_parameters()))
    assert type(optimizer) is hs.AdamW
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    step(model, optimizer)
    lerobot.save_optimizer_state(optimizer, tmp_path)
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    step(model, optimizer)
    expected = weights(model).clone()
    model.load_state_dict(saved)
    loaded = lerobot.load_optimizer_state(config.build(model.parameters()), tmp_path)
    step(model, loaded)
    assert torch.equal(weights(model), expected)
