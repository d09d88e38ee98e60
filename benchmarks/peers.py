"""The optimizers that are compared, ours and those of other libraries.

Each holds a bfloat16 weight and takes bfloat16 gradients; betas are 0.9 and 0.999. Libraries are imported
where they are first used, so that the list can be read without any of them.
"""

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from runs import BETAS, JaxRun, TorchRun

import halfstep_jax
import halfstep_torch

_BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Entry:
    """An optimizer that is compared.

    Attributes:
        name: for tables.
        distribution: whose version is named beside it.
        make: torch: (parameters, lr, eps, weight_decay) -> optimizer. JAX: (lr, eps, weight_decay) -> two
            functions, params -> state and (params, state, gradients) -> (params, state).
        framework: "torch" or "JAX".
        rule: "AdamW" or "Muon": whose float32 run is the reference.
        weight: run -> the weight in float32, with what is kept beside it.
        second: run -> the second moment in float32; None where there is none.
        cast: a float32 array to bfloat16, as the weight is rounded.
        compiles: whether its step is compiled as it comes; else it is compiled from outside, for comparison.
        needs: what a CPU cannot give it.
        arguments: of `make`, for a step that is compiled and for one that is not.
        timed: whether its step is timed; not where another's time is its own.
    """

    name: str
    distribution: str
    make: Callable[..., Any]
    framework: str = "torch"
    rule: str = "AdamW"
    weight: Callable[[Any], Any] = lambda run: run.stored
    second: Callable[[Any], Any] | None = lambda run: run.state["exp_avg_sq"]
    cast: Callable[[np.ndarray], Any] = lambda x: torch.tensor(x).to(_BF16)
    compiles: bool = False
    needs: str = ""
    arguments: tuple[dict, dict] = ({}, {})
    timed: bool = True

    @property
    def ours(self) -> bool:
        """Whether it is halfstep's."""
        return self.distribution == "halfstep"

    def start(
        self, weight: np.ndarray, lr: float = 1e-3, eps: float = 1e-8, weight_decay: float = 0.0, **how
    ):
        """Begin a run with a weight; `how` goes to the run."""
        run = TorchRun if self.framework == "torch" else JaxRun
        return run(self, weight, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, **how)

    def version(self) -> str:
        """Return the version of its distribution, of ours that of this checkout."""
        if self.ours:
            return importlib.import_module("halfstep").__version__
        return importlib.metadata.version(self.distribution)


def _made(module: str, name: str, **options) -> Callable[..., Any]:
    """Return a maker of an optimizer that takes torch's names, of a module that may be missing."""

    def make(params, *, lr, eps, weight_decay, **forced):
        optimizer = getattr(importlib.import_module(module), name)
        numbers = {"lr": lr, "betas": BETAS, "eps": eps, "weight_decay": weight_decay}
        return optimizer(params, **numbers, **options, **forced)

    return make


