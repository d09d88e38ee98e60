"""From parameters to the flat memory that a plan works on, and back.

Weights and state are changed in place, never replaced. The order of elements is the row-major order of the
logical array, whatever the layout in memory: that order gives the random words their index (contract W8).
"""

import dataclasses
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.compiling import compiled_kernel
from halfstep_torch.leaves import check_state_array
from halfstep_torch.random_words import as_int32, leaf_id
from halfstep_torch.step import Plan, keys_at, stream_keys

# Elements per call of a compiled kernel: positions count in int32.
_COMPILED_PIECE = 1 << 30


@dataclasses.dataclass
class Leaf:
    """A parameter on its way through one step.

    Attributes:
        param: the weights, with a gradient.
        name: the leaf name.
        step: the count after this step.
        codes: state arrays, row-major.
        keys: for the random words; uint32, as `stream_keys` gives them.
    """

    param: Tensor
    name: str
    step: int
    codes: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    keys: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.uint32))

    @property
    def grad(self) -> Tensor:
        """The gradient, detached."""
        assert self.param.grad is not None
        return self.param.grad.detach()


@dataclasses.dataclass
class Batch:
    """Leaves that share a plan, its numbers, a device and the dtype of their gradients.

    Attributes:
        plan: of the leaves.
        numbers: of each rule.
        device: of the leaves.
        grad_dtype: of their gradients.
        leaves: the parameters.
    """

    plan: Plan
    numbers: list[tuple[float, ...]]
    device: torch.device
    grad_dtype: torch.dtype
    leaves: list[Leaf] = dataclasses.field(default_factory=list)

    def compile(self, compiled_from: int) -> None:
        """Compile the kernel that `run` will call, if it will call one; raise what torch.compile raises."""
        if any(leaf.param.numel() >= compiled_from for leaf in self.leaves):
            compiled_kernel(self.plan, self.device, self.grad_dtype)

    def run(self, compiled_from: int | None) -> None:
        """Step the leaves in place.

        Args:
            compiled_from: number of elements from which a leaf is stepped by a compiled kernel; None: never.
        """
        piece = eager_piece(self.device)
        compiled, together, length = [], [], 0
        for leaf in self.leaves:
            n = leaf.param.numel()
            if compiled_from is not None and n >= compiled_from:
                compiled.append(leaf)
            elif n >= piece:
                _run_in_pieces(self, leaf)
            else:
                if length + n > piece:
                    _run_together(self, together)
                    together, length = [], 0
                together.append(leaf)
                length += n
        if length:
            _run_together(self, together)
        if compiled:
            _run_compiled(self, compiled)


def attach_state(function: str, batches: Sequence[Batch], states: MutableMapping[Tensor, Any]) -> None:
    """Give leaves their state arrays: new parameters get zeros, those of others are checked.

    Args:
        function: for messages.
        batches: of leaves.
        states: an optimizer's state, from parameter to its flat dict.
    """
    for batch in batches:
        formats = batch.plan.formats
        for leaf in batch.leaves:
            state = states[leaf.param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.int64)
                state.update({key: fmt.zeros_like(leaf.param) for key, fmt in formats.items()})
            for key, fmt in formats.items():
                check_state_array(function, leaf.name, key, fmt, state[key], leaf.param)
            leaf.codes = {key: state[key] for key in formats}


def attach_keys(batches: Sequence[Batch], seeds: Sequence[int | None]) -> None:
    """Give leaves the keys of their random words, those of equal streams derived at once.

    Args:
        batches: of leaves.
        seeds: of each link of the chain.
    """
    by_streams: dict[tuple, list[Leaf]] = {}
    for batch in batches:
        by_streams.setdefault(batch.plan.streams(seeds), []).extend(batch.leaves)
    for streams, leaves in by_streams.items():
        rows = stream_keys(streams, [leaf.step for leaf in leaves], [leaf_id(leaf.name) for leaf in leaves])
        for leaf, row in zip(leaves, rows, strict=True):
            leaf.keys = row


