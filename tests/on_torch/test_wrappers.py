"""Wrappers that keep float32 weights, in a chain: what stands before, inside and behind them."""

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot


def run(tx, steps=5, **options):
    p = torch.nn.Parameter(torch.linspace(0.1, 1.0, 64).to(torch.bfloat16).view(8, 8))
    optimizer = hs.Optimizer([("w", p)], tx, compile=False, **options)
    for t in range(steps):
        p.grad = torch.sin(torch.arange(64.0) + t).view(8, 8).to(torch.bfloat16)
        optimizer.step()
    return optimizer


def links(lr=1e-3):
    return [
        hs.scale_by_adam(mu_dtype="bfloat16", nu_dtype="bfloat16", seed=3),
        hs.add_decayed_weights(0.1),
        hs.scale_by_learning_rate(lr),
    ]


def test_a_wrapper_in_a_chain_is_the_wrapper_alone():
    alone, inside = hs.split_params(hs.chain(*links()), 8, seed=3), hs.keep_master_params(hs.chain(*links()))
    assert_same_snapshots(snapshot(run(alone)), snapshot(run(hs.chain(alone))))
    assert_same_snapshots(snapshot(run(inside)), snapshot(run(hs.chain(hs.chain(inside)))))


def test_links_before_a_wrapper_see_the_model_and_links_inside_the_whole_weights():
    adam, decay, rate = links()
    # Absolute decay of a weight by itself: the update shows which weight was seen.
    outside = run(hs.chain(hs.add_decayed_weights(1.0), hs.keep_master_params(rate)))
    inside = run(hs.keep_master_params(hs.chain(hs.add_decayed_weights(1.0), rate)))
    assert not torch.equal(hs.float32_params(outside)["w"], hs.float32_params(inside)["w"])
    del adam, decay


def test_an_inner_link_that_rounds_weights_sees_float32_and_passes_through():
    plain = run(hs.keep_master_params(hs.chain(*links())))
    rounding = run(hs.keep_master_params(hs.chain(*links(), hs.round_stochastically(1))))
    nested = run(hs.keep_master_params(hs.split_params(hs.chain(*links()))))
    assert_same_snapshots(snapshot(plain), snapshot(rounding))
    assert_same_snapshots(snapshot(plain), snapshot(nested))


def test_schedules_masks_and_group_entries_work_inside_a_wrapper():
    tx = hs.split_params(
        hs.chain(
            hs.scale_by_adam(),
            hs.add_decayed_weights(0.1, mask=lambda name, param: name != "w"),
            hs.scale_by_learning_rate(lambda t: 1e-3 * (t + 1)),
        )
    )
    masked, without = (
        run(tx),
        run(
            hs.split_params(hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(lambda t: 1e-3 * (t + 1))))
        ),
    )
    assert masked.param_groups[0]["betas"] == (0.9, 0.999)
    assert_same_snapshots(snapshot(masked), snapshot(without))


def test_moments_inside_a_wrapper_are_float32_by_default():
    optimizer = run(hs.split_params(hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3))))
    (p,) = optimizer.param_groups[0]["params"]
    assert optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_nothing_stands_after_a_link_that_stores_weights():
    wrapper = hs.split_params(hs.chain(*links()))
    for tx in (wrapper, hs.compensate()):
        with pytest.raises(ValueError, match=r"applies updates to the weights\. Make it the last"):
            hs.chain(tx, hs.scale_by_learning_rate(1.0) if tx is not wrapper else hs.round_stochastically())


@pytest.mark.parametrize("bits", [4, 0, True, 32, "8"])
def test_extra_bits_are_8_or_16(bits):
    with pytest.raises(ValueError, match=r"is not 8 or 16\. Use 16 for all of float32, 8 for 24 bits"):
        hs.split_params(hs.scale_by_learning_rate(1.0), bits)


class Accelerated(torch.optim.Optimizer):
    """As accelerate's AcceleratedOptimizer: a torch optimizer that holds the one of the user."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def test_tools_take_the_optimizer_of_a_trainer(tmp_path):
    model = torch.nn.Linear(8, 4).bfloat16()
    ours = hs.AdamW(model.named_parameters(), param_storage="split16", compile=False)
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    ours.step()
    theirs = Accelerated(Accelerated(ours))
    assert str(hs.describe(theirs)) == str(hs.describe(ours))
    assert hs.memory_report(model, theirs) == hs.memory_report(model, ours)
    assert hs.diagnose(model, theirs).updates_lost == 0
    weights = hs.float32_params(theirs)
    hs.set_float32_params(theirs, weights)
    hs.save_state(tmp_path / "a", model, theirs)
    hs.load_state(tmp_path / "a", model, theirs)
    hs.load_float32_state_dict(theirs, hs.float32_state_dict(theirs))
    assert all(torch.equal(w, weights[name]) for name, w in hs.float32_params(ours).items())
    with pytest.raises(TypeError, match=r"describe: optimizer is SGD\. Pass a halfstep_torch optimizer"):
        hs.describe(Accelerated(torch.optim.SGD(model.parameters())))
    codes = hs.AdamW(model.float().named_parameters(), param_storage="int8", compile=False)
    assert sorted(hs.stored_params(Accelerated(codes))) == ["bias", "weight"]
    schedule_free = hs.AdamWScheduleFree(model.named_parameters())
    assert len(hs.schedule_free_eval_params(Accelerated(schedule_free))) == 2
    model.zero_grad()
    handle = hs.release_gradients(Accelerated(schedule_free))
    assert schedule_free.release is handle
    handle.remove()
