"""Schedule-free averaging behind any update (contract A17)."""

from halfstep.hyperparameters import Scalar, check_count
from halfstep.rule import Rule, decay_rate, moment, number
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding


class ScaleByScheduleFree(Rule):
    """Average the weights during training, so that no learning rate schedule is needed.

    The link comes after the learning rate. As in the paper, updates step z, and x is the average of z.
    Gradients are computed at the weights, y = ((1 - b1) z) + (b1 x). The state keeps the lead, y - x. It
    starts at 0 and is only as long as some steps, so that 16 or 8 bits for it lose less than for z, and x
    needs no division. With t the step count, W the larger of `warmup_steps` and 1, k = min(t, W), and the
    averaging weights (k / W)^2:

        c = 1 / (t - k + ((k + 1) (2 k + 1)) / (6 k))
        d = ((1 - b1) (k / W)) g,  led = lead + d
        lead <- round((1 - c) led)
        u = d + ((b1 / (1 - b1)) c) led

    All in float32, each operation rounded once. u is computed before `lead` is stored. Evaluate the averaged
    weights, y - lead, which `schedule_free_eval_params` returns. Warm up only with `warmup_steps`, because a
    learning rate that rises by itself is averaged as if it were constant.

    The group entries in torch are `momentum` (for `b1`), `warmup_steps` and `lead_dtype`.

    Args:
        b1: share of the average in the weights, as a decay rate.
        warmup_steps: number of steps over which updates grow to their whole length.
        lead_dtype: format of the lead, which has a sign, as `mu_dtype` in `scale_by_adam`.
        lead_rounding: "stochastic", because the lead would freeze if rounded to nearest.
        seed: seed for the random words, an integer in [0, 2^64) or two uint32 words (high, low).

    Raises:
        ValueError: as in `scale_by_adam`, and if `warmup_steps` is not a whole number >= 0, or
            `lead_rounding` is to nearest.

    Example:
        >>> ScaleByScheduleFree(warmup_steps=100, lead_dtype="bfloat16").name
        'scale_by_schedule_free'

    Source: A. Defazio et al., "The Road Less Scheduled", arXiv:2405.15682, algorithm 1. The averaging weights
        are as in the authors' code, the square of the largest learning rate so far. Storage is ours (contract
        A17, F).
    """

    b1: Scalar = decay_rate(0.9, torch="momentum")
    warmup_steps: Scalar = number(0, check=check_count, none=0.0)
    lead_dtype: DType = None
    lead_rounding: Rounding = "stochastic"
    seed: Seed = 0
    lead = moment(torch="lead", errors="lasting")

    def __post_init__(self) -> None:
        """Raise an error for rounding to nearest, with which the average would stall."""
        if self.lead_rounding in ("nearest", "auto"):
            raise ValueError(
                f"{self.name}: lead_rounding={self.lead_rounding!r} freezes the average: step t moves it by "
                'a share of 1/t. Use "stochastic", or "nearest_unchecked" all the same.'
            )

    def numbers(self, h, t, op):
        """Return the factors for the update, for the lead that is kept, and for its pull on the weights."""
        t = op.float32(t)
        w = op.maximum(h.warmup_steps, 1)
        k = op.minimum(t, w)
        c = 1 / ((t - k) + ((k + 1) * (2 * k + 1)) / (6 * k))
        rest = 1 - h.b1
        return {"ahead": rest * (k / w), "keep": 1 - c, "pull": (h.b1 / rest) * c}

    def update(self, g, p, n, m, op):
        """Return d + (pull led), from the lead before it is stored."""
        d = n.ahead * g
        led = m.lead.value + d
        m.lead.round(n.keep * led)
        return d + n.pull * led