def eager_piece(device: torch.device) -> int:
    """Return how many elements are stepped at once in eager mode: on CPU, what fits a cache."""
    return 1 << 17 if device.type == "cpu" else 1 << 24


def _run_together(batch: Batch, leaves: Sequence[Leaf]) -> None:
    """Step short leaves end to end, as one array whose keys vary."""
    params = [leaf.param.detach() for leaf in leaves]
    lengths = [p.numel() for p in params]
    p = torch.cat([p.reshape(-1) for p in params])
    g = torch.cat([leaf.grad.reshape(-1) for leaf in leaves])
    codes = {name: torch.cat([leaf.codes[name].view(-1) for leaf in leaves]) for name in batch.plan.formats}
    keys = _keys_together(leaves, lengths, batch.device)
    new_p, new_codes = batch.plan.run(p, g, codes, batch.numbers, keys)
    for param, new in zip(params, new_p.split(lengths), strict=True):
        param.copy_(new.view(param.shape))
    for name, array in new_codes.items():
        for leaf, new in zip(leaves, array.split(lengths), strict=True):
            leaf.codes[name].view(-1).copy_(new)


def _keys_together(leaves: Sequence[Leaf], lengths: Sequence[int], device: torch.device) -> Sequence:
    """Return the columns of keys, one row per element; of a single leaf, plain numbers."""
    rows = np.stack([leaf.keys for leaf in leaves])
    if len(leaves) == 1:
        return as_int32(rows[0]).tolist()
    rows[:, 0] -= np.cumsum([0, *lengths[:-1]]).astype(np.uint32)
    columns = np.repeat(np.ascontiguousarray(as_int32(rows).T), lengths, axis=1)
    return torch.from_numpy(columns).to(device).unbind()


def _run_in_pieces(batch: Batch, leaf: Leaf) -> None:
    """Step one long leaf in eager mode."""
    for p, g, codes, keys in _pieces(batch.plan, leaf, eager_piece(batch.device)):
        new_p, new_codes = batch.plan.run(p, g, codes, batch.numbers, as_int32(keys).tolist())
        p.copy_(new_p)
        for name, array in codes.items():
            array.copy_(new_codes[name])


def _run_compiled(batch: Batch, leaves: Sequence[Leaf]) -> None:
    """Step leaves by the compiled kernel, one call each."""
    kernel = compiled_kernel(batch.plan, batch.device, batch.grad_dtype)
    numbers = torch.tensor([x for of_rule in batch.numbers for x in of_rule], dtype=torch.float32)
    numbers = numbers.to(batch.device)
    for leaf in leaves:
        for p, g, codes, keys in _pieces(batch.plan, leaf, _COMPILED_PIECE):
            key_vector = torch.from_numpy(as_int32(keys)).to(batch.device)
            kernel(p, g, list(codes.values()), numbers, key_vector)


def _pieces(
    plan: Plan, leaf: Leaf, length: int
) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor], np.ndarray]]:
    """Yield flat aliases of a leaf's weights, gradient and state in row-major order, and their keys.

    Where memory has another order, the weights are a row-major copy that is written back at the end.
    """
    param = leaf.param.detach()
    rows, grad, size = param.contiguous(), leaf.grad.contiguous(), param.numel()
    for start in range(0, size, length):
        n = min(length, size - start)
        codes = {name: flat(array, start, n) for name, array in leaf.codes.items()}
        keys = keys_at(plan, leaf.keys, start) if start else leaf.keys
        yield flat(rows, start, n), flat(grad, start, n), codes, keys
    if rows.data_ptr() == param.data_ptr():
        # The aliases have version counters of their own: autograd must learn that the weights changed.
        torch.autograd.graph.increment_version(leaf.param)
    else:
        param.copy_(rows)


def flat(x: Tensor, start: int, length: int) -> Tensor:
    """Return a 1-D alias of a stretch of a row-major tensor.

    Not a view: a view has a base, and Dynamo, where it is shown one, compiles once for every rank of bases.
    """
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset() + start, (length,), (1,))
