"""A chain of transforms as a `torch.optim.Optimizer`."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep_torch.engine.advice import advise
from halfstep_torch.engine.batches import Batch, attach_keys, attach_layouts, attach_state
from halfstep_torch.engine.groups import HEADER, plain_value
from halfstep_torch.engine.kernel import compile_batch, run_batch
from halfstep_torch.engine.layout import Layout
from halfstep_torch.engine.leaves import check_grad
from halfstep_torch.engine.loss_scale import Unscaled, is_skipped, scale_of
from halfstep_torch.engine.planned_optimizer import PlannedOptimizer
from halfstep_torch.engine.replicas import check_replicas
from halfstep_torch.engine.rows import Slot
from halfstep_torch.engine.state_dict import (
    check_saved_state,
    load_group,
    load_states,
    make_header,
    read_groups,
    replace_groups,
)
from halfstep_torch.engine.state_form import LAST_STEP
from halfstep_torch.storage.state_array import StateArray


class Optimizer(PlannedOptimizer):
    """A `torch.optim` optimizer that applies a chain of transforms.

    At each step the gradient of every parameter that has one goes through the links of the chain, in float32,
    and the weight becomes nearest(p + u) in its own dtype. Each link documents where it rounds. Weights and
    state are changed in place. Gradients, state and numbers of all parameters are checked, and kernels
    compiled, before any weight changes; what fails after that (no memory left, an interrupt, a user's own
    rule) leaves some parameters stepped and others not.

    The links' numbers are entries of the param groups (`lr`, `betas`, `eps`, `weight_decay`, `mu_dtype`,
    ...): a group's own value wins, and lr schedulers may write them. So do `param_storage` and the roundings
    of the named classes: exact weights for norms and embeddings are a group with `param_storage="split16"`.
    State per parameter is a flat dict: `step`, an int64 0-d tensor, and what the links keep (`exp_avg`,
    `exp_avg_sq`), row-major, in its own dtypes, which `load_state_dict` keeps to the bit.

    Random words depend on (seed, step, name, element) alone: pass named parameters
    (`model.named_parameters()`); reordering, freezing or resuming then changes no bit.
    Without names, a parameter's index over all groups stands for its name. torch's own generators are not
    used.

    Args:
        params: parameters, pairs (name, parameter), or dicts of groups with their own values of the entries.
            float32, bfloat16 or float16.
        tx: a transform, or a `chain` of them.
        maximize: ascend.
        compile: whether steps run as torch.compile'd kernels. True; False; or "auto": on CUDA devices, and on
            CPU from a million parameters up where a C++ compiler is found. The bits are the same.
        names: pairs (name, parameter) of the whole model, for wrappers that hand over parameters without
            names, or a share of them.

    Raises:
        TypeError: if an argument, a parameter or a group's value is of a wrong type.
        ValueError: if a value is out of range.
        RuntimeError: if `compile` is True, a parameter is on the CPU, and there is no C++ compiler.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> tx = hs.chain(
        ...     hs.scale_by_adam(b2=0.99),
        ...     hs.add_decayed_weights(0.1),
        ...     hs.scale_by_learning_rate(1e-3),
        ...     hs.round_stochastically(seed=0),
        ... )
        >>> optimizer = hs.Optimizer(model.named_parameters(), tx)
        >>> model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.bfloat16

    Source: contract A6, P1.
    """

    # A GradScaler then calls `step` with the gradients as they are, and says by what they are scaled.
    _step_supports_amp_scaling = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, each group with an entry that says what it belongs to.

        That entry, `halfstep`, holds the spec version, the links of the chain, their seeds and the
        parameters' leaf names. All of it loads with `torch.load(weights_only=True)`. State arrays are not
        copied.
        """
        state_dict = super().state_dict()
        for group, header in zip(state_dict["param_groups"], self._headers(), strict=True):
            group.update({key: plain_value(value) for key, value in group.items()}, **{HEADER: header})
        return state_dict

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore from a state dict, bit for bit.

        Numbers of the param groups and the seeds are taken from the state dict; state arrays are copied.
        Parameters are matched by name within their group or, where either side has no names, by their place;
        random words then follow the names of this optimizer.

        Args:
            state_dict: what `state_dict` returned.

        Raises:
            TypeError: if it is not a state dict.
            ValueError: if it is of another chain, spec version, names, shapes or formats. Nothing is changed.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved_groups, ids, seeds = read_groups(state_dict, self._headers())
        states: dict[Tensor, tuple[dict[str, StateArray], Mapping[str, Any]]] = {}
        steps: list[tuple[int, int]] = []
        for i, name, param in self._named():
            saved = state_dict["state"].get(ids[i][name])
            if saved:
                of_plan = i, self._info(i, name, param), self._applies_to(i, name, param)
                arrays = self._plan(*of_plan, self._read(i)).arrays
                saved_arrays = self._plan(*of_plan, self._read(i, saved_groups[i])).arrays
                check_saved_state(name, param, arrays, saved_arrays, saved)
                states[param] = arrays, saved
                steps.append((i, max(int(saved["step"]), 1)))
        show = self._shown_rates(steps)
        groups = [
            load_group(group, saved, choices)
            for group, saved, choices in zip(self.param_groups, saved_groups, self._choices, strict=True)
        ]
        replace_groups(self.param_groups, groups, lambda: [self._read(i) for i in range(len(groups))])
        for choices, own, group in zip(self._choices, seeds, self.param_groups, strict=True):
            choices.chain = choices.chain.with_seeds(own)
            group[HEADER] = make_header(choices.chain)
        for of_group in show:
            of_group()
        self._forget_rows()
        load_states(self.state, states)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _headers(self) -> list[dict[str, Any]]:
        names: list[list[str]] = [[] for _ in self.param_groups]
        for i, name, _ in self._named():
            names[i].append(name)
        chains = [choices.chain for choices in self._choices]
        return [make_header(chain, of_group) for chain, of_group in zip(chains, names, strict=True)]

    def _forget_rows(self) -> None:
        """Let go of the state arrays of the last step."""
        self._slots.clear()
        self._layouts.clear()

    def step(self, closure: Callable[[], Any] | None = None, *, zero_grad: bool = False) -> Any:
        """Update every parameter that has a gradient.

        `torch.amp.GradScaler` may call it: gradients of a scaled loss are unscaled in float32, float16 ones
        too, and a step in which it found an infinity or a NaN changes nothing.

        Args:
            closure: re-evaluates the model and returns the loss.
            zero_grad: drop the gradients afterwards, as `zero_grad()` does.

        Returns:
            What `closure` returned, or None.

        Raises:
            TypeError: if a gradient is sparse or of a wrong dtype, or a group's value of a wrong type.
            ValueError: if a gradient or state array does not fit its parameter, or a group's value is out of
                range. Weights and state are then unchanged.
            RuntimeError: at the first step, if another process steps a replica of the model with another
                seed, or at another step. Nothing is changed here.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    f"{self._name}: closure={closure!r} is not a function. "
                    "Use step(), or step(zero_grad=True)."
                )
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            # Inside a compiled training step this is a graph break: Dynamo must not trace NumPy on the host.
            # A decorator would do, and import Dynamo together with this package.
            torch.compiler.disable(self._step)()  # pyright: ignore[reportCallIssue]
        if zero_grad:
            self.zero_grad()
        return loss

    def _step(self) -> None:
        if is_skipped(self):
            return
        batches = self._batches()
        attach_state(self._name, list(batches.values()), self.state)
        attach_keys(list(batches.values()))
        compiled = self._prepare(batches.values())
        attach_layouts(batches, compiled, self._layouts)
        show = self._shown_rates((i, step) for (i, *_, step) in batches)
        self._look_around(batches)
        # Everything that can fail has been tried: from here on, weights change.
        for batch in batches.values():
            run_batch(batch, compiled[batch.device])
        steps = [slot.counter for batch in batches.values() for slot in batch.slots]
        if steps:
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
        if any(step == LAST_STEP for (*_, step) in batches):
            torch._foreach_clamp_max_(steps, LAST_STEP)  # pyright: ignore[reportPrivateImportUsage]
        for of_group in show:
            of_group()

    def _look_around(self, batches: Mapping[tuple, Batch]) -> None:
        """At the first step, say what the user should know, and compare replicas in other processes."""
        nameless = sum(len(group["params"]) for group in self.param_groups if "param_names" not in group)
        first = [batch for (*_, step), batch in batches.items() if step == 1]
        advise(self._name, first, nameless, scale_of(self))
        if not self._compared:
            slots = [slot for batch in batches.values() for slot in batch.slots]
            seeds = [[link.seed for link in choices.chain.links] for choices in self._choices]
            check_replicas(self._name, slots, seeds)
            self._compared = True

    def _shown_rates(self, steps: Iterable[tuple[int, int]]) -> list[Callable[[], None]]:
        """Return what shows the learning rates of a step in the groups whose lr is a function of it."""
        oldest: dict[int, int] = {}
        for i, step in steps:
            oldest[i] = max(oldest.get(i, 0), step)
        return [self._choices[i].show(self._name, i, self.param_groups[i], oldest[i]) for i in oldest]

    def _prepare(self, batches: Iterable[Batch]) -> dict[torch.device, bool]:
        """Compile what is to be compiled; return on which devices steps run compiled."""
        elements: dict[torch.device, int] = {}
        for param in (param for group in self.param_groups for param in group["params"]):
            elements[param.device] = elements.get(param.device, 0) + param.numel()
        compiled = {}
        for batch in batches:
            make = functools.partial(compile_batch, batch)
            compiled[batch.device] = self._compile.prepare(
                self._name, batch.device, elements[batch.device], make
            )
        return compiled

    def _batches(self) -> dict[tuple, Batch]:
        """Check all gradients and numbers, and sort the parameters that have a gradient."""
        values: dict[int, list[Any]] = {}
        of_groups: dict[int, tuple] = {}
        slots: dict[Tensor, tuple[tuple, Slot]] = {}
        batches: dict[tuple, Batch] = {}
        for i, name, param in self._named():
            grad = param.grad
            if grad is None:
                continue
            check_grad(self._name, name, param)
            if i not in values:
                values[i] = self._read(i)
                now, before = self._of_group(i, values[i]), self._of_groups.get(i, ())
                of_groups[i] = before if before == now else now  # the same object is compared at once
            key = (of_groups[i], param.dtype, param.shape, param.device, name)
            known, slot = self._slots.get(param, ((), None))
            if slot is None or known != key:
                info = self._info(i, name, param)
                slot = Slot(param, name, self._plan(i, info, self._applies_to(i, name, param), values[i]))
            slots[param] = key, slot
            plan, state = slot.plan, self.state.get(param)
            slot.step = min(int(state["step"]) + 1, LAST_STEP) if state else 1
            of_batch = (i, id(plan.shared), param.device, grad.dtype, slot.step)
            batch = batches.get(of_batch)
            if batch is None:
                batch = batches[of_batch] = Batch(plan, self._links(i))
            batch.slots.append(slot)
        for (i, *_, step), batch in batches.items():
            batch.numbers = self._numbers(values[i], batch, step, batches.values())
        self._slots, self._of_groups = slots, of_groups
        return batches

    def _numbers(self, values: list[Any], batch: Batch, step: int, batches: Iterable[Batch]) -> list[Any]:
        """Return the numbers of each rule of a batch."""
        numbers = []
        for j in batch.plan.links:
            link, gs = batch.links[j], []
            if link.measures:
                sharing = [one for one in batches if any(one.links[k] is link for k in one.plan.links)]
                gs = [slot.grad for one in sharing for slot in one.slots]
                gs = gs if (scale := scale_of(self)) is None else Unscaled(gs, scale)
            numbers.append(link.step_numbers(values[j], step, gs))
        return numbers

    @functools.cached_property
    def _slots(self) -> dict[Tensor, tuple[tuple, Slot]]:  # pyright: ignore[reportRedeclaration]
        """Of each parameter that the last step stepped what its plan was made from, and its slot."""
        return {}

    @functools.cached_property
    def _of_groups(self) -> dict[int, tuple]:  # pyright: ignore[reportRedeclaration]
        """Of each group of the last step what the plans of its parameters depend on."""
        return {}

    @functools.cached_property
    def _layouts(self) -> dict[tuple, Layout]:
        """The rows of the last step."""
        return {}
