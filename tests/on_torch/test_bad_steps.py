"""Steps, states and groups that cannot be: refused by name, before any weight changes."""

import copy
import re

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot, step_by_ones


def parameter(dtype=torch.bfloat16, shape=(4,)):
    return torch.nn.Parameter(torch.ones(shape, dtype=dtype))


def set_grad(index, grad, dtype=None):
    def change(optimizer, params):
        params[index].grad = None
        if dtype is not None:
            params[index].grad_dtype = dtype
        params[index].grad = grad

    return change


def set_entry(name, value):
    return lambda optimizer, params: optimizer.param_groups[0].update({name: value})


def resize(optimizer, params):
    params[1].data = torch.ones(5, dtype=torch.bfloat16)
    params[1].grad = torch.ones(5, dtype=torch.bfloat16)


def reshape_alone(optimizer, params):
    params[1].data = torch.ones(5, dtype=torch.bfloat16)


def cast(optimizer, params):
    for param in params:
        param.data, param.grad = param.data.float(), param.grad.float()


# what is done before a step, kind of error, its message
STEPS = [
    (set_grad(1, torch.ones(4, dtype=torch.bfloat16).to_sparse()), TypeError,
     "AdamW: the gradient of 'b' is sparse; gradients are dense. Use sparse=False in the layer."),
    (set_grad(1, torch.ones(4, dtype=torch.float64), torch.float64), TypeError,
     "AdamW: the gradient of 'b' is float64; gradients are float32, bfloat16 or float16. Cast it."),
    (reshape_alone, ValueError,
     "AdamW: the gradient of 'b' has shape (4,) on cpu, its weight (5,) on cpu. Run backward again."),
    (resize, ValueError,
     "AdamW: exp_avg of 'b' has shape (4,) on cpu, its weight (5,) on cpu. "
     "Make the optimizer once the model has its shape and device."),
    (set_entry("nu_dtype", "float32"), ValueError,
     "AdamW: exp_avg_sq of 'a' is stored in bfloat16, its group says float32 for a bfloat16 weight. "
     "Cast the model, and set formats, before the first step."),
    (cast, ValueError,
     "AdamW: exp_avg of 'a' is stored in bfloat16, its group says float32 for a float32 weight. "
     "Cast the model, and set formats, before the first step."),
    (set_entry("lr", -1.0), ValueError,
     "AdamW: lr=-1.0 is negative. Use a number >= 0, or maximize=True to ascend."),
    (set_entry("lr", None), TypeError, "AdamW: lr=None is not a number. Use a float."),
    (set_entry("betas", (0.9, 1.0)), ValueError,
     "AdamW: betas[1]=1.0 is outside [0, 1). Use a decay rate such as 0.999."),
    (set_entry("eps", float("nan")), ValueError, "AdamW: eps=nan is not a number. Use a number >= 0."),
]  # fmt: skip


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("change", "kind", "message"), STEPS, ids=[message[:60] for _, _, message in STEPS])
def test_a_step_that_cannot_be_done_for_all_is_done_for_none(change, kind, message, compile):
    params = [parameter() for _ in range(3)]
    optimizer = hs.AdamW(list(zip("abc", params, strict=True)), lr=0.1, compile=compile)
    step_by_ones(optimizer)
    change(optimizer, params)
    before, groups = snapshot(optimizer), entries(optimizer)
    with pytest.raises(kind) as error:
        optimizer.step()
    assert str(error.value) == message
    assert_same_snapshots(before, snapshot(optimizer))
    assert entries(optimizer) == groups


