"""The weights as precisely as they are known: read for an export, set from a float32 checkpoint.

Contract: P4, P5.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from halfstep.float_formats import FLOAT_FORMATS
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import HELD_BY_FLOAT32, check_weight, difference, named_leaves
from halfstep_jax.numbers.rounding import round_and_cast
from halfstep_jax.storage.format_tag import check_words
from halfstep_jax.weights.narrow_weights import Compensate, RoundStochasticallyState
from halfstep_jax.weights.weight_rule import WeightRule, is_wide, narrowest
from halfstep_jax.weights.wide_weights import KeepMasterParams, SplitParams

_KEEPERS: dict[type, type[WeightRule]] = {
    rule.State: rule for rule in (Compensate, SplitParams, KeepMasterParams)
}
"""The rules that keep something beside the weights, by the type of their state."""


def float32_params(params: Tree, state: Tree) -> Tree:
    """Return the weights in float32, as precisely as they are known.

    The params are combined with the further arrays in `state`, at any depth. Of `compensate` that is p +
    compensation, rounded to float32; of `split_params` p with its further bits; of `keep_master_params` the
    float32 copy. Where nothing is kept it is a plain cast. For export, and for evaluation at full precision.

    Args:
        params: the weights of the model.
        state: the state of the optimizer that trains them: any nesting of Optax states. A checkpoint that was
            restored without a target has mappings in their place, which are read too.

    Raises:
        TypeError: if a leaf is not float32, bfloat16 or float16.
        ValueError: if `state` is of other params, or keeps something of one weight twice.

    Example:
        >>> import optax
        >>> from halfstep_jax import adamw
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> tx = adamw(1e-3, weight_decay=0.0, param_storage="split16")
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)
        >>> print(params["w"][0], float32_params(params, state)["w"][0])
        1 0.999

    Source: ours.
    """
    caller = "float32_params"
    extras = _all_extras(caller, params, state)

    def in_float32(name, p):
        check_weight(caller, name, p)
        if is_wide(p) or name not in extras:
            return jnp.asarray(p).astype(jnp.float32)
        rule, array = extras[name]
        return rule.join(p, array)

    return _map_named(in_float32, params)


def set_float32_params(params: Tree, state: Tree, values: Tree) -> tuple[Tree, Tree]:
    """Return params and state that represent float32 `values`: to load a float32 checkpoint.

    `float32_params` of the two then gives `values`: exactly under `keep_master_params` and `split_params`
    with 16 bits and bfloat16 weights, else rounded to nearest. Where nothing is kept the params are `values`
    rounded to nearest. Moments and counts stay. Under `param_storage="feedback"` and "int8" the first moment
    still has the errors of the old weights: set it to zeros too (`docs/how-to/feedback.md`).

    Args:
        params: the weights of the model: their dtypes are kept.
        state: of the optimizer that trains them: any nesting of Optax states.
        values: float32, in the tree of `params`.

    Raises:
        TypeError: if a leaf is not float32, bfloat16 or float16.
        ValueError: if trees or shapes differ, or a value, where it can be read now, is past the largest
            float16 and the weight is float16.

    Example:
        >>> params = {"w": jnp.zeros(2, jnp.bfloat16)}
        >>> from halfstep_jax.weights.narrow_weights import compensate
        >>> values = {"w": jnp.full(2, 1.001953125)}
        >>> params, state = set_float32_params(params, compensate().init(params), values)
        >>> print(params["w"][0], float32_params(params, state)["w"][0])
        1 1.0019531

    Source: ours.
    """
    caller = "set_float32_params"
    extras = _all_extras(caller, params, state)
    new_params, new_extras = {}, {}
    for name, p, value in _pairs(caller, params, values):
        w = jnp.asarray(value).astype(jnp.float32)
        if name in extras and not is_wide(p):
            shown, new_extras[name] = extras[name][0].store(w, p.dtype, None)
            new_params[name] = shown.astype(p.dtype)
        else:
            new_params[name] = round_and_cast(w, p.dtype.name, None)
    params = _map_named(lambda name, p: new_params[name], params)

    def renew(inner):
        if isinstance(inner, RoundStochasticallyState):
            return inner._replace(narrowest=narrowest(params))
        rule = _keeper(inner)
        if rule is None:
            return inner
        tree = _map_named(new_extras.get, _extras_of(inner, rule))
        if isinstance(inner, Mapping):
            return {**inner, rule.extra_field: tree}
        return inner._replace(**{rule.extra_field: tree})

    return params, jax.tree.map(
        renew, state, is_leaf=lambda x: _keeps(x) or isinstance(x, RoundStochasticallyState)
    )


def _map_named(function, tree):
    """Map a function of name and array over the leaves of a tree."""
    return jax.tree.structure(tree).unflatten([function(*named) for named in named_leaves(tree)])


def _keeps(x) -> bool:
    return _keeper(x) is not None


def _keeper(x) -> type[WeightRule] | None:
    """Return the rule of a state `x`, by its type, or by its fields if it is a mapping from a checkpoint."""
    if isinstance(x, Mapping):
        return next((rule for state, rule in _KEEPERS.items() if set(state._fields) == set(x)), None)
    return _KEEPERS.get(type(x))


def _extras_of(state, rule: type[WeightRule]) -> Tree:
    """Return the arrays that a state keeps beside the weights, in their tree."""
    return state[rule.extra_field] if isinstance(state, Mapping) else getattr(state, rule.extra_field)


def _all_extras(caller: str, params, state) -> dict[str, tuple[WeightRule, Tree]]:
    """Return rule and further array of every weight that `state` keeps one for, by name."""
    check_words(caller, state)
    weights = dict(named_leaves(params))
    extras: dict[str, tuple[WeightRule, Tree]] = {}
    keepers = [(x, _keeper(x)) for x in jax.tree.leaves(state, is_leaf=_keeps)]
    arrays = [
        (rule, name, array)
        for keeper, rule in keepers
        if rule is not None
        for name, array in named_leaves(_extras_of(keeper, rule))
    ]
    for rule, name, array in arrays:
        p = weights.get(name)
        if p is None or p.shape != array.shape:
            shape = "not among the params" if p is None else f"of shape {p.shape}"
            raise ValueError(
                f"{caller}: the state keeps {array.shape} of '{name}', which is {shape}. "
                "Pass the state of these params."
            )
        if name in extras:
            raise ValueError(f"{caller}: two states keep something of '{name}'. Pass one of the two.")
        extras[name] = rule.of_extra(array), array
    return extras


def _pairs(caller: str, params, values):
    """Return (name, weight, value) of every weight, checked."""
    try:
        all_values = jax.tree.structure(params).flatten_up_to(values)
    except ValueError as error:
        names, given = ([name for name, _ in named_leaves(tree)] for tree in (params, values))
        problem = difference("params", names, "values", given, error)
        raise ValueError(
            f"{caller}: params and values are different trees: {problem}. Pass values in the tree of params."
        ) from None
    rows = [(name, p, value) for (name, p), value in zip(named_leaves(params), all_values, strict=True)]
    for name, p, value in rows:
        check_weight(caller, name, p)
        if (dtype := str(getattr(value, "dtype", type(value).__name__))) not in HELD_BY_FLOAT32:
            raise TypeError(
                f"{caller}: the value of '{name}' is {dtype}; values are float32, bfloat16 or float16. "
                "Cast it."
            )
        if p.shape != value.shape:
            raise ValueError(
                f"{caller}: '{name}' has shape {p.shape}, its value {value.shape}. "
                "Pass values in the shapes of params."
            )
        _check_range(caller, name, p, value)
    return rows


def _check_range(caller: str, name: str, p, value) -> None:
    if p.dtype != jnp.float16 or isinstance(value, Tracer):
        return
    largest = FLOAT_FORMATS["float16"].max
    value = np.asarray(value).astype(np.float32)
    if (past := np.abs(value) > largest).any():
        raise ValueError(
            f"{caller}: '{name}' has {value[past][0]}, past the largest float16, {largest:.0f}. "
            "Use bfloat16 params, or clip."
        )
