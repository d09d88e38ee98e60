"""What the tests of state files share: a transform, weights, a run in torch, all that a run has."""

import jax.numpy as jnp
import torch

import halfstep_jax
import halfstep_torch


def transform(**options):
    return halfstep_jax.adamw(1e-2, **{"seed": 3, "nu_dtype": "ufloat16_e7m9"} | options)


def weights():
    return {"w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "b": jnp.ones(2)}


def torch_run(**options):
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    model.b = torch.nn.Parameter(torch.zeros(2))
    options = {"weight_decay": 1e-4, "nu_dtype": "ufloat16_e7m9", "compile": False} | options
    return model, halfstep_torch.AdamW(model.named_parameters(), 1e-2, **options)


def everything(model, optimizer):
    state = [x for one in optimizer.state.values() for x in one.values()]
    return [x.detach().clone() for x in (*model.parameters(), *state)], str(optimizer.state_dict())
