"""A state file of another run, recipe or model is refused by both packages, or goes where it can."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep.checkpoint import state_file
from on_torch.steps import step_by_ones
from twin.state_files import everything, torch_run, transform, weights


@pytest.mark.parametrize("options", [{"nu_dtype": "bfloat16"}, {"b1": 0.8}, {"param_storage": "split16"}])
def test_a_run_with_another_recipe_is_refused_by_both(options, file):
    message = {"nu_dtype": "nu=ufloat16_e7m9", "b1": "b1=0.8", "param_storage": "split_params"}[min(options)]
    with pytest.raises(ValueError, match=message):
        halfstep_jax.load_state(file, weights(), transform(**options))
    options = {"betas": (0.8, 0.999)} if "b1" in options else options
    model, optimizer = torch_run(**options)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=message):
        halfstep_torch.load_state(file, model, optimizer)
    after = everything(model, optimizer)
    assert before[1] == after[1]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


def test_a_run_with_other_norms_is_refused_by_both(tmp_path):
    """The links that compute them keep nothing, and may be missing; but they say how they compute."""
    path, params = tmp_path / "run", {"w": weights()["w"]}
    tx = halfstep_jax.lamb(1e-2, exact=True)
    halfstep_jax.save_state(path, params, tx.init(params), tx)
    with pytest.raises(ValueError, match="scale_by_trust_ratio of 'w' had exact=True, here exact=False"):
        halfstep_jax.load_state(path, params, halfstep_jax.lamb(1e-2))
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    for exact in (False, True):
        optimizer = halfstep_torch.Lamb(model.named_parameters(), 1e-2, exact=exact, compile=False)
        before = everything(model, optimizer)
        if exact:
            halfstep_torch.load_state(path, model, optimizer)
            assert torch.equal(model.w.float(), torch.arange(6.0).reshape(2, 3))
            continue
        with pytest.raises(ValueError, match="had exact=True, here exact=False"):
            halfstep_torch.load_state(path, model, optimizer)
        assert before[1] == everything(model, optimizer)[1]
        assert not model.w.any()


def test_other_weights_are_refused_by_both(file):
    for params in ({"w": weights()["w"]}, weights() | {"c": jnp.ones(1)}):
        with pytest.raises(ValueError, match=r"the file (has|lacks) the weights"):
            halfstep_jax.load_state(file, params, transform())
    with pytest.raises(
        ValueError, match=r"lacks the .* 'model/w', and has the .* 'w': renamed or wrapped since"
    ):
        halfstep_jax.load_state(file, {"model": weights()}, transform())
    with pytest.raises(ValueError, match=r"'params/w' is BF16\[2, 3\] in the file, BF16\[3, 2\]"):
        halfstep_jax.load_state(file, weights() | {"w": jnp.ones((3, 2), jnp.bfloat16)}, transform())
    model, optimizer = torch_run()
    model.c = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="lacks the weights 'c'"):
        halfstep_torch.load_state(file, model, optimizer)


def test_state_of_another_transform_is_kept_in_jax_and_refused_in_torch(tmp_path):
    path, params = tmp_path / "run", weights()
    tx = optax.chain(optax.scale_by_schedule(lambda count: 1.0), transform())
    state = tx.init(params)
    _, state = jax.jit(tx.update)(params, state, params)
    halfstep_jax.save_state(path, params, state, tx)
    _, found = halfstep_jax.load_state(path, params, tx)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, state))
    model, optimizer = torch_run()
    with pytest.raises(ValueError, match=r"has the arrays 'optax/0/count'.*save the inner one"):
        halfstep_torch.load_state(path, model, optimizer)


def test_what_a_transform_of_jax_alone_wraps_goes_to_torch(tmp_path):
    path, params, inner = tmp_path / "run", weights(), transform()
    tx = halfstep_jax.skip_nonfinite(inner)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    halfstep_jax.save_state(path, params, state.inner_state, inner)
    model, optimizer = torch_run()
    halfstep_torch.load_state(path, model, optimizer)
    assert [int(one["step"]) for one in optimizer.state.values()] == [1, 1]
    halfstep_torch.save_state(path, model, optimizer)
    _, found = halfstep_jax.load_state(path, params, inner)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, state.inner_state))


def test_parameters_at_different_steps_move_in_torch_alone(file, tmp_path):
    model, optimizer = torch_run()
    halfstep_torch.load_state(file, model, optimizer)
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    halfstep_torch.save_state(tmp_path / "run", model, optimizer)
    with pytest.raises(ValueError, match="count=3 at 'w' and 2 at another weight"):
        halfstep_jax.load_state(tmp_path / "run", weights(), transform())
    again, other = torch_run()
    halfstep_torch.load_state(tmp_path / "run", again, other)
    assert [int(one["step"]) for one in other.state.values()] == [3, 2]


def test_a_state_that_is_not_of_the_transform_is_refused(tmp_path):
    params = weights()
    with pytest.raises(ValueError, match="has nu_ufloat16_e7m9, and this transform keeps no codes"):
        halfstep_jax.save_state(tmp_path / "run", params, transform().init(params), optax.sgd(1.0))
    with pytest.raises(ValueError, match="another structure"):
        halfstep_jax.save_state(tmp_path / "run", params, optax.adam(1.0).init(params), optax.sgd(1.0))
    state = transform(nu_dtype="bfloat16").init(params)
    with pytest.raises(ValueError, match="nu/b is bfloat16"):
        halfstep_jax.save_state(tmp_path / "run", params, state, transform(nu_dtype="float32"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_parts_of_a_jax_run_are_groups_in_torch(tmp_path):
    """Each with its own formats, weight storage and seed."""
    params, path = weights() | {"b": jnp.ones(4, jnp.bfloat16)}, tmp_path / "run"
    parts = {"x": transform(seed=1), "y": transform(seed=2, nu_dtype="bfloat16", param_storage="split16")}
    tx = optax.partition(parts, {"w": "x", "b": "y"})
    update, state = jax.jit(tx.update), tx.init(params)
    for _ in range(2):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
        halfstep_jax.save_state(path, params, state, tx)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    model.b = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    groups = [
        {"params": [("w", model.w)], "nu_dtype": "ufloat16_e7m9"},
        {"params": [("b", model.b)], "nu_dtype": "bfloat16", "param_storage": "split16"},
    ]
    optimizer = halfstep_torch.AdamW(groups, 1e-2, weight_decay=1e-4, compile=False)
    halfstep_torch.load_state(path, model, optimizer)
    step_by_ones(optimizer)
    halfstep_torch.save_state(path, model, optimizer)
    updates, state = update(jax.tree.map(jnp.ones_like, params), state, params)
    params = optax.apply_updates(params, updates)
    found = halfstep_jax.load_state(path, params, tx)
    for mine, theirs in zip(jax.tree.leaves((params, state)), jax.tree.leaves(found), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_links_at_different_counts_are_read_in_jax_and_refused_in_torch(tmp_path):
    """As in a chain that was put together of two runs; in torch a parameter has one step."""
    path, params, tx = tmp_path / "run", weights(), transform()
    state = tx.init(params)
    state = (*state[:-1], state[-1]._replace(count=jnp.int32(5)))
    halfstep_jax.save_state(path, params, state, tx)
    _, found = halfstep_jax.load_state(path, params, tx)
    assert (int(found[0].count), int(found[-1].count)) == (0, 5)
    model, optimizer = torch_run()
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=r"the links of 'w' have different counts, \[0, 5\]"):
        halfstep_torch.load_state(path, model, optimizer)
    after = everything(model, optimizer)
    assert before[1] == after[1]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


def rewritten(path, change):
    """Let a function change the header of a file in place."""
    header, arrays = state_file.read_state_file("test", path)
    arrays = {name: array._replace(data=np.array(array.data)) for name, array in arrays.items()}
    change(header)
    state_file.write_state_file(path, header, arrays)
    return path


def test_counts_that_one_state_would_share_and_are_two_are_refused(tmp_path):
    """`store_state` has one count for all the links that it wraps."""
    params = {"w": weights()["w"]}
    tx = halfstep_jax.store_state(
        optax.chain(halfstep_jax.trace(0.9), halfstep_jax.scale_by_lion()), "bfloat16"
    )
    path = tmp_path / "run"
    halfstep_jax.save_state(path, params, tx.init(params), tx)

    def move_on(header):
        (recipe,) = header["recipes"]
        next(link for link in recipe if link["name"].startswith("store_state"))["count"] = 7

    with pytest.raises(ValueError, match=r"the file has counts \[7, 0\] where one state holds one"):
        halfstep_jax.load_state(rewritten(path, move_on), params, tx)


def test_a_file_that_keeps_less_of_a_weight_than_its_links_say_is_refused_by_both(file, tmp_path):
    path = tmp_path / "run"
    path.write_bytes(file.read_bytes())

    def forget(header):
        for recipe in header["recipes"]:
            del recipe[0]["arrays"]["nu"]

    rewritten(path, forget)
    model, optimizer = torch_run()
    for load in (
        lambda: halfstep_jax.load_state(path, weights(), transform()),
        lambda: halfstep_torch.load_state(path, model, optimizer),
    ):
        with pytest.raises(ValueError, match=r"scale_by_adam of '[bw]' kept mu, here mu, nu"):
            load()


def test_two_seeds_in_one_param_group_are_refused_in_torch(tmp_path):
    params = {"w": weights()["w"], "b": jnp.ones(4, jnp.bfloat16)}
    parts = {"x": transform(seed=1), "y": transform(seed=2)}
    tx, path = optax.partition(parts, {"w": "x", "b": "y"}), tmp_path / "run"
    halfstep_jax.save_state(path, params, tx.init(params), tx)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    model.b = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    options = {"weight_decay": 1e-4, "nu_dtype": "ufloat16_e7m9", "compile": False}
    optimizer = halfstep_torch.AdamW(model.named_parameters(), 1e-2, **options)
    with pytest.raises(
        ValueError, match=r"has the seed \[2\] at 'b' and \[1\] at another weight of the group"
    ):
        halfstep_torch.load_state(path, model, optimizer)
    assert not model.w.any()


def test_what_torch_cannot_put_into_a_file_is_refused(tmp_path):
    model, optimizer = torch_run()
    path, save = tmp_path / "run", halfstep_torch.save_state
    with pytest.raises(TypeError, match=r"optimizer is AdamW\. Pass a halfstep_torch optimizer"):
        save(path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="the optimizer's parameter 'b' is not one of the model"):
        save(path, torch.nn.ParameterDict({"w": model.w}), optimizer)
    with pytest.raises(ValueError, match="two parameters have the name 'b'"):
        save(path, model, halfstep_torch.AdamW([("b", model.w)]))
    model.c = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(TypeError, match="'c' is complex64, which a file does not hold"):
        save(path, model, optimizer)
    assert not path.exists()


def test_what_jax_cannot_put_into_a_file_is_refused(tmp_path):
    path, params = tmp_path / "run", weights()
    tx = optax.GradientTransformation(lambda _: jnp.ones(2, jnp.complex64), lambda u, s, p=None: (u, s))
    with pytest.raises(TypeError, match="is complex64, which a file does not hold"):
        halfstep_jax.save_state(path, params, tx.init(params), tx)
    twins = {"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}
    with pytest.raises(ValueError, match="two weights have the name 'a/b'"):
        halfstep_jax.save_state(path, twins, (), optax.identity())
    assert not path.exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: halfstep_jax.store_state(optax.yogi(1e-3), halfstep_jax.scaled("float8_e4m3fn")),
        lambda: optax.chain(halfstep_jax.adamw(1e-3), optax.add_noise(0.1, 0.1, jax.random.key(3))),
        lambda: optax.chain(optax.sgd(1e-3), optax.add_noise(0.1, 0.1, jax.random.key(3, impl="rbg"))),
    ],
    ids=["e4m3fn", "key", "rbg"],
)
def test_a_file_holds_8_bit_floats_and_random_keys(make, tmp_path):
    params, tx = {"w": jnp.full((64, 128), 0.5, jnp.bfloat16)}, make()
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    halfstep_jax.save_state(tmp_path / "run", params, state, tx)
    _, loaded = halfstep_jax.load_state(tmp_path / "run", params, tx)
    for kept, again in zip(jax.tree.leaves(state), jax.tree.leaves(loaded), strict=True):
        assert kept.dtype == again.dtype
        is_key = jnp.issubdtype(kept.dtype, jax.dtypes.prng_key)
        rows = [np.asarray(jax.random.key_data(x) if is_key else x) for x in (kept, again)]
        assert rows[0].tobytes() == rows[1].tobytes()


def test_weights_that_a_wrapper_renames_are_refused(tmp_path):
    params, tx = {"w": jnp.ones(3, jnp.bfloat16)}, optax.flatten(halfstep_jax.adamw(1e-3))
    with pytest.raises(
        ValueError, match=r"scale_by_adam steps '', which is no weight of these params: a wrapper"
    ):
        halfstep_jax.save_state(tmp_path / "run", params, tx.init(params), tx)


def test_a_weight_that_cannot_be_written_is_refused_and_nothing_changes(tmp_path):
    model, optimizer = torch_run()
    halfstep_torch.save_state(tmp_path / "run", model, optimizer)
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    model.frozen = torch.nn.Parameter(torch.zeros(1).expand(4), requires_grad=False)
    halfstep_torch.save_state(tmp_path / "frozen", model, optimizer)
    optimizer.step()
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=r"load_state: the weight 'frozen' is an expanded tensor.*Clone it"):
        halfstep_torch.load_state(tmp_path / "frozen", model, optimizer)
    after = everything(model, optimizer)
    assert all(map(torch.equal, before[0], after[0]))
    assert before[1] == after[1]
