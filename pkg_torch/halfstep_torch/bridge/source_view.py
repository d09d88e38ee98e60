"""A torch model's parameters in the names and the layout of another framework's tree."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_torch.bridge.name_map import Place

_CALLER = "SourceView"


class SourceView(nn.Module):
    """The parameters of a model as the leaves of a Flax or Equinox tree, with its names, shapes and layout.

    Random words, blocks and norms follow the row-major layout of an array. A Flax `kernel` is a transposed
    torch `weight`, so an optimizer of the model's own parameters would resume with other bits. An optimizer
    of this view gives the bits of the run in JAX, and writes to the memory of the model:

        view = SourceView(model, name_map(params, model))
        optimizer = view.optimizer(halfstep_torch.AdamW, lr=1e-3)
        halfstep_torch.load_state(path, view, optimizer)

    The model is trained as usual, but without closures. Each step reads the model's gradients, and
    `optimizer.zero_grad()` clears them. Stacked layers are moved into one tensor, and the model's parameters
    become slices of it.

    Args:
        model: the model, which computes with its own parameters.
        mapping: a mapping from leaf names to places, as from `name_map`.

    Raises:
        ValueError: if the map does not have each part of the model exactly once, or a parameter is not
            row-major.

    Example:
        >>> import halfstep_torch as hs, numpy as np
        >>> from halfstep_torch.bridge import name_map
        >>> model = nn.Linear(3, 2)
        >>> params = {"kernel": np.ones((3, 2)), "bias": np.ones(2)}
        >>> view = SourceView(model, name_map(params, model))
        >>> {name: tuple(p.shape) for name, p in view.named_parameters()}
        {'bias': (2,), 'kernel': (3, 2)}

    Source: ours.
    """

    def __init__(self, model: nn.Module, mapping: Mapping[str, Place]) -> None:
        super().__init__()
        self._mapping = dict(mapping)
        self._sources = _checked(mapping, model)
        for leaf, sources in self._sources.items():
            if not all(source.is_contiguous() for source in sources):
                raise ValueError(
                    f"{_CALLER}: the parameter of {leaf!r} is not row-major. Make it contiguous."
                )
        self._stacks: dict[str, Tensor] = {}
        for leaf, place in self._mapping.items():
            self.register_parameter(leaf, nn.Parameter(self._weights(leaf, place)))
        self._addresses = {leaf: self._address(leaf) for leaf in self._mapping}

    def optimizer(self, make: Callable, *args: Any, **options: Any) -> Any:  # everything as in `make`
        """Return an optimizer of the leaves, which reads the model's gradients at each step.

        Args:
            make: a class of optimizers, such as `halfstep_torch.AdamW`.
            *args: its arguments after the parameters.
            **options: its keyword arguments.
        """
        optimizer = make(self.named_parameters(), *args, **options)
        clear = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            clear(set_to_none)
            for source in {id(x): x for sources in self._sources.values() for x in sources}.values():
                if source.grad is not None and not set_to_none:
                    source.grad.zero_()
                source.grad = None if set_to_none else source.grad

        optimizer.zero_grad = zero_grad

        def before_step(_: object, args: Sequence, options: Mapping) -> None:
            if any(callable(argument) for argument in (*args, *options.values())):
                raise TypeError(
                    f"{_CALLER}: a step takes no closure: the gradients it makes would come too late. "
                    "Run backward before the step."
                )
            self.take_gradients()

        optimizer.register_step_pre_hook(before_step)
        return optimizer

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Set the gradient of every leaf from its parameters, in its layout.

        Raises:
            ValueError: if a parameter of the model was replaced since, or part of a stack has no gradient.
        """
        for leaf, place in self._mapping.items():
            if self._address(leaf) != self._addresses[leaf]:
                raise ValueError(
                    f"{_CALLER}: a parameter of {leaf!r} has other memory than when the view was made. "
                    "Make it once the model has its device and dtype."
                )
            grads = [source.grad for source in self._sources[leaf]]
            present = [grad for grad in grads if grad is not None]
            if present and len(present) < len(grads):
                raise ValueError(f"{_CALLER}: some layers of {leaf!r} have no gradient. Run backward on all.")
            views = [place.view(grad.contiguous()) for grad in present]
            stacked = None if not views else views[0] if len(views) == 1 else torch.stack(views)
            self.get_parameter(leaf).grad = stacked

    def _weights(self, leaf: str, place: Place) -> Tensor:
        """Return the leaf, over the memory of the model."""
        sources = [source.detach() for source in self._sources[leaf]]
        if len(sources) == 1:
            return place.view(sources[0])
        key = ",".join(place.parameters)
        if key not in self._stacks:
            self._stacks[key] = torch.stack(sources)
            for source, row in zip(self._sources[leaf], self._stacks[key], strict=True):
                source.data = row
        whole = self._stacks[key]
        rows = whole if place.rows is None else whole[:, place.rows[0] : place.rows[1]]
        split, axes = (len(sources), *place.split), (0, *(1 + axis for axis in place.axes))
        return rows.view(split).permute(axes)

    def _address(self, leaf: str) -> tuple:
        return tuple((source.data_ptr(), source.dtype) for source in self._sources[leaf])


def _checked(mapping: Mapping[str, Place], model: nn.Module) -> dict[str, Sequence[Tensor]]:
    """Return the parameters of every leaf, if the map has each part of the model once."""
    params = dict(model.named_parameters())
    taken = dict.fromkeys(params, 0)
    sources: dict[str, Sequence[Tensor]] = {}
    for leaf, place in mapping.items():
        unknown = [name for name in place.parameters if name not in params]
        if unknown:
            raise ValueError(
                f"{_CALLER}: {leaf!r} is mapped to {unknown[0]!r}, which the model does not have."
            )
        sources[leaf] = [params[name] for name in place.parameters]
        for name in place.parameters:
            rows = place.rows or (0, params[name].shape[0] if params[name].ndim else 1)
            whole = math.prod(params[name].shape[1:])
            if math.prod(place.split) != (rows[1] - rows[0]) * whole or sorted(place.axes) != list(
                range(len(place.split))
            ):
                raise ValueError(
                    f"{_CALLER}: {leaf!r} is {place}, and {name!r} has the shape "
                    f"{tuple(params[name].shape)}. Correct split, axes or rows."
                )
            taken[name] += math.prod(place.split)
    wrong = [name for name, count in taken.items() if count != params[name].numel()]
    if wrong:
        raise ValueError(
            f"{_CALLER}: the map has {', '.join(wrong)} not at all, in part or twice. "
            "Map every parameter once."
        )
    return sources
