"""Warnings about a step, each given once in a process."""

import gc
import itertools
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from halfstep.diagnosis import RANGES, Ends, at_ends, gradients_outside, worst_of
from halfstep.rule import Moment, declared
from halfstep.rules.fed_back import rate_that_rose
from halfstep.storage.formats import Format
from halfstep.storage.moment_formats import kept_wide
from halfstep_torch.distributed.replicas import check_counts, check_replicas
from halfstep_torch.distributed.shards import check_not_replaced
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import Owner
from halfstep_torch.leaves.names import parameters_by_leaf
from halfstep_torch.links.link import is_ours
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.say_once import Advice, say_once
from halfstep_torch.storage.ends import count_at_ends, count_outside
from halfstep_torch.weights.weight_rule import NearestWeights

# Counts, and multiples of a count, at which gradients are checked.
_LOOKED_AT, _EVERY = (1, 10), 100
# Counts at which second moments are checked, with a pass over them and a wait for the device.
_COUNTS = (100, 1_000, 10_000)
_NUMBERS = operator.attrgetter("numbers")
_KNOW_THE_RATE = (
    "Build the optimizer with the largest rate of the run as lr, write that rate into the param group as "
    "max_lr before the first step, or pass the scheduler to read_rates."
)


def warn_of_step(optimizer: Owner, batches: Sequence[Batch]) -> None:
    """Give the warnings of a step. The first step has most of them, and compares replicas."""
    if optimizer._compared is not None:
        for step in itertools.chain.from_iterable(map(_NUMBERS, batches)):
            if step % _EVERY == 0 or step in _LOOKED_AT:
                break
        else:
            return
    caller, groups = optimizer._name, optimizer.param_groups
    first = [batch for batch in batches if 1 in batch.numbers]
    nameless = sum(len(group["params"]) for group in groups if "param_names" not in group)
    if first:
        _warn_at_first_step(caller, first, nameless, optimizer.nameless_before or 0)
        _warn_of_missing_links(caller, first)
        _warn_of_wide_moments(caller, first)
    _warn_of_ranges(caller, batches)
    _warn_at_ends(caller, batches)
    slots = [slot for batch in batches for slot in batch.slots if slot.param is slot.owner]
    if optimizer._compared is None:
        seeds = [[link.seed for link in choices.chain.links] for choices in optimizer._choices]
        optimizer._compared = check_replicas(caller, slots, seeds)
    elif any(step % _EVERY == 0 for batch in batches for step in batch.numbers):
        check_counts(caller, optimizer._compared, slots)


def warn_of_nothing(optimizer: Owner, named: Sequence[tuple[int, str, Tensor]]) -> None:
    """Warn if no parameter has ever had a gradient."""
    caller = optimizer._name
    check_not_replaced(caller, {name: p for _, name, p in named}, parameters_by_leaf)
    optimizer._idle_steps += bool(named)
    if optimizer._idle_steps == 3:
        say_once(
            f"{caller}: no parameter had a gradient in 3 steps, so nothing moves. Build the optimizer "
            "with the parameters of the model that is trained, and call backward before step."
        )


def _warn_at_first_step(caller: str, batches: Iterable[Batch], nameless: int, before: int) -> None:
    """Warn about parameters at their first step.

    Args:
        caller: the name in messages.
        batches: the batches of these parameters.
        nameless: the number of parameters without a name.
        before: the number of optimizers without names built before with its seeds.
    """
    for batch in batches:
        if before and batch.plan.streams:
            say_once(
                f"{caller}: several optimizers without names have one seed. Each draws words of its own, by "
                "the order in which they were built: another order gives other bits. Pass names: "
                'model.named_parameters(), or pairs such as ("log_alpha", log_alpha) for tensors of no '
                f"module, or call halfstep_torch.register_names(model) before.{_frozen()}"
            )
        elif nameless > 1 and batch.plan.streams:
            say_once(
                f"{caller}: the parameters have no names, so their random words follow their order: results "
                "change if parameters are reordered or sharded differently. Pass "
                'model.named_parameters(), and pairs such as ("log_alpha", log_alpha) for tensors of no '
                f"module, or call halfstep_torch.register_names(model) before.{_frozen()}"
            )
        if batch.grad_dtype == torch.float16 and batch.group.scale is None:
            say_once(
                f"{caller}: gradients are float16 and the loss is not scaled: those under 3e-8 are "
                "lost, those over 65504 infinite. Use torch.amp.GradScaler: it steps this optimizer too."
            )


def _frozen() -> str:
    """Return an addition to warnings if the collector has frozen objects. Counting takes milliseconds."""
    return " Models from before gc.freeze() are not found." if gc.get_freeze_count() else ""


