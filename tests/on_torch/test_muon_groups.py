"""Param groups of Muon: they are the user's, and each holds matrices and what AdamW steps."""

import copy
import functools
import pickle

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import (
    assert_same_snapshots,
    by_muon,
    parameters,
    run,
    snapshot,
    step_by_ones,
    through_a_file,
)

SHAPES = {"body.w": (6, 5), "body.b": (5,), "top.w": (5, 4), "top.b": (4,)}
RATES = {"lr": 0.5, "adam_lr": 0.125}  # whose ratio and products are exact
make = functools.partial(hs.Muon, compile=False, **RATES)


def named() -> list[tuple[str, torch.nn.Parameter]]:
    return parameters(shapes=SHAPES)


def body_and_top(pairs, **of_top) -> list[dict]:
    """Return a group for each layer, as libraries build them that freeze layers or give each a rate."""
    return [{"params": pairs[:2]}, {"params": pairs[2:], **of_top}]


def split(groups) -> list[dict]:
    """Return groups that each have matrices alone, or none, which is the split that Muon makes in a group."""
    parts = [
        {
            **group,
            "params": [x for x in group["params"] if (x[1].dim() == 2) == use_muon],
            "use_muon": use_muon,
        }
        for group in groups
        for use_muon in (True, False)
    ]
    for part in parts:
        if "lr" in part and not part["use_muon"]:
            part["lr"] *= RATES["adam_lr"] / RATES["lr"]
    return parts


def test_groups_and_their_places_are_the_users():
    pairs = named()
    optimizer = make(body_and_top(pairs, lr=0.25))
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["body.w", "body.b"],
        ["top.w", "top.b"],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert by_muon(optimizer) == {"body.w": True, "body.b": False, "top.w": True, "top.b": False}
    for p in optimizer.param_groups[0]["params"]:  # as fastai freezes a body
        p.requires_grad_(False)
    before = [p.detach().clone() for _, p in pairs]
    torch.cat([p.flatten() for _, p in pairs]).sum().backward()
    optimizer.step()
    moved = [not torch.equal(p, x) for (_, p), x in zip(pairs, before, strict=True)]
    assert moved == [False, False, True, True]


SCHEDULERS = {
    "none": None,
    "exponential": functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "from 0": functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda count: count / 4),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    "options", [{}, {"param_storage": "split16"}, {"normalize": "rows", "nesterov": False}]
)
def test_a_group_of_both_kinds_has_the_bits_of_two_groups(scheduler, options):
    """The rates of both follow a scheduler; so do own rates, decays and formats of a group."""
    of_top = {"lr": 0.25, "weight_decay": 0.0, "betas": (0.5, 0.75), "mu_rounding": "stochastic"}
    ends = []
    for groups_of in (lambda groups: groups, split):
        pairs = named()
        optimizer = make(groups_of(body_and_top(pairs, **of_top)), adam_mu_rounding="stochastic", **options)
        follow = SCHEDULERS[scheduler] and SCHEDULERS[scheduler](optimizer)
        for step in range(3):
            run(pairs, optimizer, [step])
            if follow:
                follow.step()
        ends.append([x for _, p in pairs for x in (p.detach(), *optimizer.state[p].values())])
    assert all(map(torch.equal, *ends))


def test_a_decay_of_a_group_is_for_both_unless_it_has_two():
    groups = body_and_top(named(), weight_decay=0.5)
    last = {
        "params": [("c", torch.nn.Parameter(torch.ones(3)))],
        "weight_decay": 0.5,
        "adam_weight_decay": 0.25,
    }
    optimizer = make([*groups, last], weight_decay=0.125, adam_weight_decay=0.0625)
    decays = [
        [h.weight_decay for _, h in links if hasattr(h, "weight_decay")] for links in optimizer.bound_links()
    ]
    assert decays == [[0.125, 0.0625], [0.5, 0.5], [0.5, 0.25]]


def rates_at(optimizer, count: int) -> list[list[float]]:
    """Return of each group the rates of matrices and of the rest in the step after some steps."""
    links = optimizer.bound_links()
    numbers = [[link.step_numbers(h, count + 1) for link, h in of_group] for of_group in links]
    return [[abs(n.learning_rate) for n in of_group if hasattr(n, "learning_rate")] for of_group in numbers]


def halved(count: int) -> float:
    return 0.5**count


def slow(count: int) -> float:
    return 0.25 / (count + 1)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({"lr": halved}, [0.25, 0.25]),
        ({"lr": halved, "adam_lr": slow}, [0.25, 0.25 / 3]),
        ({"lr": halved, "adam_lr": 0.125}, [0.25, 0.125]),
        ({"lr": 0.5, "adam_lr": slow}, [0.5, 0.25 / 3]),
        ({"lr": 0.0, "adam_lr": 0.0}, [0.0, 0.0]),
    ],
)
def test_rates_that_are_functions_are_followed_each_by_its_own(rates, expected):
    optimizer = hs.Muon(named(), compile=False, **rates)
    assert rates_at(optimizer, 2) == [pytest.approx(expected)]
    run([], optimizer, [0])
    pickle.loads(pickle.dumps(optimizer))


def test_the_schedule_of_a_group_keeps_the_ratio():
    optimizer = make(body_and_top(named(), lr=halved))
    assert rates_at(optimizer, 3) == [[0.5, 0.125], [0.125, 0.03125]]
    optimizer = make(body_and_top(named(), lr=0.25, adam_lr=0.5))
    assert rates_at(optimizer, 0) == [[0.5, 0.125], [0.25, 0.5]]
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.param_groups[0]["adam_lr_ratio"] = 1.0
    assert rates_at(optimizer, 0) == [[0.5, 0.5], [0.5, 1.0]]


