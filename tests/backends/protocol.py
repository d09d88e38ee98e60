"""What the runner asks of a backend."""

from halfstep_spec.vectors import Array, Case


class Backend:
    """A backend has one method per op, which takes a case and returns its outputs by name."""

    OPS = (
        "fold",
        "leaf_id",
        "leaf_key",
        "random_words",
        "round_to",
        "bias_correction",
        "round_stochastically",
        "encode",
        "adam_step",
    )

    def run(self, case: Case) -> dict[str, Array]:
        """Run one case; refuse an op that is not known."""
        if case.op not in self.OPS:
            raise LookupError(
                f"{type(self).__name__} has no op {case.op!r} (case {case.id}: {case.comment})."
            )
        return getattr(self, case.op)(case)


def seed_of(case: Case) -> int:
    """Return the seed of a case as one integer."""
    high, low = (int(word) for word in case.inputs["seed"].bits)
    return (high << 32) | low


def offset_of(case: Case) -> int:
    """Return the offset of a case as one integer."""
    high, low = (int(word) for word in case.inputs["offset"].bits)
    return (high << 32) | low


def scalar(case: Case, name: str) -> float:
    """Return a float32 input of one element as a Python float: exact."""
    return float(case.inputs[name].bits.view("float32"))


def unchecked(rounding: str) -> str:
    """Vectors force nearest where users would be refused it."""
    return "nearest_unchecked" if rounding == "nearest" else rounding


def moment_format(package, argument):
    """Return a moment's dtype, given as a name or as the arguments of a package's `scaled` or `mapped`."""
    if isinstance(argument, str):
        return argument
    return package.mapped(**argument) if "table" in argument else package.scaled(**argument)
