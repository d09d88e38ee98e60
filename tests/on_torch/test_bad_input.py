"""What bad input gets: an error that names the function, the value, the rule and the way out."""

import numpy as np
import pytest
import torch

import halfstep_torch as hs


def parameter(dtype=torch.bfloat16, shape=(4,)):
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


# call, kind of error, its message
CALLS = [
    # --- scale_by_adam ---
    (lambda: hs.scale_by_adam(b2=torch.tensor(0.999, dtype=torch.bfloat16)), TypeError,
     "scale_by_adam: b2 is a bfloat16 tensor; hyperparameters are float32 (0.999 in bfloat16 is 1.0). "
     "Use a float, or a float32 tensor."),
    (lambda: hs.scale_by_adam(b2=np.array(0.999, np.float16)), TypeError,
     "scale_by_adam: b2 is a float16 array; hyperparameters are float32 (0.999 in bfloat16 is 1.0). "
     "Use a float, or a float32 tensor."),
    # --- the other links ---
    (lambda: hs.add_decayed_weights(0.1, mask={"w": True}), TypeError,
     "add_decayed_weights: mask={'w': True} is not a function. Use a function of (name, param), or param "
     "groups."),
    # --- chain ---
    (lambda: hs.chain(hs.scale_by_adam(), "adam"), TypeError,
     "chain: 'adam' is not a transform. Pass scale_by_adam(), scale_by_learning_rate(1e-3), ..."),
    (lambda: hs.chain(hs.add_decayed_weights(), hs.scale_by_adam(), hs.add_decayed_weights()), ValueError,
     "chain: add_decayed_weights and add_decayed_weights both own the group entry 'weight_decay'. "
     "Keep one of them."),
    (lambda: hs.chain(hs.round_stochastically(), hs.scale_by_learning_rate(1.0)), ValueError,
     "chain: round_stochastically applies updates to the weights. Make it the last link."),
    # --- round_to, random_words ---
    (lambda: hs.round_to(torch.ones(2, dtype=torch.float64), "bfloat16"), TypeError,
     "round_to: x is float64; it is rounded from float32. Cast it to float32."),
    (lambda: hs.round_to(torch.ones(2), "bfloat16", torch.ones(2)), TypeError,
     "round_to: words are float32. Use one uint32 word per element."),
    (lambda: hs.round_to(torch.ones(2), "bfloat16", hs.random_words(0, 1, "w", 0, 3)), ValueError,
     "round_to: words have shape (3,), x (2,). Use one uint32 word per element."),
    (lambda: hs.random_words(0, 2**32, "w", 0, 3), ValueError,
     "random_words: step=4294967296 is outside [0, 2^32). Use the count of updates, 1 at the first."),
    # --- optimizers ---
    (lambda: hs.AdamW([parameter()], lr=-0.1), ValueError,
     "AdamW: lr=-0.1 is negative. Use a number >= 0, or maximize=True to ascend."),
    (lambda: hs.AdamW([parameter()], lr=torch.tensor(0.1, dtype=torch.float16)), TypeError,
     "AdamW: lr is a float16 tensor; hyperparameters are float32 (0.999 in bfloat16 is 1.0). "
     "Use a float, or a float32 tensor."),
    (lambda: hs.Adam([parameter()], decoupled_weight_decay=True), ValueError,
     "Adam: decoupled_weight_decay=True is not supported. Use AdamW."),
    (lambda: hs.Adam([parameter()], lr="fast"), TypeError, "Adam: lr='fast' is not a number. Use a float."),
    (lambda: hs.AdamW([parameter()], betas=(1.0, 0.9)), ValueError,
     "AdamW: betas[0]=1.0 is outside [0, 1). Use a decay rate such as 0.9."),
    (lambda: hs.AdamW([parameter()], betas=0.9), TypeError,
     "AdamW: betas=0.9 is not a pair. Use a pair such as (0.9, 0.999)."),
    (lambda: hs.AdamW([parameter()], compile="yes"), ValueError,
     "AdamW: compile='yes' is not a valid value. Use True, False or \"auto\"."),
    (lambda: hs.AdamW([("layer.w", parameter(torch.float64))]), TypeError,
     "AdamW: the weight 'layer/w' is float64; weights are float32, bfloat16 or float16. Cast it."),
    (lambda: hs.AdamW([parameter(), parameter(torch.complex64)]), TypeError,
     "AdamW: the weight '1' is complex64; weights are real. Make a parameter of its parts, "
     "torch.view_as_real(weight), and torch.view_as_complex(parameter) in the model."),
    (lambda: hs.AdamW([("w", torch.ones(2).to_sparse().requires_grad_())]), TypeError,
     "AdamW: the weight 'w' is sparse. Pass plain dense tensors."),
    (lambda: hs.AdamW([("w", torch.nn.Parameter(torch.ones(1).expand(3)))]), ValueError,
     "AdamW: elements of the weight 'w' share memory. Pass a clone of it."),
    (lambda: hs.Optimizer([parameter()], torch.optim.AdamW), TypeError,
     "chain: <class 'torch.optim.adamw.AdamW'> is not a transform. "
     "Pass scale_by_adam(), scale_by_learning_rate(1e-3), ..."),
    # --- SGD ---
    (lambda: hs.SGD([parameter()], nesterov=True), ValueError,
     "SGD: nesterov=True with momentum=0.0. Use a momentum such as 0.9."),
    (lambda: hs.SGD([parameter()], momentum=-0.1), ValueError,
     "SGD: momentum=-0.1 is outside [0, 1). Use a decay rate such as 0.9."),
    (lambda: hs.SGD([parameter()], momentum=0.999, rounding="nearest"), ValueError,
     'SGD: accumulator_dtype=bfloat16 with rounding="nearest" freezes at momentum=0.999 '
     '(1-momentum < 2^-8). Use rounding="stochastic", or accumulator_dtype="float32".'),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), CALLS, ids=[message[:60] for _, _, message in CALLS])
def test_a_bad_call_is_told_what_is_wrong_and_what_to_do(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    assert str(error.value) == message
