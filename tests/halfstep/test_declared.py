"""What a rule declares is read from its fields: numbers of a program, and what a program is made for."""

from typing import Any

from halfstep.rule import Rule, decay_rate, declared, moment, option


class Averaged(Rule):
    """A rule with a field of each kind."""

    b1: Any = decay_rate(0.9, torch="betas[0]")
    corrected: bool = option(True)
    nesterov: bool = False
    mu_dtype: Any = None
    mu_rounding: str = "auto"
    seed: Any = 0
    mu = moment(rate="b1", torch="exp_avg")


def test_fields_are_numbers_or_options_of_the_host_or_of_the_program():
    found = declared(Averaged)
    assert set(found.numbers) == {"b1"}
    assert found.host_options == ("corrected",)
    assert found.options == ("nesterov",)
    assert set(found.moments) == {"mu"}
    assert found.moments["mu"].dtype == "mu_dtype"
