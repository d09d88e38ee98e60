"""What bad input gets: an error that names the function, the value, the rule and the way out."""

import numpy as np
import pytest
import torch

import halfstep_torch as hs


def parameter(dtype=torch.bfloat16, shape=(4,)):
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


DTYPES = 'Use "bfloat16", "float16" or "float32"; of 8 bits scaled("float8_e4m3fn"), or a recipe.'


NU_DTYPES = 'Use "bfloat16" or "float32"; of 8 bits scaled("ufloat8_e5m3"), or a recipe.'


ROUNDINGS = 'Use "stochastic", "feedback", "nearest", "auto" or "nearest_unchecked".'


TARGETS = 'Use "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2" or "float8_e3m4".'


SEEDS = "Use an integer in that range, or two uint32 words (high, low)."


# call, kind of error, its message
CALLS = [
    # --- scale_by_adam ---
    (
        lambda: hs.scale_by_adam(b1=1.5),
        ValueError,
        "scale_by_adam: b1=1.5 is outside [0, 1). Use a decay rate such as 0.9.",
    ),
    (
        lambda: hs.scale_by_adam(b2=-0.1),
        ValueError,
        "scale_by_adam: b2=-0.1 is outside [0, 1). Use a decay rate such as 0.999.",
    ),
    (
        lambda: hs.scale_by_adam(b2=0.99999999),
        ValueError,
        "scale_by_adam: b2=0.99999999 is outside [0, 1) in float32. Use a decay rate such as 0.999.",
    ),
    (lambda: hs.scale_by_adam(b1="x"), TypeError, "scale_by_adam: b1='x' is not a number. Use a float."),
    (lambda: hs.scale_by_adam(b1=True), TypeError, "scale_by_adam: b1=True is not a number. Use a float."),
    (
        lambda: hs.scale_by_adam(b2=torch.tensor(0.999, dtype=torch.bfloat16)),
        TypeError,
        "scale_by_adam: b2 is a bfloat16 tensor; hyperparameters are float32 (0.999 in bfloat16 is 1.0). "
        "Use a float, or a float32 tensor.",
    ),
    (
        lambda: hs.scale_by_adam(b2=np.array(0.999, np.float16)),
        TypeError,
        "scale_by_adam: b2 is a float16 array; hyperparameters are float32 (0.999 in bfloat16 is 1.0). "
        "Use a float, or a float32 tensor.",
    ),
    (
        lambda: hs.scale_by_adam(b1=torch.tensor([0.9, 0.8])),
        ValueError,
        "scale_by_adam: b1 has shape (2,); a hyperparameter is a scalar. Use shape ().",
    ),
    (
        lambda: hs.scale_by_adam(eps=-1.0),
        ValueError,
        "scale_by_adam: eps=-1.0 is negative. Use a number >= 0.",
    ),
    (
        lambda: hs.scale_by_adam(eps_root=float("nan")),
        ValueError,
        "scale_by_adam: eps_root=nan is not a number. Use a number >= 0.",
    ),
    (
        lambda: hs.scale_by_adam(nu_dtype="bfloat16", nu_rounding="nearest"),
        ValueError,
        'scale_by_adam: nu_dtype=bfloat16 with nu_rounding="nearest" freezes at b2=0.999 (1-b2 < 2^-8). '
        'Use nu_rounding="stochastic", or nu_dtype="float32".',
    ),
    (
        lambda: hs.scale_by_adam(b1=0.9996, mu_dtype=torch.float16, mu_rounding="nearest"),
        ValueError,
        'scale_by_adam: mu_dtype=float16 with mu_rounding="nearest" freezes at b1=0.9996 (1-b1 < 2^-11). '
        'Use mu_rounding="stochastic", or mu_dtype="float32".',
    ),
    (
        lambda: hs.scale_by_adam(nu_dtype="float8_e4m3fn"),
        ValueError,
        "scale_by_adam: nu_dtype=float8_e4m3fn cannot hold a moment without a block scale. "
        'Use scaled("ufloat8_e5m3").',
    ),
    (
        lambda: hs.scale_by_adam(nu_dtype=torch.int32),
        ValueError,
        f"scale_by_adam: nu_dtype=int32 is not a state dtype. {NU_DTYPES}",
    ),
    (
        lambda: hs.scale_by_adam(mu_dtype="float64"),
        ValueError,
        f"scale_by_adam: mu_dtype='float64' is not a state dtype. {DTYPES}",
    ),
    (
        lambda: hs.scale_by_adam(nu_rounding="up"),
        ValueError,
        f"scale_by_adam: nu_rounding='up' is not a rounding. {ROUNDINGS}",
    ),
    (lambda: hs.scale_by_adam(seed=-1), ValueError, f"scale_by_adam: seed=-1 is outside [0, 2^64). {SEEDS}"),
    (
        lambda: hs.scale_by_adam(seed=1.5),
        TypeError,
        "scale_by_adam: seed=1.5 is not an integer. "
        "Use an integer in [0, 2^64), or two uint32 words (high, low).",
    ),
    (
        lambda: hs.scale_by_adam(seed=(1, 2**32)),
        ValueError,
        "scale_by_adam: seed=(1, 4294967296) is not two uint32 words (high, low). "
        "Use words in [0, 2^32), or an integer.",
    ),
    # --- the other links ---
    (
        lambda: hs.add_decayed_weights(-0.1),
        ValueError,
        "add_decayed_weights: weight_decay=-0.1 is negative. Use a number >= 0.",
    ),
    (
        lambda: hs.add_decayed_weights(0.1, mask={"w": True}),
        TypeError,
        "add_decayed_weights: mask={'w': True} is not a function. Use a function of (name, param), or param "
        "groups.",
    ),
    (
        lambda: hs.scale_by_learning_rate(-0.1),
        ValueError,
        "scale_by_learning_rate: learning_rate=-0.1 is negative. "
        "Use a number >= 0, or flip_sign=False to ascend.",
    ),
    (
        lambda: hs.scale_by_learning_rate(None),
        TypeError,
        "scale_by_learning_rate: learning_rate=None is not a number. Use a float.",
    ),
    (
        lambda: hs.round_stochastically(seed=2**64),
        ValueError,
        f"round_stochastically: seed={2**64} is outside [0, 2^64). {SEEDS}",
    ),
    # --- chain ---
    (
        lambda: hs.chain(hs.scale_by_adam(), "adam"),
        TypeError,
        "chain: 'adam' is not a transform. Pass scale_by_adam(), scale_by_learning_rate(1e-3), ...",
    ),
    (
        lambda: hs.chain(hs.add_decayed_weights(), hs.scale_by_adam(), hs.add_decayed_weights()),
        ValueError,
        "chain: add_decayed_weights and add_decayed_weights both own the group entry 'weight_decay'. "
        "Keep one of them.",
    ),
    (
        lambda: hs.chain(hs.round_stochastically(), hs.scale_by_learning_rate(1.0)),
        ValueError,
        "chain: round_stochastically applies updates to the weights. Make it the last link.",
    ),
    # --- round_to, random_words ---
    (
        lambda: hs.round_to(torch.ones(2), torch.int8),
        ValueError,
        f"round_to: dtype=int8 is not a rounding target. {TARGETS}",
    ),
    (
        lambda: hs.round_to(torch.ones(2, dtype=torch.float64), "bfloat16"),
        TypeError,
        "round_to: x is float64; it is rounded from float32. Cast it to float32.",
    ),
    (
        lambda: hs.round_to([1.0], "bfloat16"),
        TypeError,
        "round_to: x is list; it is rounded from float32. Cast it to float32.",
    ),
    (
        lambda: hs.round_to(torch.ones(2), "bfloat16", torch.ones(2)),
        TypeError,
        "round_to: words are float32. Use one uint32 word per element.",
    ),
    (
        lambda: hs.round_to(torch.ones(2), "bfloat16", hs.random_words(0, 1, "w", 0, 3)),
        ValueError,
        "round_to: words have shape (3,), x (2,). Use one uint32 word per element.",
    ),
    (
        lambda: hs.random_words(-1, 1, "w", 0, 3),
        ValueError,
        f"random_words: seed=-1 is outside [0, 2^64). {SEEDS}",
    ),
    (
        lambda: hs.random_words(0, 2**32, "w", 0, 3),
        ValueError,
        "random_words: step=4294967296 is outside [0, 2^32). Use the count of updates, 1 at the first.",
    ),
    (
        lambda: hs.random_words(0, 1, -1, 0, 3),
        ValueError,
        "random_words: leaf=-1 is outside [0, 2^32). Use an integer in that range.",
    ),
    # --- optimizers ---
    (
        lambda: hs.AdamW([parameter()], lr=-0.1),
        ValueError,
        "AdamW: lr=-0.1 is negative. Use a number >= 0, or maximize=True to ascend.",
    ),
    (
        lambda: hs.AdamW([parameter()], lr=torch.tensor(0.1, dtype=torch.float16)),
        TypeError,
        "AdamW: lr is a float16 tensor; hyperparameters are float32 (0.999 in bfloat16 is 1.0). "
        "Use a float, or a float32 tensor.",
    ),
    (
        lambda: hs.Adam([parameter()], decoupled_weight_decay=True),
        ValueError,
        "Adam: decoupled_weight_decay=True is not supported. Use AdamW.",
    ),
    (
        lambda: hs.AdamW([parameter()], seed=True),
        TypeError,
        "AdamW: seed=True is not an integer. Use an integer in [0, 2^64), or two uint32 words (high, low).",
    ),
    (lambda: hs.Adam([parameter()], lr="fast"), TypeError, "Adam: lr='fast' is not a number. Use a float."),
    (
        lambda: hs.AdamW([parameter()], betas=(1.0, 0.9)),
        ValueError,
        "AdamW: betas[0]=1.0 is outside [0, 1). Use a decay rate such as 0.9.",
    ),
    (
        lambda: hs.AdamW([parameter()], betas=0.9),
        TypeError,
        "AdamW: betas=0.9 is not a pair. Use a pair such as (0.9, 0.999).",
    ),
    (
        lambda: hs.AdamW([parameter()], eps=-1e-8),
        ValueError,
        "AdamW: eps=-1e-08 is negative. Use a number >= 0.",
    ),
    (
        lambda: hs.AdamW([parameter()], weight_decay=-0.1),
        ValueError,
        "AdamW: weight_decay=-0.1 is negative. Use a number >= 0.",
    ),
    (
        lambda: hs.AdamW([parameter()], nu_rounding="nearest"),
        ValueError,
        'AdamW: nu_dtype=bfloat16 with nu_rounding="nearest" freezes at b2=0.999 (1-b2 < 2^-8). '
        'Use nu_rounding="stochastic", or nu_dtype="float32".',
    ),
    (
        lambda: hs.AdamW([parameter()], mu_rounding="up"),
        ValueError,
        f"AdamW: mu_rounding='up' is not a rounding. {ROUNDINGS}",
    ),
    (
        lambda: hs.Adam([parameter()], mu_dtype="int8"),
        ValueError,
        'Adam: mu_dtype=int8 cannot hold a moment without a block scale. Use scaled("int8").',
    ),
    (
        lambda: hs.AdamW([parameter()], seed=2**64),
        ValueError,
        f"AdamW: seed={2**64} is outside [0, 2^64). {SEEDS}",
    ),
    (
        lambda: hs.AdamW([parameter()], param_storage="kahan"),
        ValueError,
        "AdamW: param_storage='kahan' is not a weight storage. Did you mean \"compensated\"? "
        'Use "stochastic", "nearest", "compensated", "split8", "split16", "master", "feedback" or "int8".',
    ),
    (
        lambda: hs.AdamW([parameter()], compile="yes"),
        ValueError,
        "AdamW: compile='yes' is not a valid value. Use True, False or \"auto\".",
    ),
    (
        lambda: hs.AdamW([("layer.w", parameter(torch.float64))]),
        TypeError,
        "AdamW: the weight 'layer/w' is float64; weights are float32, bfloat16 or float16. Cast it.",
    ),
    (
        lambda: hs.AdamW([parameter(), parameter(torch.complex64)]),
        TypeError,
        "AdamW: the weight '1' is complex64; weights are real. Make a parameter of its parts, "
        "torch.view_as_real(weight), and torch.view_as_complex(parameter) in the model.",
    ),
    (
        lambda: hs.AdamW([("w", torch.ones(2).to_sparse())]),
        TypeError,
        "AdamW: the weight 'w' is sparse. Pass plain dense tensors.",
    ),
    (
        lambda: hs.AdamW([("w", torch.nn.Parameter(torch.ones(1).expand(3)))]),
        ValueError,
        "AdamW: elements of the weight 'w' share memory. Pass a clone of it.",
    ),
    (
        lambda: hs.Optimizer([parameter()], torch.optim.AdamW),
        TypeError,
        "chain: <class 'torch.optim.adamw.AdamW'> is not a transform. "
        "Pass scale_by_adam(), scale_by_learning_rate(1e-3), ...",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), CALLS, ids=[message[:60] for _, _, message in CALLS])
