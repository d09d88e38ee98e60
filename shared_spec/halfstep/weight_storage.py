"""How weights are stored, by name: the argument `param_storage` of the aliases. Contract: section P."""

PARAM_STORAGES = ("stochastic", "nearest", "compensated", "split8", "split16", "master")


def check_param_storage(caller: str, param_storage: str) -> None:
    """Raise ValueError for what is no weight storage."""
    if param_storage not in PARAM_STORAGES:
        names = [f'"{name}"' for name in PARAM_STORAGES]
        raise ValueError(
            f"{caller}: param_storage={param_storage!r} is not a weight storage. "
            f"Use {', '.join(names[:-1])} or {names[-1]}."
        )
