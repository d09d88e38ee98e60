"""Other libraries' loops over our optimizers, and their own checkpoints: a resumed run has the same bits.

`make clients` runs these. Models are tiny, and made from scratch.
"""

import copy
import functools
import importlib
import pathlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import halfstep_torch as hs
from on_torch.clients import module_of, needs, weights

TRAINER_OPTIONS = {
    "max_steps": 3,
    "save_steps": 2,
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}
TOKENS = [{"input_ids": [(i + j) % 30 for j in range(8)]} for i in range(16)]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Let nothing be downloaded."""
    for library in ("HF_HUB", "HF_DATASETS", "TRANSFORMERS"):
        monkeypatch.setenv(f"{library}_OFFLINE", "1")


def tokenizer(folder: pathlib.Path) -> str:
    """Write a tokenizer of 32 words; return where it is."""
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(30)} | {"<pad>": 30, "<eos>": 31}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    of_pieces = {"pad_token": "<pad>", "unk_token": "<pad>", "eos_token": "<eos>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **of_pieces).save_pretrained(folder)
    return str(folder)


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).bfloat16()


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def assert_resumes(folder: pathlib.Path, make) -> None:
    """Train by a trainer of transformers' kind, which writes a checkpoint after 2 of 3 steps; resume it."""
    whole, resumed = make(folder), make(folder)
    whole.train()
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert {int(state["step"]) for state in resumed.optimizer.state.values()} == {3}
    assert torch.equal(weights(whole.model), weights(resumed.model))


@needs("trl")
@pytest.mark.parametrize("optimizer", [hs.AdamW, hs.integrations.transformers], ids=["class", "factory"])
def test_trl_resumes_adapters_to_the_bit(optimizer, tmp_path):
    """Adapters have no biases and norms: the trainer's group of what does not decay is empty."""
    import datasets
    import transformers
    import trl

    where = tokenizer(tmp_path / "tokenizer")

    def make(folder):
        return trl.SFTTrainer(
            llama(),
            trl.SFTConfig(str(folder), bf16=False, **TRAINER_OPTIONS),
            train_dataset=datasets.Dataset.from_list(TOKENS),
            processing_class=transformers.AutoTokenizer.from_pretrained(where),
            peft_config=lora(),
            optimizer_cls_and_kwargs=(optimizer, {"lr": 1e-2, "param_storage": "split16"}),
        )

    assert_resumes(tmp_path / "run", make)