def test_saved_copied_and_pickled_runs_go_on_with_the_same_bits(tmp_path):
    def saved(optimizer, pairs):
        again = make(body_and_top(pairs))
        again.load_state_dict(through_a_file(optimizer.state_dict()))
        return again

    def to_file(optimizer, pairs):
        model, copied = torch.nn.Module(), torch.nn.Module()
        for m, of_m in ((model, body_and_top_pairs), (copied, pairs)):
            for name, p in of_m:
                m.register_parameter(name.replace(".", "_"), p)
        again = make(body_and_top(pairs))
        hs.save_state(tmp_path / "run.safetensors", model, optimizer)
        hs.load_state(tmp_path / "run.safetensors", copied, again)
        return again

    body_and_top_pairs = named()
    first = make(body_and_top(body_and_top_pairs))
    run(body_and_top_pairs, first, range(2))
    for again_of in (saved, to_file):
        pairs = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in body_and_top_pairs]
        again = again_of(first, pairs)
        ended = copy.deepcopy((first, body_and_top_pairs))
        run(ended[1], ended[0], range(2, 4))
        run(pairs, again, range(2, 4))
        assert_same_snapshots(snapshot(again), snapshot(ended[0]))
    again = pickle.loads(pickle.dumps(first))
    pairs = [
        (name, p) for g in again.param_groups for name, p in zip(g["param_names"], g["params"], strict=True)
    ]
    run(pairs, again, range(2, 4))
    assert_same_snapshots(snapshot(again), snapshot(ended[0]))
    again.add_param_group({"params": [("new.w", torch.nn.Parameter(torch.ones(3, 3)))]})
    assert by_muon(again)["new.w"]


@pytest.mark.parametrize("way", ["add_param_group", "param_groups"])
def test_parameters_of_later_groups_are_split_too(way):
    """As Lightning's callbacks add layers that they unfreeze, or write the groups of a resumed run."""
    pairs = named()
    optimizer = make([{"params": pairs[2:]}], matrices={"top/*": None, "top/w": True})
    step_by_ones(optimizer)
    new = {"params": pairs[:2], "lr": 0.25}
    if way == "add_param_group":
        optimizer.add_param_group(new)
    else:
        first = dict(optimizer.param_groups[0])
        new = {**first, "params": [p for _, p in pairs[:2]], "param_names": ["body.w", "body.b"], "lr": 0.25}
        optimizer.param_groups = [first, new]
    step_by_ones(optimizer)
    assert by_muon(optimizer) == {"body.w": True, "body.b": False, "top.w": True, "top.b": False}
    assert rates_at(optimizer, 0) == [[0.5, 0.125], [0.25, 0.0625]]


def test_parameters_that_move_between_groups_are_stepped_as_before():
    pairs = named()
    optimizer = make(body_and_top(pairs))
    step_by_ones(optimizer)
    before = by_muon(optimizer)
    body, top = optimizer.param_groups
    for group, moved in ((body, [p for _, p in pairs[1:3]]), (top, [pairs[0][1], pairs[3][1]])):
        group["params"] = moved
    step_by_ones(optimizer)
    assert dict(sorted(by_muon(optimizer).items())) == dict(sorted(before.items()))
    assert {int(optimizer.state[p]["step"]) for _, p in pairs} == {2}


def test_groups_of_one_kind_may_say_so_and_have_the_entries_of_adamw():
    """As in torch.optim and in Jordan's code: then names are not needed, and `lr` is AdamW's."""
    w, b = (torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,)))
    rest = {"params": [b], "use_muon": False, "eps": 1e-3, "weight_decay": 0.0, "mu_dtype": "float32"}
    optimizer = make([{"params": [w], "use_muon": True}, rest], names=())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.125]
    assert optimizer.param_groups[1]["adam_eps"] == 1e-3
    assert rates_at(optimizer, 0)[1][1] == 0.125
    step_by_ones(optimizer)
    # The first step of Adam is lr g / (|g| + eps).
    torch.testing.assert_close(b.detach(), torch.full((4,), 1 - 0.125 / 1.001))


BAD = [
    (
        {"lr": 0.0, "adam_lr": 1e-3},
        {},
        r"adam_lr=0.001 beside lr=0 has no ratio to it.*Give lr the largest rate",
    ),
    ({"adam_lr": -1.0}, {}, r"adam_lr=-1.0 "),
    ({"adam_weight_decay": -1.0}, {}, r"adam_weight_decay=-1.0 "),
    ({"adam_eps": -1.0}, {}, r"adam_eps=-1.0 "),
    ({}, {"adam_lr_ratio": -1.0}, r"adam_lr_ratio=-1.0 .*Use adam_lr / lr"),
    ({}, {"eps": 1e-3}, r"eps=0.001 in a param group; it is the same for all groups"),
]


@pytest.mark.parametrize(("arguments", "entries", "message"), BAD)
def test_wrong_values_are_named_as_they_were_given(arguments, entries, message):
    with pytest.raises(ValueError, match=rf"^Muon: {message}"):
        make(**{"params": [{"params": named(), **entries}], **RATES, **arguments})


def test_a_rate_that_nothing_reads_is_refused():
    optimizer = make(named())
    optimizer.param_groups[0]["adam_lr"] = 1e-3
    with pytest.raises(ValueError, match=r"adam_lr=0.001 .* is unknown. Did you mean adam_lr_ratio\?"):
        step_by_ones(optimizer)