def _muon(params, *, lr, eps, weight_decay):
    del eps  # Of its iteration, not of a division.
    return torch.optim.Muon(params, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


def _torch_ours(**options) -> Entry:
    def make(params, *, lr, eps, weight_decay, **forced):
        numbers = {"lr": lr, "betas": BETAS, "eps": eps, "weight_decay": weight_decay}
        return halfstep_torch.AdamW(
            [(f"w{i}", p) for i, p in enumerate(params)], **numbers, **options, **{"compile": True, **forced}
        )

    return Entry(
        "",
        "halfstep",
        make,
        weight=lambda run: halfstep_torch.float32_params(run.optimizer)["w0"],
        second=lambda run: halfstep_torch.float32_state_dict(run.optimizer)["state"][0]["exp_avg_sq"],
        cast=lambda x: halfstep_torch.round_to(
            torch.tensor(x), "bfloat16", halfstep_torch.random_words(0, 1, "w0", 0, x.shape)
        ),
        arguments=({"compile": True}, {"compile": False}),
        compiles=True,
    )


def optax_pair(tx) -> tuple[Callable, Callable]:
    """Return `init` and the update of a transform, as `Entry.make` does."""

    def update(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, update


def _jax_ours(*, lr, eps, weight_decay):
    return optax_pair(halfstep_jax.adamw(lr, *BETAS, eps=eps, weight_decay=weight_decay))


def _optax_adamw(*, lr, eps, weight_decay):
    return optax_pair(optax.adamw(lr, *BETAS, eps=eps, weight_decay=weight_decay))


def _optax_injected(*, lr, eps, weight_decay):
    """As loops build it that write the learning rate: its numbers take the dtype of the weights."""
    make = optax.inject_hyperparams(optax.adamw)
    return optax_pair(make(lr, *BETAS, eps=eps, weight_decay=weight_decay))


def _rollfast(*, lr, eps, weight_decay):
    module = importlib.import_module("rollfast")
    tx = module.adamw(lr, *BETAS, eps=eps, weight_decay=weight_decay, mu_dtype=jnp.bfloat16)

    def init(params):
        return tx.init(params), jnp.zeros((), jnp.int32)

    def update(params, state, gradients):
        inner, count = state
        updates, inner = tx.update(gradients, inner, params)
        key = jax.random.fold_in(jax.random.key(0), count)
        return module.apply_updates(params, updates, key), (inner, count + 1)

    return init, update


def _flashoptim_jax(*, lr, eps, weight_decay):
    # Its fused kernels are Triton's.
    make = importlib.import_module("flashoptim_jax").flash_adamw
    tx = make(lr, *BETAS, eps=eps, weight_decay=weight_decay, fused=False)
    return tx.init, tx.step


def _nu(run: JaxRun) -> Any:
    return optax.tree_utils.tree_get(run.held, "nu")["w0"]


def _dequantized(run: TorchRun) -> torch.Tensor:
    value = run.state["exp_avg_sq"]
    return value.dequantize() if hasattr(value, "dequantize") and type(value) is not torch.Tensor else value


def _bitsandbytes_second(run: TorchRun) -> torch.Tensor:
    state, functional = run.state, importlib.import_module("bitsandbytes.functional")
    return functional.dequantize_blockwise(
        state["state2"], absmax=state["absmax2"], code=state["qmap2"], blocksize=256
    ).reshape(run.param.shape)


def _heavyball(run: TorchRun, name: str, stored: torch.Tensor) -> torch.Tensor:
    """Return a tensor of HeavyBall's with the bits that it keeps beside it."""
    state = run.state[0] if 0 in run.state else run.state
    ulps = getattr(stored, "_ecc", None)
    if ulps is None and f"{name}::ecc" in state:
        ulps = importlib.import_module("heavyball.utils")._ULPState(state[f"{name}::ecc"], 127.0)
    return (stored if ulps is None else ulps.decode(stored)).reshape(run.param.shape)


def _heavyball_second(run: TorchRun) -> torch.Tensor:
    name = "update_by_adam_exp_avg_sq_0"
    return _heavyball(run, name, run.state[0][name]) * run.debiased


def _function(module: str, name: str) -> Callable[[np.ndarray], Any]:
    """Return the function of a library that rounds float32 to bfloat16, (target, source) or (source)."""

    def cast(x):
        function, source = getattr(importlib.import_module(module), name), torch.tensor(x)
        target = torch.zeros_like(source, dtype=_BF16)
        if name.startswith("copy"):
            function(target, source)
            return target
        return function(source)

    return cast


def _rollfast_cast(x: np.ndarray) -> jax.Array:
    return importlib.import_module("rollfast.utils")._stochastic_round_bf16(jnp.asarray(x), jax.random.key(0))


def entries() -> list[Entry]:
    """Return everything that is compared, ours first."""
    recipes = {name: options for name, options in vars(halfstep_torch.recipes).items() if _is_recipe(options)}
    recipes["default"] = {}
    del recipes["sixteen_bit"]  # the default with two more bits of nu
    ours = [
        dataclasses.replace(_torch_ours(**options), name=f"halfstep_torch, {name}")
        for name, options in sorted(recipes.items())
    ]
    in_jax = Entry(
        "halfstep_jax, default",
        "halfstep",
        _jax_ours,
        "JAX",
        second=_nu,
        cast=lambda x: halfstep_jax.round_to(
            x, "bfloat16", halfstep_jax.random_words(0, 1, "w0", 0, x.shape)
        ),
        compiles=True,
    )
    return [*ours, *_fed_back(), in_jax, *_torch_peers(), *_jax_peers()]


def _fed_back() -> list[Entry]:
    """Return ours whose weights have their rounding errors fed back; benchmarks/cost.md has their times."""
    options: dict[str, dict[str, Any]] = {"feedback": {}, "eight_bit, feedback": {"recipe": "eight_bit"}}
    return [
        dataclasses.replace(
            _torch_ours(param_storage="feedback", **recipe), name=f"halfstep_torch, {name}", timed=False
        )
        for name, recipe in options.items()
    ]


def _is_recipe(value: Any) -> bool:
    return isinstance(value, Mapping) and "nu_dtype" in value


def _torchao_peers() -> list[Entry]:
    return [
        Entry(
            f"torchao {name}, stochastic",
            "torchao",
            _made(module, name, bf16_stochastic_round=True),
            second=_dequantized,
            cast=_function("torchao.optim.quant_utils", "_fp32_to_bf16_sr"),
            compiles=True,
        )
        for module, name in (
            ("torchao.optim.adam", "_AdamW"),
            ("torchao.optim", "AdamW8bit"),
            ("torchao.optim", "AdamW4bit"),
            ("torchao.optim", "AdamWFp8"),
        )
    ]


def _heavyball_peers() -> list[Entry]:
    return [
        Entry(
            f"HeavyBall AdamW, {name}",
            "heavyball",
            _made("heavyball", "AdamW", **options),
            weight=lambda run: _heavyball(run, "param", run.stored),
            second=_heavyball_second,
            cast=_function("heavyball.utils", "stochastic_round_") if "ecc" not in options else Entry.cast,
            compiles=True,
        )
        for name, options in {
            "bfloat16 state": {"storage_dtype": "bfloat16"},
            "ecc bf16+8": {"ecc": "bf16+8", "param_ecc": "bf16+8"},
        }.items()
    ]


def _torch_peers() -> list[Entry]:
    return [
        Entry("torch AdamW(fused)", "torch", _made("torch.optim", "AdamW", fused=True)),
        Entry("torch Muon", "torch", _muon, rule="Muon", second=None),
        *_torchao_peers(),
        Entry(
            "bitsandbytes AdamW8bit",
            "bitsandbytes",
            _made("bitsandbytes.optim", "AdamW8bit"),
            second=_bitsandbytes_second,
        ),
        Entry(
            "optimi AdamW (Kahan)",
            "torch-optimi",
            _made("optimi", "AdamW"),
            weight=lambda run: (
                run.stored.float() + run.state["kahan_comp"].float() if run.steps else run.stored
            ),
            second=lambda run: run.state["exp_avg_sq"].double() * run.debiased,
        ),
        *_heavyball_peers(),
        Entry(
            "torchastic AdamW",
            "torchastic",
            _made("torchastic", "AdamW"),
            second=lambda run: run.state["ema_squared"],
            cast=_function("torchastic.stochastic_optim", "copy_stochastic_"),
        ),
        Entry(
            "adamw-bf16 AdamWBF16",
            "adamw_bf16",
            _made("adamw_bf16", "AdamWBF16"),
            weight=lambda run: run.stored.float() + run.state["shift"].float() if run.steps else run.stored,
            cast=_function("adamw_bf16.stochastic", "copy_stochastic_"),
        ),
        Entry(
            "FlashOptim FlashAdamW",
            "flashoptim",
            _made("flashoptim", "FlashAdamW"),
            needs="its steps are kernels for a GPU",
        ),
    ]


def _jax_peers() -> list[Entry]:
    flash = importlib.import_module
    return [
        Entry("optax.adamw", "optax", _optax_adamw, "JAX", second=_nu, compiles=True),
        Entry(
            "optax.inject_hyperparams(adamw)",
            "optax",
            _optax_injected,
            "JAX",
            second=_nu,
            compiles=True,
            timed=False,
        ),
        Entry(
            "rollfast adamw, bfloat16 state",
            "rollfast",
            _rollfast,
            "JAX",
            second=_nu,
            cast=_rollfast_cast,
            compiles=True,
        ),
        Entry(
            "flashoptim-jax flash_adamw",
            "flashoptim-jax",
            _flashoptim_jax,
            "JAX",
            compiles=True,
            weight=lambda run: flash("flashoptim_jax").reconstruct_leaf(run.stored, run.held.ecc["w0"]),
            second=lambda run: flash("flashoptim_jax").dequantize_variance(run.held.nu["w0"]),
        ),
    ]