@needs("peft")
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("optimizer", [hs.AdamW, hs.integrations.transformers], ids=["class", "factory"])
def test_trainer_resumes_adapters_to_the_bit(optimizer, quantized, tmp_path):
    """Over a model of 4 bits, too, whose frozen weights are codes of bitsandbytes."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

    llama().save_pretrained(tmp_path / "model")
    tokens = [{**row, "labels": row["input_ids"]} for row in TOKENS]

    def make(folder):
        model = llama()
        if quantized:
            pytest.importorskip("bitsandbytes")
            config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
            where = {"quantization_config": config, "device_map": {"": "cpu"}}
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **where)
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            assert any(p.dtype == torch.uint8 for p in model.parameters())
        torch.manual_seed(0)
        return Trainer(
            peft.get_peft_model(model, lora()),
            TrainingArguments(str(folder), **TRAINER_OPTIONS),
            train_dataset=tokens,
            optimizer_cls_and_kwargs=(optimizer, {"lr": 1e-2}),
        )

    assert_resumes(tmp_path / "run", make)


@needs("sentence_transformers")
def test_sentence_transformers_resumes_to_the_bit(tmp_path):
    import datasets
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import losses, modules
    from transformers import BertConfig, BertModel

    where = tokenizer(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    BertModel(BertConfig(**sizes, num_attention_heads=2)).bfloat16().save_pretrained(where)
    pairs = {
        key: [f"w{i} w{i + ahead}" for i in range(12)] for ahead, key in ((1, "anchor"), (2, "positive"))
    }

    def make(folder):
        parts = [modules.Transformer(where, max_seq_length=8), modules.Pooling(16)]
        model = st.SentenceTransformer(modules=parts, device="cpu")
        return st.SentenceTransformerTrainer(
            model,
            st.SentenceTransformerTrainingArguments(str(folder), **TRAINER_OPTIONS),
            train_dataset=datasets.Dataset.from_dict(pairs),
            loss=losses.MultipleNegativesRankingLoss(model),
            optimizer_cls_and_kwargs=(hs.AdamW, {"lr": 1e-2, "recipe": "eight_bit"}),
        )

    assert_resumes(tmp_path / "run", make)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).bfloat16()


def backward(model, seed: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    model(x.bfloat16()).float().square().mean().backward()


@needs("timm")
def test_lookahead_of_timm_resumes_to_the_bit(monkeypatch):
    lookahead = module_of(monkeypatch, "timm.optim.lookahead")

    def make():
        model = net()
        return model, lookahead.Lookahead(hs.AdamW(model.named_parameters(), lr=1e-2), k=2)

    def step(model, optimizer, seeds):
        for seed in seeds:
            backward(model, seed)
            optimizer.step()
            optimizer.zero_grad()

    whole, resumed = make(), make()
    step(*whole, range(3))
    for here, there in zip(resumed, whole, strict=True):
        here.load_state_dict(copy.deepcopy(there.state_dict()))
    for run in (whole, resumed):
        step(*run, (3, 4))
    assert torch.equal(weights(whole[0]), weights(resumed[0]))


@needs("stable_baselines3")
def test_a_policy_of_stable_baselines_goes_on_from_its_file_to_the_bit(tmp_path):
    import gymnasium
    from stable_baselines3 import PPO

    class Corridor(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.place = 0
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self.place += 1
            return np.full(3, 0.1 * self.place, np.float32), float(action), self.place >= 8, False, {}

    options = {"net_arch": [8], "optimizer_class": hs.AdamW, "optimizer_kwargs": {"recipe": "eight_bit"}}
    whole = PPO(
        "MlpPolicy",
        Corridor(),
        n_steps=8,
        batch_size=8,
        n_epochs=1,
        policy_kwargs=options,
        seed=1,
        device="cpu",
    )
    whole.learn(24)
    whole.save(tmp_path / "run")
    resumed = PPO.load(tmp_path / "run", device="cpu")
    assert resumed.policy.optimizer.param_groups[0]["param_names"][0].startswith("mlp_extractor")
    for policy in (whole.policy, resumed.policy):
        for p in policy.parameters():
            p.grad = torch.ones_like(p)
        policy.optimizer.step()
    assert torch.equal(weights(whole.policy), weights(resumed.policy))


@needs("skorch")
def test_skorch_resumes_to_the_bit(tmp_path):
    import skorch

    def make():
        of_halfstep = {"optimizer": hs.AdamW, "optimizer__recipe": "eight_bit", "lr": 1e-2}
        torch.manual_seed(0)
        return skorch.NeuralNetRegressor(
            torch.nn.Linear,
            module__in_features=4,
            module__out_features=1,
            max_epochs=1,
            batch_size=4,
            train_split=None,
            verbose=0,
            **of_halfstep,
        ).initialize()

    x = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    files = {"f_params": tmp_path / "weights", "f_optimizer": tmp_path / "state"}
    whole, resumed = make(), make()
    whole.partial_fit(x, x[:, :1])
    whole.save_params(**files)
    resumed.load_params(**files)
    for run in (whole, resumed):
        run.partial_fit(x, x[:, :1])
        assert {int(state["step"]) for state in run.optimizer_.state.values()} == {6}
    assert torch.equal(weights(whole.module_), weights(resumed.module_))


@needs("fastai")
def test_fastai_resumes_to_the_bit(tmp_path):
    importlib.import_module("fastai.callback.progress")  # which adds no_bar
    from fastai.basics import DataLoaders, Learner
    from fastai.optimizer import OptimWrapper

    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = [(row, i % 2) for i, row in enumerate(x)]

    def make():
        return Learner(
            DataLoaders.from_dsets(rows, rows[:4], bs=4, shuffle=False, num_workers=0, device="cpu"),
            net(),
            loss_func=lambda logits, y: torch.nn.functional.cross_entropy(logits.float(), y),
            opt_func=functools.partial(OptimWrapper, opt=hs.AdamW, recipe="eight_bit"),
            path=tmp_path,
        )

    def fit(run):
        with run.no_bar(), run.no_logging():
            run.fit(1, 1e-2)

    whole, resumed = make(), make()
    fit(whole)
    whole.save("half")
    resumed.load("half", with_opt=True)
    for run in (whole, resumed):
        fit(run)
        assert {int(state["step"]) for state in run.opt.opt.state.values()} == {6}
    assert torch.equal(weights(whole.model), weights(resumed.model))


@needs("ignite")
def test_ignite_resumes_to_the_bit(tmp_path):
    from ignite.engine import Engine, Events
    from ignite.handlers import Checkpoint, DiskSaver

    def make():
        model = net()
        optimizer = hs.AdamW(model.named_parameters(), lr=1e-2, recipe="eight_bit")

        def step(engine, seed):
            backward(model, seed)
            optimizer.step(zero_grad=True)

        return {"engine": Engine(step), "model": model, "optimizer": optimizer}

    whole, resumed = make(), make()
    keep = Checkpoint(whole, DiskSaver(str(tmp_path)), n_saved=None)
    whole["engine"].add_event_handler(Events.EPOCH_COMPLETED, keep)
    whole["engine"].run([1, 2, 3], max_epochs=2)
    Checkpoint.load_objects(resumed, torch.load(tmp_path / "checkpoint_3.pt"))
    resumed["engine"].run([1, 2, 3], max_epochs=2)
    assert {int(state["step"]) for state in resumed["optimizer"].state.values()} == {6}
    assert torch.equal(weights(whole["model"]), weights(resumed["model"]))


@needs("torchtune")
def test_steps_in_backward_of_torchtune_resume_to_the_bit(monkeypatch):
    """By its own config, and an optimizer for each parameter; the rest of it asks for an older torchao."""
    omegaconf = pytest.importorskip("omegaconf")
    of_config = module_of(
        monkeypatch, "torchtune.config._instantiate", "torchtune.utils", "torchtune.utils._logging"
    )
    memory = module_of(monkeypatch, "torchtune.training.memory")
    options = {"_component_": "halfstep_torch.AdamW", "lr": 1e-2, "recipe": "eight_bit"}

    def make():
        model = net()
        config = omegaconf.OmegaConf.create(options)
        optimizers = {p: of_config.instantiate(config, [p]) for p in model.parameters()}
        memory.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)
        return model, memory.create_optim_in_bwd_wrapper(model=model, optim_dict=optimizers)

    whole, resumed = make(), make()
    for seed in range(3):
        backward(whole[0], seed)
    for here, there in zip(resumed, whole, strict=True):
        here.load_state_dict(copy.deepcopy(there.state_dict()))
    for model, _ in (whole, resumed):
        backward(model, 3)
    assert torch.equal(weights(whole[0]), weights(resumed[0]))


@needs("verl")
def test_a_model_that_verl_offloads_between_steps_has_the_bits_of_one_that_stays(monkeypatch, tmp_path):
    """By its own functions: an RL trainer moves model and state out of memory in every iteration."""
    besides = "verl.utils.device", "verl.utils.model", "peft.utils.save_and_load"
    verl = module_of(monkeypatch, "verl.utils.fsdp_utils", *besides)
    monkeypatch.setattr(verl, "get_device_id", lambda: "cpu")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh, found = init_device_mesh("cpu", (1,)), []
        for offloads in (False, True):
            model = net()
            for part in (*model, model):
                fully_shard(part, mesh=mesh)
            optimizer = hs.AdamW(model.parameters(), lr=1e-2, recipe="eight_bit", compile=False)
            for seed in range(3):
                backward(model, seed)
                optimizer.step(zero_grad=True)
                if offloads:
                    verl.offload_fsdp2_model_to_cpu(model, empty_cache=False)
                    verl.offload_fsdp_optimizer(optimizer)
                    verl.load_fsdp2_model_to_gpu(model)
                    verl.load_fsdp_optimizer(optimizer, "cpu")
            found.append(torch.cat([p.to_local().detach().reshape(-1) for p in model.parameters()]))
        assert torch.equal(*found)
    finally:
        dist.destroy_process_group()
