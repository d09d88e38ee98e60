"""Entries of a param group that a rule reads: its numbers and the formats of its moments."""

import collections
import dataclasses
import functools
from collections.abc import Callable

from halfstep import hyperparameters
from halfstep.hyperparameters import Scalar
from halfstep.rule import Hyperparameter, Rule, declared
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.numbers.hyperparameters import checked
from halfstep_torch.numbers.schedules import Scheduled
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_dtypes import as_format

Read = float | Scheduled | Format | None
"""Checked value of a field in a param group."""
Check = Callable[[str, str, Scalar], Read]


@dataclasses.dataclass(frozen=True)
class Entry:
    """The entry of a param group for a field of a rule.

    Attributes:
        field: the name of the rule's field.
        key: the key of the entry, or "" if only the rule holds the value.
        index: the index of the value in an entry with several values, else None.
        count: the number of values in such an entry.
        owned: whether the rule gives the entry its default.
        check: a function from (caller, name, value) to the value in canonical form, which raises if it is
            wrong.
    """

    field: str
    key: str
    index: int | None
    count: int
    owned: bool
    check: Check

    def read(self, caller: str, rule: Rule, group: Group) -> Read:
        """Return the value in a param group, checked."""
        if not self.key:
            return self.check(caller, self.field, getattr(rule, self.field))
        if self.index is None:
            return self.check(caller, self.key, group[self.key])
        values = hyperparameters.several(caller, self.key, group[self.key], self.count)
        return self.check(caller, f"{self.key}[{self.index}]", values[self.index])


@functools.cache
def entries_of(rule: type[Rule]) -> tuple[Entry, ...]:
    """Return the entries that a class of rules reads, in the order of its fields."""
    declarations = declared(rule)
    # The format of kept weights is not an entry of groups, because other chains do not have it.
    formats = {m.dtype: None if m.copies_weights else "" for m in declarations.moments.values() if m.dtype}
    places: dict[str, str | None] = {field: number.torch for field, number in declarations.numbers.items()}
    places |= formats
    keys = {
        field: "" if place is None else (place or field).partition("[")[0] for field, place in places.items()
    }
    counts = collections.Counter(keys.values())
    entries = []
    fields: tuple[dataclasses.Field, ...] = dataclasses.fields(rule)  # pyright: ignore[reportArgumentType]
    for field in (field.name for field in fields if field.name in places):
        number, key = declarations.numbers.get(field), keys[field]
        check = as_format if number is None else _check_of(number)
        index = (places[field] or "").partition("[")[2].rstrip("]")
        owned = bool(key) and (number is None or number.owned)
        entries.append(Entry(field, key, int(index) if index else None, counts[key], owned, check))
    return tuple(entries)


def _check_of(number: Hyperparameter) -> Check:
    def check(caller: str, name: str, value: Scalar) -> Read:
        # State dicts hold numbers, so only the learning rate may be a function.
        if number.schedule and number.torch == "lr" and callable(value):
            return Scheduled(caller, name, value)  # pyright: ignore[reportArgumentType]
        if value is None and number.none is not None:
            return number.none
        return checked(caller, name, value, number.check)

    return check