def entries(optimizer) -> str:
    """Return the entries of the param groups, as a text."""
    return str([{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups])


SPARSE = torch.ones(4, dtype=torch.bfloat16).to_sparse()


@pytest.mark.parametrize(("moment", "what"), [(SPARSE, "sparse"), ([0.0] * 4, "a list")])
def test_a_moment_that_is_no_dense_tensor_is_refused_before_any_weight_moves(moment, what):
    p, q = parameter(), parameter()
    optimizer = hs.AdamW([("a", p), ("b", q)], lr=0.1)
    step_by_ones(optimizer)
    before = p.detach().clone()
    optimizer.state[q]["exp_avg"] = moment
    with pytest.raises(TypeError) as error:
        optimizer.step()
    assert str(error.value) == (
        f"AdamW: exp_avg of 'b' is {what}. State arrays are plain dense tensors: "
        "load them by load_state_dict."
    )
    assert torch.equal(p, before)


def test_a_schedule_that_turns_negative_stops_the_step():
    p = parameter()
    optimizer = hs.AdamW([("w", p)], lr=lambda count: 0.1 - count)
    step_by_ones(optimizer)
    before = snapshot(optimizer)
    with pytest.raises(
        ValueError, match=r"^AdamW: lr\(1\)=-0.9 is negative. Use a schedule of numbers >= 0.$"
    ):
        optimizer.step()
    assert_same_snapshots(before, snapshot(optimizer))


def test_a_closure_that_is_no_function_is_refused():
    with pytest.raises(TypeError) as error:
        hs.AdamW([parameter()]).step(True)
    assert str(error.value) == "AdamW: closure=True is not a function. Use step(), or step(zero_grad=True)."


def test_a_parameter_that_stands_twice_is_refused():
    p = parameter()
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(
            ValueError, match=r"^AdamW: a parameter appears twice in param group 0. Pass it once.$"
        ),
    ):
        hs.AdamW([("a", p), ("b", p)])


def test_a_sharded_tensor_is_refused_by_its_name():
    p = torch.ones(3).as_subclass(Wrapper).requires_grad_()
    with pytest.raises(TypeError, match=r"^AdamW: the weight 'w' is a Wrapper. Pass plain dense tensors.$"):
        hs.AdamW([("w", p)])


class Wrapper(torch.Tensor):
    """A tensor whose memory is elsewhere, as DTensor's is."""

    def __tensor_flatten__(self):
        raise NotImplementedError


@pytest.mark.parametrize("what", ["weight", "gradient of"])
def test_a_tensor_subclass_that_arrives_later_is_refused_before_any_weight_moves(what):
    p, q = parameter(), parameter()
    optimizer = hs.AdamW([("p", p), ("q", q)])
    p.grad = torch.ones_like(p)
    if what == "weight":
        q = torch.ones(4, dtype=torch.bfloat16).as_subclass(Wrapper).requires_grad_()
        optimizer.param_groups[0]["params"][1] = q
        q.grad = torch.ones(4, dtype=torch.bfloat16)
    else:
        q.grad = torch.ones(4, dtype=torch.bfloat16).as_subclass(Wrapper)
    with pytest.raises(TypeError) as error:
        optimizer.step()
    assert str(error.value) == f"AdamW: the {what} 'q' is a Wrapper. Pass plain dense tensors."
    assert (p == 1).all()


