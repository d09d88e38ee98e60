"""The spec itself as a backend: the runner must pass it, and the meta-tests break it."""

import dataclasses
import functools

import numpy as np

import halfstep_spec as spec
from backends.protocol import (
    MEANS,
    RATIO_ARRAYS,
    Backend,
    codes_of,
    format_of,
    offset_of,
    ratio_numbers,
    rule_arguments,
    scalar,
    seed_of,
)
from halfstep_spec.cases.steps import stored_arrays
from halfstep_spec.numbers.global_norm import global_norm
from halfstep_spec.numbers.means import inverse_power, mean
from halfstep_spec.numbers.newton_schulz import newton_schulz
from halfstep_spec.numbers.random_words import next_step
from halfstep_spec.rules.adafactor import Adafactor
from halfstep_spec.rules.adamw_fed_back import FedBack
from halfstep_spec.rules.adamw_in_codes import InCodes
from halfstep_spec.rules.clip import clip, clip_by_global_norm
from halfstep_spec.rules.sgd_fed_back import FedBackSGD
from halfstep_spec.storage.relative import to_unit
from halfstep_spec.vectors import Array, Case


class SpecBackend(Backend):
    """NumPy."""

    def fold(self, case: Case) -> dict[str, Array]:
        key, x = case.inputs["key"].bits, case.inputs["x"].bits
        return {"key": Array.of(np.concatenate(spec.fold(key, x)))}

    def leaf_id(self, case: Case) -> dict[str, Array]:
        return {"id": Array.of(np.array([spec.leaf_id(case.arguments["leaf"])], np.uint32))}

    def leaf_key(self, case: Case) -> dict[str, Array]:
        leaf = spec.leaf_id(case.arguments["leaf"])
        key = spec.leaf_key(seed_of(case), int(case.inputs["step"].bits), leaf, case.arguments["role"])
        return {"key": Array.of(np.concatenate(key))}

    def random_words(self, case: Case) -> dict[str, Array]:
        a, step = case.arguments, int(case.inputs["step"].bits)
        words = spec.random_words(seed_of(case), step, a["leaf"], a["role"], a["shape"], offset_of(case))
        return {"words": Array.of(words)}

    def round_to(self, case: Case) -> dict[str, Array]:
        a, x = case.arguments, case.inputs["x"].bits.view(np.float32)
        words = case.inputs["words"].bits if "words" in case.inputs else None
        return {"y": Array.of(spec.round_to(x, a["dtype"], words, saturate=a["saturate"]), a["dtype"])}

    def bias_correction(self, case: Case) -> dict[str, Array]:
        counts = case.inputs["count"].bits
        values = [spec.bias_correction(scalar(case, "b"), int(t)) for t in counts]
        return {"correction": Array.of(np.array(values, np.float32))}

    def round_stochastically(self, case: Case) -> dict[str, Array]:
        p, u = case.inputs["p"], case.inputs["u"].bits.view(np.float32)
        storage = spec.param_storage("stochastic", p.dtype)
        step = int(case.inputs["step"].bits)
        words = spec.random_words(seed_of(case), step, case.arguments["leaf"], spec.Role.PARAM, u.shape)
        with np.errstate(invalid="ignore", over="ignore"):
            emitted, _ = storage.emit(p.bits, u, None, words)
            applied = spec.apply_updates(p.bits, emitted, p.dtype)
        return {"u": Array.of(emitted), "p": Array.of(applied, p.dtype)}

    def encode(self, case: Case) -> dict[str, Array]:
        a, x = case.arguments, case.inputs["x"].bits.view(np.float32)
        fmt = spec.Format(a["dtype"], a["scaled"], a["block_size"], 0, 0, **codes_of(case))
        words = case.inputs["words"].bits if "words" in case.inputs else None
        stored = fmt.encode(x, words, keep_nonzero=a["keep_nonzero"])
        outputs = {
            "codes": Array.of(stored.codes, fmt.codes.dtype),
            "values": Array.of(fmt.decode(stored, words)),
        }
        return outputs | ({} if stored.scale is None else {"scale": Array.of(stored.scale)})

    def to_unit(self, case: Case) -> dict[str, Array]:
        return {"z": Array.of(to_unit(*(case.inputs[name].bits.view(np.float32) for name in ("m", "v"))))}

    def step(self, case: Case) -> dict[str, Array]:
        a, i = case.arguments, case.inputs
        options = rule_arguments(case, spec)
        beside = ("max_norm", "trust_power", "exact", "clipping_threshold", "min_scale")
        bounds = {n: options.pop(n) for n in beside if n in options}
        name = a.get("inner", case.op).removesuffix("_step")
        rule = spec.RULES["adam" if name == "lamb" else name](**options)
        if "inner" in a:
            select = a["select"] and tuple(a["select"])
            fmt = format_of(a["state_format"], spec)
            rule = spec.StoreState(rule, fmt, a["state_rounding"], select, rule.seed)
        kinds: dict[str, type[spec.Step]] = {"lamb": spec.Lamb, "adafactor": Adafactor}
        kinds |= {"adamw_in_codes": InCodes, "adamw_fed_back": FedBack, "sgd_fed_back": FedBackSGD}
        make = functools.partial(kinds.get(name, spec.Step), **bounds)
        step = make(rule, scalar(case, "weight_decay"), a["decay"], i["p"].dtype, a["param_storage"])
        if "rates" in i:
            rates = tuple(map(float, i["rates"].bits.view(np.float32)))
            step = dataclasses.replace(step, first=int(i["count"].bits), rates=rates)  # pyright: ignore
        stored = {
            n: spec.Encoded(i[n].bits, _bits(i, f"{n}_scale"), moment.shape(i["p"].bits.shape))
            for n, moment in rule.moments.items()
        }
        state = spec.StepState(spec.RuleState(int(i["count"].bits), stored), _bits(i, "extra"))
        p, rows = i["p"].bits, []
        with np.errstate(invalid="ignore", over="ignore"):
            for g in spec.decode(i["g"].bits, i["g"].dtype):
                p, state = step.step(p, g, state, a["leaf"], scalar(case, "learning_rate"))
                rows.append(stored_arrays(step, p, state))
        return {n: Array.of(np.stack([row[n].bits for row in rows]), x.dtype) for n, x in rows[0].items()}

    def mean(self, case: Case) -> dict[str, Array]:
        x = case.inputs["x"].bits.view(np.float32)
        return {n: Array.of(mean(x, axis)) for n, axis in MEANS.items()}

    def inverse_power(self, case: Case) -> dict[str, Array]:
        counts, powers = (case.inputs[n].bits for n in ("count", "power"))
        table = [[inverse_power(t, c) for c in powers.view(np.float32)] for t in counts.view(np.int32)]
        return {"y": Array.of(np.array(table, np.float32))}

    def norm(self, case: Case) -> dict[str, Array]:
        x = case.inputs["x"]
        with np.errstate(invalid="ignore", over="ignore"):
            return {"norm": Array.of(spec.norm(spec.decode(x.bits, x.dtype)))}

    def global_norm(self, case: Case) -> dict[str, Array]:
        arrays = [x.bits.view(np.float32) for _, x in sorted(case.inputs.items())]
        with np.errstate(over="ignore"):
            exact = case.arguments.get("exact", True)
            return {"norm": Array.of(global_norm(arrays, exact=exact))}

    def clip(self, case: Case) -> dict[str, Array]:
        given = {name: x.bits.view(np.float32) for name, x in case.inputs.items()}
        with np.errstate(invalid="ignore"):
            if "norm" not in given:
                return {"u": Array.of(clip_by_global_norm(given["u"], given["max_norm"], **case.arguments))}
            return {"u": Array.of(clip(**given))}

    def accumulate(self, case: Case) -> dict[str, Array]:
        g, count, leaf = case.inputs["g"], int(case.inputs["count"].bits), case.arguments["leaf"]
        total, rows = spec.round_to(np.full(g.bits.shape[1], -0.0, np.float32), g.dtype), []
        with np.errstate(invalid="ignore", over="ignore"):
            for gradient in spec.decode(g.bits, g.dtype):
                count = next_step(count)
                words = spec.random_words(seed_of(case), count, leaf, spec.Role.ACCUMULATOR, gradient.shape)
                total = spec.accumulate(total, gradient, g.dtype, words)
                rows.append(total)
        return {"total": Array.of(np.stack(rows), g.dtype)}

    def ema_params(self, case: Case) -> dict[str, Array]:
        i, leaf = case.inputs, case.arguments["leaf"]
        average, count, rows = i["average"].bits, int(i["count"].bits), []
        for p in i["p"].bits:
            count = next_step(count)
            words = spec.random_words(seed_of(case), count, leaf, spec.role_of("ema"), p.shape)
            average = spec.ema_params(average, p, scalar(case, "decay"), i["p"].dtype, words)
            rows.append(average)
        return {"average": Array.of(np.stack(rows), i["p"].dtype)}

    def newton_schulz(self, case: Case) -> dict[str, Array]:
        a, x = case.arguments, case.inputs["x"].bits.view(np.float32)
        return {"factor": Array.of(newton_schulz(x, a["reduction_axis"], a["output_axis"]))}

    def trust_ratio(self, case: Case) -> dict[str, Array]:
        arrays = [case.inputs[name].bits.view(np.float32) for name in RATIO_ARRAYS if name in case.inputs]
        rule = spec.ScaleByTrustRatio(**ratio_numbers(case), **case.arguments)
        if "u" in case.inputs:
            p, u = arrays
            with np.errstate(over="ignore"):
                return {"u": Array.of(rule.update(u, p, None, None))}
        return {"ratio": Array.of(rule.ratio(*arrays))}


def _bits(inputs: dict[str, Array], name: str) -> np.ndarray | None:
    if name not in inputs:
        return None
    array = inputs[name]
    return array.bits.view(np.float32) if array.dtype == "float32" else array.bits
