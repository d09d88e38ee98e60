"""One config names an optimizer in both packages; what it names is checked, and nothing in it is run."""

import jax.numpy as jnp
import pytest
import torch

import halfstep_jax
import halfstep_torch

TORCH = ["adamw", "AdamW()", " adam_w ", {"name": "AdamW"}, "ADAMW(lr=1e-3, betas=(0.9, 0.95), seed=3)"]


def params():
    return [("w", torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)))]


@pytest.mark.parametrize("config", TORCH)
def test_a_config_names_an_optimizer_in_torch(config):
    assert type(halfstep_torch.from_config(config)(params())) is halfstep_torch.AdamW


def test_arguments_of_a_config_are_those_of_the_class():
    made = halfstep_torch.from_config("AdamW(lr=2e-3, recipe='one_pass', betas=(0.9, 0.95))")(params())
    told = halfstep_torch.AdamW(params(), lr=2e-3, recipe="one_pass", betas=(0.9, 0.95))
    assert repr(made) == repr(told)
    made = halfstep_torch.from_config({"name": "muon", "lr": 2e-3})([("0.w", params()[0][1])])
    assert type(made) is halfstep_torch.Muon


def test_every_optimizer_has_its_name_in_both_packages():
    kinds = [kind for kind in vars(halfstep_torch).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, halfstep_torch.Optimizer)]
    for kind in kinds:
        if kind is not halfstep_torch.Optimizer:
            assert halfstep_torch.from_config(kind.__name__).func is kind
            arguments = {} if kind.__name__ == "Adafactor" else {"learning_rate": 1e-3}
            tx = halfstep_jax.from_config({"name": kind.__name__, **arguments})
            tx.init({"a": {"w": jnp.ones((4, 4), jnp.bfloat16)}})
    assert halfstep_torch.from_config("schedule_free_adamw").func is halfstep_torch.AdamWScheduleFree


def test_a_config_names_an_optimizer_in_jax():
    tx = halfstep_jax.from_config("AdamW(learning_rate=1e-3, recipe='one_pass')")
    assert tx.init({"w": jnp.ones(4, jnp.bfloat16)})[0].nu["w"].dtype == jnp.uint8
    rate = {"name": "adamw", "learning_rate": lambda count: 1e-3 / (1 + count)}
    halfstep_jax.from_config(rate).init({"w": jnp.ones(4, jnp.bfloat16)})


BAD = {
    "adamv": r"'adamv' is not an optimizer\. Did you mean Adam\?",
    "xyz": r"'xyz' is not an optimizer\. Use one of ",
    "AdamW8bit": r"'AdamW8bit' is not an optimizer\. Use AdamW\(\.\.\., recipe=\"eight_bit\"\)\.",
    "rmsprop": r"'rmsprop' is not an optimizer\. Use round_weights\(\.\.\.\)",
    "AdamW(learning_rate=1e-3)": r"AdamW has no argument 'learning_rate'\. Did you mean lr\?",
    "AdamW(kahan_sum=True)": r'no argument \'kahan_sum\'\. Use param_storage="compensated"\.',
    "AdamW(lr=1e-3, recip='one_pass')": r"AdamW has no argument 'recip'\. Did you mean recipe\?",
    "AdamW(__import__('os').getcwd())": "is not a name with arguments by name that are literals",
    "AdamW(lr=__import__('os').getcwd())": "is not a name with arguments by name that are literals",
    "AdamW(**{'lr': 1})": "is not a name with arguments by name",
    "hs.AdamW": "is not a name with arguments by name",
    "AdamW(1e-3)": "is not a name with arguments by name",
    "AdamW(lr=": "is not a name with arguments by name",
    "": "is not a name with arguments by name",
    "(" * 500: "is not a name with arguments by name",
    "AdamW(params=3)": "AdamW has no argument 'params'",
    "Optimizer": "'Optimizer' is not an optimizer",
}


@pytest.mark.parametrize("config", BAD)
def test_a_config_that_names_nothing_or_holds_code_is_refused(config):
    with pytest.raises(ValueError, match=f"^from_config: .*{BAD[config]}"):
        halfstep_torch.from_config(config)


def test_other_bad_configs_are_refused():
    for package in (halfstep_torch, halfstep_jax):
        with pytest.raises(ValueError, match=r"^from_config: .* has no name"):
            package.from_config({"lr": 1e-3})
        with pytest.raises(TypeError, match=r"^from_config: config=3 is neither a text nor a mapping"):
            package.from_config(3)
    with pytest.raises(ValueError, match=r"^from_config: adamw needs learning_rate\. Add learning_rate="):
        halfstep_jax.from_config("adamw")
    with pytest.raises(ValueError, match=r"^from_config: adamw has no argument 'lr'\. Did you mean learning"):
        halfstep_jax.from_config("adamw(lr=1e-3)")
    with pytest.raises(ValueError, match="'scale_by_adam' is not an optimizer"):
        halfstep_jax.from_config("scale_by_adam")