def test_a_tensor_subclass_in_a_state_dict_is_refused():
    p = parameter()
    optimizer = hs.AdamW([("p", p)])
    step_by_ones(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].as_subclass(Wrapper)
    with pytest.raises(TypeError, match=r"^load_state_dict: exp_avg of 'p' is a Wrapper\. Pass plain dense"):
        optimizer.load_state_dict(saved)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.as_subclass(Wrapper), TypeError, "exp_avg of 'p' is a Wrapper. State arrays are plain"),
        (lambda x: x.to_sparse(), TypeError, "exp_avg of 'p' is sparse. State arrays are plain"),
        (lambda x: x.tolist(), TypeError, "exp_avg of 'p' is a list. State arrays are plain"),
        (lambda x: x.T.contiguous().T, ValueError, "exp_avg of 'p' is not row-major, as state is"),
    ],
    ids=["subclass", "sparse", "list", "transposed"],
)
def test_a_state_array_that_was_put_there_by_hand_is_refused_unless_it_is_as_ours(
    change, error, message, compile
):
    p = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("p", p)], compile=compile)
    step_by_ones(optimizer)
    before = p.detach().clone()
    optimizer.state[p]["exp_avg"] = change(optimizer.state[p]["exp_avg"])
    with pytest.raises(error, match=f"AdamW: {message}"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize(("first", "second"), [("a.w", "a.w"), ("a.b", "a/b"), ("module.x", "module.x")])
def test_two_parameters_of_one_name_are_refused(first, second):
    leaf = second.removeprefix("module.").replace(".", "/")
    with pytest.raises(ValueError, match="names decide the random words") as error:
        hs.AdamW([(first, parameter()), (second, parameter())])
    assert f"the parameters {first!r} and {second!r} have the same name, {leaf!r}" in str(error.value)
    groups = [{"params": [(name, parameter())]} for name in (first, second)]
    with pytest.raises(ValueError, match="names decide the random words"):
        hs.AdamW(groups)


@pytest.mark.parametrize(
    ("entry", "way_out"),
    [
        ("weight_deacy", "Did you mean weight_decay?"),
        ("param_storages", "Did you mean param_storage?"),
        ("momentum", "Its entries are betas, eps, eps_root, lr, maximize, mu_dtype, mu_rounding, nu_dtype, "),
        ("accumulator_dtype", "Did you mean mu_dtype?"),
    ],
)
def test_an_entry_that_nothing_reads_is_refused(entry, way_out):
    with pytest.raises(ValueError, match="is unknown") as error:
        hs.AdamW([{"params": [parameter()], entry: 0.5}])
    assert str(error.value).startswith(f"AdamW: {entry}=0.5 in a param group is unknown. {way_out}")


def test_two_parameters_over_one_memory_are_refused():
    memory = torch.ones(12, dtype=torch.bfloat16)
    whole, part = torch.nn.Parameter(memory), torch.nn.Parameter(memory[4:8])
    with pytest.raises(ValueError, match=r"^AdamW: the weights 'whole' and 'part' share memory"):
        hs.AdamW([("whole", whole), ("part", part)])
    halves = [torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[6:])]
    columns = [torch.nn.Parameter(memory.view(6, 2)[:, k]) for k in range(2)]
    for pair in (halves, columns):
        hs.AdamW(pair)


def test_a_lazy_parameter_is_refused_before_its_first_forward():
    model = torch.nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"^AdamW: the weight 'weight' has no shape yet. Run the model once"):
        hs.AdamW(model.named_parameters())


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [float("inf"), 1e39])
def test_a_number_that_is_infinite_in_float32_is_refused(name, value):
    with pytest.raises(ValueError, match=re.escape(f"AdamW: {name}={value} is infinite in float32.")):
        hs.AdamW([parameter()], **{name: value})


def test_a_model_that_became_float32_is_refused_where_bits_are_kept_beside_it():
    model = torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    optimizer = hs.AdamW(model.named_parameters(), param_storage="split16")
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    model.float()
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(
        ValueError, match=r"^AdamW: the state of 'weight' holds extra_bits, which belongs to 16-bit weights"
    ):
        optimizer.step()


def test_sgd_takes_its_arguments_in_the_order_of_torch():
    theirs = torch.optim.SGD([parameter()], 0.1, 0.9, 0, 5e-4, True).param_groups[0]
    ours = hs.SGD([parameter()], 0.1, 0.9, 0, 5e-4, True).param_groups[0]
    assert all(ours[name] == theirs[name] for name in ("lr", "momentum", "weight_decay"))
    with pytest.raises(ValueError, match=r"^SGD: dampening=0\.5 is not supported\. Use dampening=0\.$"):
        hs.SGD([parameter()], 0.1, 0.9, 0.5)
    with pytest.raises(TypeError, match=r"^SGD: nesterov=0\.0005 is not a bool\. Use True or False\.$"):
        hs.SGD([parameter()], 0.1, 0.9, 0, 0, 5e-4)


def test_strided_weights_that_share_elements_are_refused_and_interleaved_ones_are_not():
    columns = torch.ones(4, 6)
    views = [torch.nn.Parameter(columns[:, i:j]) for i, j in ((0, 4), (2, 6), (0, 2))]
    hs.AdamW([("b", views[1]), ("c", views[2])])
    hs.AdamW([("even", torch.nn.Parameter(columns[:, ::2])), ("odd", torch.nn.Parameter(columns[:, 1::2]))])
    dense = torch.nn.Parameter(columns[1])
    for a, b in ((views[0], views[1]), (views[1], views[0]), (views[0], dense)):
        with pytest.raises(ValueError, match=r"^AdamW: the weights '.' and '.' share memory"):
            hs.AdamW([("a", a), ("b", b)])