def _warn_of_missing_links(caller: str, batches: Iterable[Batch]) -> None:
    """Warn of a chain without a learning rate or a descent, with which weights stay or move uphill.

    Args:
        caller: the name in messages.
        batches: the batches of parameters at their first step.
    """
    for batch in batches:
        links = batch.group.choices.chain.links
        if not all(is_ours(link.rule) for link in links):
            continue
        nearest = isinstance(batch.plan.weights.rule, NearestWeights)
        if batch.plan.dtype.itemsize < 4 and nearest and "param_storage" not in batch.group.choices.options:
            say_once(
                f"{caller}: no link stores the {dtype_name(batch.plan.dtype)} weights: they are rounded to "
                "nearest, and updates below half a unit in their last place are lost. "
                "End the chain with round_stochastically()."
            )
        if not any("lr" in link.entries for link in links):
            say_once(
                f"{caller}: the chain has no scale_by_learning_rate, so weights move by the whole update, "
                "up the gradient. Put scale_by_learning_rate(1e-3) behind the update rule."
            )


def _warn_of_wide_moments(caller: str, batches: Iterable[Batch]) -> None:
    """Warn, at the first step of parameters, of moments that stay float32 because axes are missing."""
    shapes: dict[tuple[Moment, Format], list[tuple[int, ...]]] = {}
    for batch in batches:
        for j in batch.plan.rule_indices:
            link, h = batch.group.links[j], batch.group.values[j]
            for moment in declared(type(link.rule)).moments.values():
                fmt = getattr(h, moment.dtype, None)
                if isinstance(fmt, Format):
                    of_format = shapes.setdefault((moment, fmt), [])
                    of_format += [tuple(slot.param.shape) for slot in batch.slots]
    for (moment, fmt), of_format in shapes.items():
        if problem := kept_wide(caller, moment, fmt, of_format):
            say_once(problem)


def _warn_at_ends(caller: str, batches: Iterable[Batch]) -> None:
    """Warn, at a few steps of a run, of second moments with over 1 % at an end of their codes."""
    counted: dict[tuple[str, str], dict[str, Ends]] = {}
    for batch in batches:
        if not any(step in batch.numbers for step in _COUNTS):
            continue
        for (second, first), slot in itertools.product(batch.plan.second_moments, batch.slots):
            if (ends := count_at_ends(second, first, slot.state)) is not None:
                of_kind = counted.setdefault((second.key, second.format.dtype), {})
                low, high = map(int, ends)
                of_kind[slot.name] = (low, high, slot.param.numel())
    for (key, dtype), by_name in counted.items():
        low, high, size = map(sum, zip(*by_name.values(), strict=True))
        if problem := at_ends(key, dtype, low / max(size, 1), high / max(size, 1), worst_of(by_name)):
            say_once(Advice(f"{caller}: ends of {key} in {dtype}", f"{caller}: {problem}"))


def _warn_of_ranges(caller: str, batches: Iterable[Batch]) -> None:
    """Warn, at some steps, of gradients with squares outside the range of a moment without scales."""
    for batch in batches:
        dtypes = (moment.format.dtype for moment in batch.plan.moments)
        dtype = next((dtype for dtype in dtypes if dtype in RANGES), "")
        if not dtype or not any(map(_is_looked_at, batch.numbers)):
            continue
        slots = [slot for slot in batch.slots if slot.grad.numel()]
        if not slots:
            continue
        scale = batch.group.scale or 1.0
        counts = torch.stack([count_outside(slot.grad, dtype, scale) for slot in slots])
        rows = zip(slots, counts.tolist(), strict=True)
        if problem := gradients_outside(dtype, {slot.name: tuple(row) for slot, row in rows}):
            say_once(Advice(f"{caller}: gradients outside of {dtype}", f"{caller}: {problem}"))


def warn_of_rates(caller: str, batches: Iterable[Batch]) -> None:
    """Warn of a rate far above the rates used for feedback of weights, and keep the largest."""
    for group in {batch.group.index: batch.group for batch in batches}.values():
        choices = group.choices
        if (
            choices.schedule is not None
            or group.knows_rates
            or not any(hasattr(link.rule, "peak_lr") for link in group.links)
        ):
            continue
        rate, before = float(group.entries["lr"]), choices.stepped_lr
        if rate > before > 0:
            known = (choices.first_lr, group.entries.get("initial_lr"), group.entries.get("max_lr"))
            before = max([before, *(float(x) for x in known if x is not None)])
            if problem := rate_that_rose(rate, before, _KNOW_THE_RATE):
                say_once(Advice(f"{caller}: a rate that rose", f"{caller}: {problem}"))
        choices.stepped_lr = max(choices.stepped_lr, rate)


def _is_looked_at(step: int) -> bool:
    return step in _LOOKED_AT or step % _EVERY == 0