def test_a_bad_call_is_told_what_is_wrong_and_what_to_do(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("link", "rate"),
    [
        (hs.scale_by_adam, "b1"),
        (hs.scale_by_adan, "b3"),
        (hs.scale_by_ademamix, "b3"),
        (hs.scale_by_lion, "b2"),
        (hs.scale_by_muon, "beta"),
        (hs.scale_by_rms, "decay"),
        (hs.scale_by_schedule_free, "b1"),
        (hs.trace, "decay"),
    ],
)
def test_every_link_refuses_a_wrong_rate_when_it_is_made(link, rate):
    with pytest.raises(ValueError, match=rf"^{link.__name__}: {rate}=1.5 is outside \[0, 1\)"):
        link(**{rate: 1.5})


@pytest.mark.parametrize(
    ("link", "argument"),
    [
        (hs.scale_by_factored_rms, {"epsilon": -1.0}),
        (hs.clip_by_block_rms, {"threshold": -1.0}),
        (hs.scale_by_param_block_rms, {"min_scale": -1.0}),
    ],
)
def test_every_link_of_adafactor_refuses_a_wrong_number_when_it_is_made(link, argument):
    (name,) = argument
    with pytest.raises(ValueError, match=f"^{link.__name__}: {name}=-1.0 is negative"):
        link(**argument)
