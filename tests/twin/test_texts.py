"""What a user may write as text: formats as messages print them, recipes by nearly the right name."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

import halfstep
import halfstep_jax
import halfstep_torch

P = {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")}
TEXTS = {
    'scaled("int8")': halfstep.scaled("int8"),
    "scaled('float8_e4m3fn', block_size=64)": halfstep.scaled("float8_e4m3fn", 64),
    ' relative("int4", 32) ': halfstep.relative("int4", 32),
    'codebook("dynamic8", "row", min_size=0)': halfstep.codebook("dynamic8", "row", 0),
    'scaled("int8", None, scale="fine")': halfstep.scaled("int8", None, scale="fine"),
}


def torch_adamw(**options):
    weight = torch.nn.Parameter(torch.ones(64, 128).bfloat16())
    return halfstep_torch.AdamW([("w", weight)], **options)


def jax_adamw(**options):
    return halfstep_jax.adamw(1e-3, **options)


MAKE = {"jax": jax_adamw, "torch": torch_adamw}


@pytest.mark.parametrize("text", TEXTS)
def test_a_format_is_taken_as_the_text_of_its_call(text):
    fmt = TEXTS[text]
    in_jax = halfstep_jax.describe(jax_adamw(mu_dtype=text), P).of("w", "mu")
    in_torch = halfstep_torch.describe(torch_adamw(mu_dtype=text)).of("w", "exp_avg")
    assert in_jax.format == in_torch.format == fmt.for_shape((64, 128)).text
    assert halfstep_jax.describe(jax_adamw(mu_dtype=fmt), P).of("w", "mu") == in_jax


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('scale("int8")', 'Did you mean "scaled"?'),
        ('scaled("int8"', "Use the text of a call with literals"),
        ('scaled(__import__("os").getcwd())', "Use the text of a call with literals"),
        ('__import__("os").system("true")', "Use the text of a call with literals"),
        ("scaled(x)", "Use the text of a call with literals"),
        ('(lambda: "float32")()', "Use the text of a call with literals"),
        ('scaled("int9")', 'dtype=int9'),
        ("scaled('uroot')", 'Did you mean "uroot8"?'),
        ('scaled("int8", size=3)', "unexpected keyword argument 'size'"),
        ("bf16", 'Did you mean "bfloat16"?'),
        ("bfloat61", 'Did you mean "bfloat16"?'),
        ("fp8", 'Did you mean "float8_e4m3fn"?'),
    ],
)  # fmt: skip
@pytest.mark.parametrize("package", MAKE)
def test_a_text_that_is_no_format_is_refused_and_nothing_of_it_runs(package, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MAKE[package](mu_dtype=text)


@pytest.mark.parametrize("package", MAKE)
def test_another_libraries_word_is_told_one_that_may_stand_there(package):
    with pytest.raises(ValueError, match=r'nu_dtype=\'fp8\' .* Did you mean "ufloat8_e5m3"\?'):
        MAKE[package](nu_dtype="fp8")
    with pytest.raises(ValueError, match=r'param_storage=\'kahan\' .* Did you mean "compensated"\?'):
        MAKE[package](param_storage="kahan")


@pytest.mark.parametrize("package", MAKE)
def test_a_recipe_by_nearly_the_right_name_is_told_the_right_one(package):
    words = {"one-pass": "one_pass", "8bit": "eight_bit", "Four Bit": "four_bit", "bf16": "sixteen_bit"}
    words |= dict.fromkeys(("fp8", "int8", "float8_e4m3fn"), "eight_bit")
    words |= {"fp4": "four_bit", "int4": "four_bit", "float32": "full_precision"}
    for given, meant in words.items():
        with pytest.raises(ValueError, match=rf'is not a recipe\. Did you mean "{meant}"\? Use '):
            MAKE[package](recipe=given)
    with pytest.raises(TypeError, match=r"is not a recipe\. Use"):
        MAKE[package](recipe={"mu_dtype": "float32"})


def test_a_recipe_may_be_given_itself():
    by_name = halfstep_jax.describe(jax_adamw(recipe="one_pass"), P)
    assert halfstep_jax.describe(jax_adamw(recipe=halfstep.recipes.one_pass), P) == by_name
    by_name = halfstep_torch.describe(torch_adamw(recipe="one_pass"))
    assert halfstep_torch.describe(torch_adamw(recipe=halfstep.recipes.one_pass)) == by_name


@pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch])
def test_completion_offers_the_public_names_and_the_adapters(package):
    assert set(dir(package)) == {*package.__all__, "__version__", "integrations"}
    assert len(dir(package.recipes)) == len({x for x in dir(package.recipes) if not x.startswith("_")})
    assert dir(package.recipes) == sorted(
        ["full_precision", "near_float32", "sixteen_bit", "one_pass", "eight_bit", "four_bit"]
    )


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (torch_adamw, {"b1": 0.9}, r"AdamW: there is no argument b1\. Did you mean betas=\(b1, b2\)\?$"),
        (torch_adamw, {"learning_rate": 0.1}, r"no argument learning_rate\. Did you mean lr\?$"),
        (torch_adamw, {"weight_decai": 0.1}, r"no argument weight_decai\. Did you mean weight_decay\?$"),
        (torch_adamw, {"zzz": 0.1}, r"no argument zzz\. Its arguments are params, lr, betas, eps"),
        (jax_adamw, {"betas": (0.9, 0.99)}, r"no argument betas\. Did you mean b1=\.\.\., b2=\.\.\.\?$"),
        (
            torch_adamw,
            {"stochastic_rounding": True},
            r'by default: param_storage="stochastic"\. Leave it out\.$',
        ),
        (torch_adamw, {"bf16_stochastic_round": True}, r'param_storage="stochastic"\. Leave it out\.$'),
        (torch_adamw, {"optim_bits": 8}, r'no argument optim_bits\. Use recipe="eight_bit"\.$'),
        (torch_adamw, {"kahan_sum": True}, r'Use param_storage="compensated"\.$'),
        (
            torch_adamw,
            {"master_weight_bits": 24},
            r'param_storage="split8" for 24 bits, or "split16"',
        ),
        (torch_adamw, {"block_size": 64}, r'nu_dtype=scaled\("uroot8", 128, min_size=4096\)\.$'),
        (torch_adamw, {"is_paged": True}, r"halfstep has nothing for it\. Leave it out\.$"),
        (torch_adamw, {"recipe": "kahan"}, r'Did you mean param_storage="compensated"\?'),
        (jax_adamw, {"optim_bits": 8}, r'no argument optim_bits\. Use recipe="eight_bit"\.$'),
        (jax_adamw, {"beta1": 0.9}, r"adamw: there is no argument beta1\. Did you mean b1\?$"),
        (jax_adamw, {"lr": 0.1}, r"adamw: there is no argument lr\. Did you mean learning_rate\?$"),
    ],
)
def test_an_argument_of_the_other_framework_is_told_the_right_one(make, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**given)


NAMES = {
    "AdamW8bit": ('Use AdamW(..., recipe="eight_bit").', 'Use adamw(..., recipe="eight_bit").'),
    "PagedAdamW_8bit": ('Use AdamW(..., recipe="eight_bit").', 'Use adamw(..., recipe="eight_bit").'),
    "adamw4bit": ('Use AdamW(..., recipe="four_bit").', 'Use adamw(..., recipe="four_bit").'),
    "AdamWBF16": ("Use AdamW(...).", "Use adamw(...)."),
    "FusedAdam": ("Did you mean Adam?", "Did you mean adam?"),
    "RMSprop": ("Use round_weights(...) around", 'Use store_params(..., "stochastic") around'),
    "describ": ("Did you mean describe?", "Did you mean describe?"),
    "zzz": ("'zzz'", "'zzz'"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_another_library_is_told_the_right_one(name):
    for package, advice in zip((halfstep_torch, halfstep_jax), NAMES[name], strict=True):
        with pytest.raises(AttributeError) as error:
            getattr(package, name)
        assert advice in str(error.value)
        assert not hasattr(package, name)
    for package, other, advice in ((halfstep_torch, "adamw", "AdamW"), (halfstep_jax, "AdamW", "adamw")):
        with pytest.raises(AttributeError, match=rf"has no attribute '{other}'\. Did you mean {advice}\?"):
            getattr(package, other)
    assert not hasattr(halfstep_torch, "__wrapped__")


def test_remedies_for_names_of_other_libraries_run():
    p = torch.nn.Parameter(torch.ones(64, 128).bfloat16())
    blocks = {"nu_dtype": halfstep_torch.scaled("uroot8", 128, min_size=4096)}
    for way_out in (
        blocks,
        {"recipe": "eight_bit"},
        *({"param_storage": x} for x in ("split8", "compensated")),
    ):
        halfstep_torch.AdamW([("p", p)], **way_out)
    halfstep_torch.round_weights(torch.optim.RMSprop([("p", p)]))
    tx = halfstep_jax.store_params(optax.rmsprop(1e-3), "stochastic")
    tx.init({"w": jnp.ones(4, jnp.bfloat16)})


MODEL = torch.nn.Linear(4, 4)


def test_remedies_for_parameters_run():
    for params in (dict(MODEL.named_parameters()).items(), dict(MODEL.named_parameters()).values()):
        halfstep_torch.AdamW(params)
    groups = halfstep_torch.cast_model(torch.nn.Linear(2, 2))
    for again in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        halfstep_torch.AdamW(again)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: halfstep_torch.AdamW(MODEL),
            TypeError,
            "are a module, Linear. Pass model.named_parameters()",
        ),
        (lambda: halfstep_torch.AdamW([]), ValueError, "AdamW: there are no parameters. Pass model.named"),
        (lambda: halfstep_torch.Muon([]), ValueError, "Muon: there are no parameters. Pass model.named"),
        (
            lambda: halfstep_torch.AdamW(x for x in ()),
            ValueError,
            "AdamW: the generator is empty, as after its first use. Pass model.named_parameters().",
        ),
        (
            lambda: halfstep_torch.AdamW(MODEL.parameters),
            TypeError,
            "AdamW: the parameters are a function, parameters. Call model.named_parameters().",
        ),
        (lambda: halfstep_torch.AdamW(MODEL.weight), TypeError, 'are a tensor. Pass a list, such as [("w", '),
        (
            lambda: halfstep_torch.AdamW(MODEL.state_dict().items()),
            ValueError,
            "AdamW: no gradient reaches the values of a state dict. Pass model.named_parameters().",
        ),
        (
            lambda: halfstep_torch.cast_model(torch.nn.Linear(2, 2)).parameters(),
            AttributeError,
            "cast_model returned param groups, which have no attribute 'parameters'. It casts",
        ),
        (lambda: halfstep_torch.SGD(MODEL.state_dict()), TypeError, "are a dict, such as a state dict. Pass"),
        (
            lambda: halfstep_torch.AdamW([("a", MODEL.weight), MODEL.bias]),
            ValueError,
            "some parameters have names, and others none. Pass pairs (name, parameter) alone, as in "
            '[*model.named_parameters(), ("log_alpha", log_alpha)].',
        ),
        (lambda: halfstep_torch.clip_grad_norm_(MODEL, 1.0), TypeError, "Pass model.parameters()."),
        (
            lambda: halfstep_torch.memory_report(torch_adamw()),
            TypeError,
            "Pass the model, then the optimizer.",
        ),
        (lambda: halfstep_torch.chain(), ValueError, "chain: there are no links. Pass transforms, such as"),
        (
            lambda: halfstep_torch.chain(*[halfstep_torch.round_stochastically()] * 2),
            ValueError,
            "round_stochastically applies updates to the weights. The chain has it twice: keep the last one.",
        ),
        (
            lambda: halfstep_jax.adamw(1e-3).init({"w": jax.nn.relu}),
            TypeError,
            "Filter the model, as by equinox.filter(model, equinox.is_inexact_array)",
        ),
    ],
)
def test_what_is_given_in_place_of_parameters_is_named_with_the_way_out(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_key_of_jax_is_a_seed():
    by_key, by_words = (jax_adamw(seed=s).init({"w": jax.numpy.ones(2)}) for s in (jax.random.key(7), (0, 7)))
    assert jax.tree.map(lambda x: x.tolist(), by_key[-1]) == jax.tree.map(lambda x: x.tolist(), by_words[-1])
