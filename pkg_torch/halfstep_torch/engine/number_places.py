"""Numbers of rules as flat lists, and back."""

from collections.abc import Sequence

from halfstep.hyperparameters import Values


def flat(numbers: Values) -> list[float]:
    """Return the numbers of named tuples, nested or not, in their order."""
    made, coming = [], [numbers]
    while coming:  # called at every step: a function of its own for each part takes longer
        x = coming.pop()
        if isinstance(x, (tuple, list)):
            coming += reversed(x)
        else:
            made.append(x)
    return made


def number_places(numbers: Values) -> Values:
    """Return the same named tuples with the place of each number in `flat`, equal for equal shapes."""
    indices = iter(range(len(flat(numbers))))

    def placed(part: Values) -> Values:
        return _made(part, [placed(x) for x in part]) if isinstance(part, tuple) else next(indices)

    return placed(numbers)


def unflat(places: Values, numbers: Sequence) -> Values:
    """Return named tuples of numbers, given their `number_places`."""
    return (
        _made(places, [unflat(x, numbers) for x in places]) if isinstance(places, tuple) else numbers[places]
    )


def _made(like: tuple, values: list) -> tuple:
    return tuple(values) if type(like) is tuple else type(like)(*values)
