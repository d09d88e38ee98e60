"""The argument `param_storage` of aliases, as links of a chain."""

from collections.abc import Callable

from halfstep.weight_storage import check_param_storage
from halfstep_torch.links.chain import Chain, chain
from halfstep_torch.weights.narrow_weights import Compensate, RoundStochastically
from halfstep_torch.weights.wide_weights import keep_master_params, split_params


def with_param_storage(caller: str, tx: Chain, param_storage: str, seed: int) -> Chain:
    """Return a chain that ends with a weight storage."""
    check_param_storage(caller, param_storage)
    storages: dict[str, Callable[[], Chain]] = {
        "stochastic": lambda: chain(tx, RoundStochastically(seed=seed)),
        "nearest": lambda: tx,
        "compensated": lambda: chain(tx, Compensate()),
        "split8": lambda: split_params(tx, 8, seed=seed),
        "split16": lambda: split_params(tx, 16, seed=seed),
        "master": lambda: keep_master_params(tx),
    }
    return storages[param_storage]()
