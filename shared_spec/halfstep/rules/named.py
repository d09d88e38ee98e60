"""Named optimizers: their links in order, and their arguments.

The JAX functions and torch classes declare the arguments and their defaults.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping

from halfstep.hyperparameters import Arguments
from halfstep.rule import Moment, Rule, declared
from halfstep.rules.adam import ScaleByAdam
from halfstep.rules.adamw_fed_back import AdamFedBack, fed_back
from halfstep.rules.adamw_in_codes import in_codes
from halfstep.rules.adan import ScaleByAdan
from halfstep.rules.ademamix import ScaleByAdemamix
from halfstep.rules.learning_rate import ScaleByLearningRate
from halfstep.rules.lion import ScaleByLion
from halfstep.rules.muon import MuonMomentum
from halfstep.rules.rms import ScaleByRms
from halfstep.rules.schedule_free import ScaleByScheduleFree
from halfstep.rules.sgd_fed_back import sgd_fed_back
from halfstep.rules.trace import Trace
from halfstep.rules.trust_ratio import ScaleByTemperedTrustRatio, ScaleByTrustRatio, without_feedback
from halfstep.rules.weight_decay import AddDecayedWeights
from halfstep.weight_storage import FED_BACK, IN_CODES


@dataclasses.dataclass(frozen=True)
class Part:
    """A link of a named optimizer.

    Attributes:
        rule: class of the rule.
        renamed: the argument for each field that has another name than its argument.
        fixed: values for fields without an argument.
        needs: the argument without which the link is left out, or "" if the link is always applied.
        before_norms: whether norms are computed from its updates, so that errors in `mu` are not fed back.
    """

    rule: type[Rule]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fixed: Arguments = dataclasses.field(default_factory=dict)
    needs: str = ""
    before_norms: bool = False

    def fields(self, names: Iterable[str], arguments: Arguments) -> Arguments:
        """Return the values that an optimizer's arguments give to fields."""
        sources = {field: self.renamed.get(field, field) for field in names}
        given = {field: arguments[name] for field, name in sources.items() if name in arguments}
        if self.before_norms:
            given["mu_rounding"] = without_feedback(given["mu_rounding"])
        return given | dict(self.fixed)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The rule's moments, with the optimizer's arguments for their formats and roundings."""
        return tuple(
            dataclasses.replace(
                moment,
                dtype=self.renamed.get(moment.dtype, moment.dtype),
                rounding=self.renamed.get(moment.rounding, moment.rounding),
            )
            for moment in declared(self.rule).moments.values()
        )


@dataclasses.dataclass(frozen=True)
class Named:
    """A named optimizer.

    Attributes:
        alias: its name in JAX. The torch class has its own name.
        parts: the links in the order in which they are applied. The weight storage comes after them.
        choices: boolean arguments that a torch param group may set for itself.
        whole: for each weight storage, a function from (caller, arguments) to the one rule that replaces all
            links except `front` (contract A20, A21).
    """

    alias: str
    parts: tuple[Part, ...]
    choices: tuple[str, ...] = ()
    whole: Mapping[str, Callable[[str, Arguments], Rule]] = dataclasses.field(default_factory=dict)

    @property
    def front(self) -> "Named":
        """The links in front of a rule for the whole step, namely L2 decay."""
        return dataclasses.replace(self, parts=tuple(itertools.takewhile(_is_decay, self.parts)))

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The moments of all links, with the arguments for their formats and roundings."""
        return tuple(moment for part in self.parts for moment in part.moments)

    @property
    def arguments(self) -> frozenset[str]:
        """The arguments for all fields of the links, by their names in JAX."""
        fields = [(part, field.name) for part in self.parts for field in dataclasses.fields(part.rule)]  # pyright: ignore
        return frozenset(part.renamed.get(name, name) for part, name in fields)


def _is_decay(part: Part) -> bool:
    return part.rule is AddDecayedWeights


_DECAY, _RATE = Part(AddDecayedWeights, needs="weight_decay"), Part(ScaleByLearningRate)
_ADAM = Part(ScaleByAdam)
_ADAM_BEFORE_NORMS = Part(ScaleByAdam, before_norms=True)
_ADAM_BESIDE_MUON = Part(
    ScaleByAdam,
    renamed={"mu_dtype": "adam_mu_dtype", "mu_rounding": "adam_mu_rounding"}
    | {name: f"adam_{name}" for name in ("b1", "b2", "eps", "eps_root")},
    fixed={"nesterov": False, "bias_correction": True},  # the arguments of these names are Muon's
)
_RMS = Part(ScaleByRms, renamed={"decay": "b2"}, fixed={"eps_in_sqrt": False, "bias_correction": True})

# A decay in front is added to the gradient and scaled with it (L2).
_BEHIND_L2 = functools.partial(fed_back, kind=AdamFedBack)
ADAM = Named("adam", (_DECAY, _ADAM, _RATE), whole={FED_BACK: _BEHIND_L2})
ADAMW = Named("adamw", (_ADAM, _DECAY, _RATE), whole={IN_CODES: in_codes, FED_BACK: fed_back})
ADAN = Named("adan", (Part(ScaleByAdan), _DECAY, _RATE))
ADEMAMIX = Named("ademamix", (Part(ScaleByAdemamix), _DECAY, _RATE))
_TRUST = Part(ScaleByTrustRatio, fixed={"eps": 0.0})  # the argument `eps` is Adam's
LAMB = Named("lamb", (_ADAM_BEFORE_NORMS, _DECAY, _TRUST, _RATE))
LAMB16 = Named("lamb16", (_ADAM_BEFORE_NORMS, _DECAY, Part(ScaleByTemperedTrustRatio), _RATE))
LION = Named("lion", (Part(ScaleByLion), _DECAY, _RATE))
_SUM = Part(Trace, renamed={"decay": "momentum"}, needs="momentum")
SGD = Named("sgd", (_DECAY, _SUM, _RATE), ("nesterov",), whole={FED_BACK: sgd_fed_back})
SCHEDULE_FREE_ADAMW = Named("schedule_free_adamw", (_RMS, _DECAY, _RATE, Part(ScaleByScheduleFree)))
# Two chains, one for matrices, with their factor after the momentum, and one for the rest.
MUON_OF_MATRICES = Named("muon", (Part(MuonMomentum), _DECAY, _RATE))
MUON_OF_THE_REST = Named("muon", (_ADAM_BESIDE_MUON, _DECAY, _RATE))
MUON = Named("muon", (*MUON_OF_MATRICES.parts, *MUON_OF_THE_REST.parts))
