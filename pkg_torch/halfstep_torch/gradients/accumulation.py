"""Gradients of micro-batches, added up in 16 bits without losing small gradients. Contract: G1, G2."""

import dataclasses
import weakref
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep.random_words import Role
from halfstep_torch.distributed.shards import refuse_shards
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.in_place import LeafWords, round_in_place, rounding
from halfstep_torch.gradients.hooks import claim, named_leaves, release
from halfstep_torch.leaves.checks import LAST_STEP, check_grad
from halfstep_torch.leaves.group_names import StateDict
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.optimizer_state.form import SavedState

_FUNCTION = "accumulate_gradients"


def accumulate_gradients(
    parameters: torch.nn.Module | torch.optim.Optimizer | Iterable,
    *,
    seed: Seed = 0,
    compile: bool | Literal["auto"] = "auto",
) -> "GradientAccumulation":
    """Round stochastically when backward adds to a gradient: grad <- stochastic(grad + g).

    Autograd rounds to nearest. In bfloat16 the sum of 64 equal gradients then has an error of 3 %, always in
    the same direction, and a sum of 512 does not grow any more. With these hooks sums are right on average.
    They are in `grad`, so training loops, clipping, `zero_grad`, `torch.autograd.grad` and any optimizer's
    `step` need no change. float32 gradients are added as before.

    Sums are rounded once per micro-batch, in the parameter's dtype and in pieces, so the only extra memory is
    the incoming gradient. Divide the loss by the number of micro-batches for their mean.

    With DistributedDataParallel, run all micro-batches except the last in `no_sync()`, as usual. Give each
    process its own seed, such as its rank, because each rounds its own sums.

    Args:
        parameters: a module, an optimizer, `model.named_parameters()`, or parameters, which are then named by
            index. 16-bit parameters get a hook. They need not all get a gradient.
        seed: seed of the random words, as in `round_stochastically`.
        compile: True, False or "auto", as in `Optimizer`: whether a generated kernel rounds the sums. The
            bits are the same.

    Returns:
        A handle. `remove()` removes the hooks, which otherwise keep the parameters in memory, except if a
        module was given. `state_dict()` and `load_state_dict()` save and restore each parameter's number of
        gradients, on which the random words depend.

    Raises:
        TypeError: if `parameters` or `seed` has a wrong type. From backward, if a gradient is sparse or has a
            wrong dtype. `grad` is then unchanged.
        ValueError: if the seed is out of range, or a parameter has such hooks already.
        RuntimeError: from backward, if a parameter's data was replaced since, for example by `model.to(...)`.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> p = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
        >>> handle = hs.accumulate_gradients([("p", p)])
        >>> for _ in range(64):
        ...     (p.sum() * 0.125).backward()
        >>> p.grad.float().mean().item()
        8.0
        >>> handle.remove()

    Source: Torchastic's `StochasticAccumulator`, which keeps the sum beside `grad`. Contract G1, G2.
    """
    handle = GradientAccumulation(named_leaves(_FUNCTION, parameters), as_seed(_FUNCTION, seed), compile)
    if isinstance(parameters, torch.nn.Module):
        weakref.finalize(parameters, handle.remove).atexit = False
    return handle


@dataclasses.dataclass
class _Leaf:
    """A parameter with accumulated gradients.

    Attributes:
        name: the name for its random words.
        param: the parameter.
        words: the random words for rounding its sums.
        count: the number of gradients so far.
        node: the node that adds to `grad` in backward, kept here because autograd does not keep it alive.
        total: the sum, while the next gradient arrives.
        arriving: whether a gradient is arriving.
    """

    name: str
    param: Tensor
    words: LeafWords
    count: int = 0
    node: torch.autograd.graph.Node | None = None
    total: Tensor | None = None
    arriving: bool = False


