"""A rule of a user's own has golden vectors by one command, and both packages give their bits."""

import ast
import dataclasses
import pathlib
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from backends import BACKENDS, make, missing, on_jax, on_torch
from compare import assert_same
from halfstep_spec import SPEC_VERSION, generate, user_rule
from halfstep_spec.vectors import load

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "new-rule.md"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file with the rule of docs/new-rule.md."""
    block = PAGE.read_text().split("```python\n")[1].split("```")[0]
    source = ast.parse(block)
    source.body = source.body[: 1 + next(i for i, x in enumerate(source.body) if isinstance(x, ast.ClassDef))]
    path = tmp_path_factory.mktemp("own") / "my_rule.py"
    path.write_text(ast.unparse(source))
    return path


@pytest.fixture(scope="module")
def cases(file):
    assert generate.main(["--rule", str(file)]) == 0
    (of_file,) = load(SPEC_VERSION, file.with_suffix(".vectors")).values()
    return of_file


def package_with(package, rule, link):
    """Return a package that has the rule as one of its links."""
    known = {field.name for field in dataclasses.fields(rule)}

    def scale_by(**options):
        return link(rule(**{name: value for name, value in options.items() if name in known}))

    return types.SimpleNamespace(**vars(package) | {rule.name: scale_by})


@pytest.fixture
def backend(request, file, monkeypatch):
    if missing(request.param):
        pytest.skip(f"{BACKENDS[request.param]} is not installed")
    (rule,) = user_rule.classes_of(file)
    monkeypatch.setattr(on_jax, "hs", package_with(halfstep_jax, rule, halfstep_jax.as_transform))
    monkeypatch.setattr(on_torch, "hs", package_with(halfstep_torch, rule, lambda rule: rule))
    return make(request.param)


SLOW = pytest.mark.slow
ALL = [
    "jax-jit",
    pytest.param("jax-eager", marks=SLOW),
    "torch-eager",
    pytest.param("torch-compile", marks=SLOW),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ALL, indirect=True)
def test_both_packages_give_the_bits_of_a_users_rule(backend, cases):
    assert len(cases) == 6
    for case in cases:
        actual = backend.step(case)
        assert actual.keys() == case.outputs.keys()
        for name, expected in case.outputs.items():
            assert_same(actual[name], expected, f"{case.key}: {name}")


def test_the_vectors_are_those_of_the_paper(cases):
    """Without rounding of moments, the steps are those of AdEMAMix in double precision."""
    (case,) = (case for case in cases if case.arguments["nu_dtype"] == "float32")
    p, g = (case.inputs[name].bits.view(np.float32).astype(np.float64) for name in ("p", "g"))
    b1, b2, b3, alpha, eps = 0.9, 0.999, 0.9999, 5.0, 1e-8
    m1 = m2 = nu = np.zeros_like(p)
    for t, gradient in enumerate(g, 1):
        m1, m2 = b1 * m1 + (1 - b1) * gradient, b3 * m2 + (1 - b3) * gradient
        nu = b2 * nu + (1 - b2) * gradient**2
        u = (m1 / (1 - b1**t) + alpha * m2) / (np.sqrt(nu / (1 - b2**t)) + eps)
        p = p - 1e-3 * (u + 0.1 * p)
    # A step rounds a weight below 1 by 2^-25, and its decay by less; u below 10 by twenty such, times 1e-3.
    actual = case.outputs["p"].bits[-1].view(np.float32)
    assert np.abs(actual - p).max() < 5 * (2.0**-24 + 1e-3 * 10 * 20 * 2.0**-25)


BAD = [
    ("x = 1", "defines no rule. Derive a class from halfstep.Rule in it."),
    ("rate: float = number()", "Own: rate has no default. Give it one, which the vectors take."),
    ("mu = moment()", "Own: the moment mu has no field for its format, and vectors name it."),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_file_without_vectors_says_why(line, message, tmp_path, capsys):
    base = "(Rule)" if line != "x = 1" else ""
    path = tmp_path / "own.py"
    path.write_text(f"from halfstep import Rule, moment, number\n\nclass Own{base}:\n    {line}\n")
    assert generate.main(["--rule", str(path)]) == 1
    assert message in capsys.readouterr().out


class Mine(halfstep_jax.Rule):
    name = "MyRule"
    b1: float = halfstep_jax.decay_rate(0.9)
    mu = halfstep_jax.moment(rate="b1")

    def update(self, g, p, n, m, op):
        return m.mu.round(op.ema(m.mu.value, g, n.b1))


def test_a_rule_whose_name_has_capitals_moves_from_jax_to_torch(tmp_path):
    params, path = {"w": jnp.ones(3)}, tmp_path / "run.safetensors"
    tx = optax.chain(halfstep_jax.as_transform(Mine()), halfstep_jax.scale_by_learning_rate(0.1))
    state = tx.update(params, tx.init(params), params)[1]
    halfstep_jax.save_state(path, params, state, tx)
    model = torch.nn.ParameterDict({"w": torch.ones(3)})
    chain = halfstep_torch.chain(Mine(), halfstep_torch.scale_by_learning_rate(0.1))
    optimizer = halfstep_torch.Optimizer(model.named_parameters(), chain)
    halfstep_torch.load_state(path, model, optimizer)
    np.testing.assert_array_equal(optimizer.state[model["w"]]["mu"], state[0].mu["w"])