class GradientAccumulation:
    """The handle returned by `accumulate_gradients`."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], seed: int, compile: bool | str):
        leaves = [
            _Leaf(name, p, _words(seed, name))
            for name, p in named
            if p.requires_grad and p.dtype != torch.float32
        ]
        way_out = (
            "Call model.set_requires_gradient_sync(False) for all micro-batches but the last, under "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32): the sum is then in float32."
        )
        refuse_shards(_FUNCTION, (leaf.param for leaf in leaves), way_out)
        self._compile = CompileChoice(_FUNCTION, compile)
        for leaf in leaves:
            self._compile.check(_FUNCTION, leaf.param.device)
        claim(_FUNCTION, [(leaf.name, leaf.param) for leaf in leaves])
        self._seed, self._leaves = seed, {leaf.name: leaf for leaf in leaves}
        self._handles: list[RemovableHandle] = []
        for leaf in leaves:
            self._watch(leaf)

    def _watch(self, leaf: _Leaf) -> None:
        # On the node instead of the tensor, because hooks of a tensor also run in torch.autograd.grad, which
        # adds nothing to grad.
        leaf.node = torch.autograd.graph.get_gradient_edge(leaf.param).node

        def before(_grads: object) -> None:
            if not leaf.arriving:
                leaf.total, leaf.param.grad, leaf.arriving = leaf.param.grad, None, True

        def after(param: Tensor) -> None:
            self._add(leaf)

        self._handles.append(leaf.node.register_prehook(before))
        self._handles.append(leaf.param.register_post_accumulate_grad_hook(after))

    @torch.no_grad()
    def _add(self, leaf: _Leaf) -> None:
        """Set `grad`, which holds the last summand, to the sum."""
        if not leaf.arriving:
            raise RuntimeError(
                f"{_FUNCTION}: the parameter {leaf.name!r} has new data since its hooks were made. "
                f"Call remove(), and {_FUNCTION} once the model has its dtype and device."
            )
        grad, total = leaf.param.grad, leaf.total
        assert grad is not None
        leaf.total, leaf.arriving = None, False
        try:
            check_grad(_FUNCTION, leaf.name, leaf.param)
            if grad.requires_grad:
                raise TypeError(
                    f"{_FUNCTION}: the gradient of {leaf.name!r} has a graph, which rounding would cut. "
                    "Use backward without create_graph."
                )
        except Exception:
            leaf.param.grad = total
            raise
        leaf.count = min(leaf.count + 1, LAST_STEP)
        if total is not None:
            stage = rounding(accumulate, Role.ACCUMULATOR, total.dtype)
            round_in_place(_FUNCTION, self._compile, stage, total, grad, leaf.words.at(leaf.count))
            leaf.param.grad = total

    def remove(self) -> None:
        """Remove the hooks. Autograd then adds gradients as usual."""
        for handle in self._handles:
            handle.remove()
        release(leaf.param for leaf in self._leaves.values())
        self._handles.clear()

    def state_dict(self) -> StateDict:
        """Return the seed and the number of gradients added to each parameter, by leaf name."""
        return {"seed": self._seed, "counts": {name: leaf.count for name, leaf in self._leaves.items()}}

    def load_state_dict(self, state_dict: SavedState) -> None:
        """Restore a result of `state_dict`. Later gradients are rounded as in the saved run."""
        counts = state_dict["counts"]
        if counts.keys() != self._leaves.keys():
            name = min(counts.keys() ^ self._leaves.keys())
            raise ValueError(
                f"{_FUNCTION}: {name!r} is not a parameter of both the state dict and this model. "
                "Pass the state dict of the same model."
            )
        self._seed = as_seed(_FUNCTION, state_dict["seed"])
        for name, leaf in self._leaves.items():
            leaf.count, leaf.words = int(counts[name]), _words(self._seed, name)


def _words(seed: int, name: str) -> LeafWords:
    return LeafWords(seed, name, Role.ACCUMULATOR)


def accumulate(total: Tensor, g: Tensor) -> Tensor:
    """Return the sum in float32, before it is rounded (contract G1)."""
    return total + g
