"""halfstep_torch as a backend: eager, and under torch.compile."""

import functools
import inspect
import math
import re
import types
from collections.abc import Callable

import numpy as np
import torch

import halfstep_torch as hs
from backends.protocol import (
    MEANS,
    Backend,
    adafactor_links,
    codes_of,
    given_factor,
    offset_of,
    ratio_numbers,
    rule_arguments,
    scalar,
    seed_of,
    stored_links,
    stored_names,
    unrefused,
)
from halfstep.rule import declared
from halfstep.rules.adafactor import inverse_power
from halfstep.rules.adamw_fed_back import AdamWFedBack
from halfstep.rules.adamw_in_codes import AdamWInCodes
from halfstep.rules.sgd_fed_back import SGDFedBack
from halfstep.rules.trust_ratio import ScaleByTrustRatio
from halfstep_spec.vectors import WIDTHS, Array, Case
from halfstep_torch.distributed.norms import clip
from halfstep_torch.links.link import ParamInfo
from halfstep_torch.numbers.global_norm import global_norm
from halfstep_torch.numbers.moments import bias_correction
from halfstep_torch.numbers.norms import norm
from halfstep_torch.numbers.op import STEP_OPS, NumbersOp
from halfstep_torch.numbers.random_words import fold, leaf_keys
from halfstep_torch.rules.trust_ratio import ScaleByTemperedTrustRatio
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.relative import to_unit
from halfstep_torch.storage.stored_moment import scale_key
from halfstep_torch.weights.weight_rule import apply_updates
from halfstep_torch.weights.weight_storage import with_param_storage

EXTRA = {"compensated": "compensation", "split8": "extra_bits", "split16": "extra_bits", "master": "master"}

UNBOUNDED = {
    "trust_coefficient": 1.0,
    "min_norm": 0.0,
    "max_norm": math.inf,
    "eps": 0.0,
    "min_ratio": 0.0,
    "max_ratio": math.inf,
}


def to_torch(array: Array) -> torch.Tensor:
    """Return an array of patterns as a tensor of its own dtype, on the default device."""
    bits = array.bits.copy()
    signed = (
        torch.from_numpy(bits.view(f"int{8 * bits.itemsize}"))
        if bits.itemsize > 1
        else torch.from_numpy(bits)
    )
    return signed.view(getattr(torch, array.dtype, torch.uint8)).to(torch.get_default_device())


def from_torch(values: torch.Tensor, label: str = "") -> Array:
    """Return a tensor as patterns; under a label for which torch has no dtype, patterns that are in uint8.

    Codes of 16 bits are in int16, and are patterns all the same.
    """
    values = values.detach().cpu().contiguous()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    bits = values.view(signed).numpy()
    own = str(values.dtype).removeprefix("torch.")
    own = "uint16" if own == "int16" else own
    foreign = own == "uint8" and label in WIDTHS and not hasattr(torch, label)
    return Array.of(bits.view(f"uint{8 * bits.itemsize}"), label if foreign else own)


class TorchBackend(Backend):
    """torch, on its default device.

    Attributes:
        mode: "eager" or "compile": whether steps are plain, or run by kernels.
    """

    def __init__(self, mode: str):
        self.mode = mode

    def fold(self, case: Case) -> dict[str, Array]:
        key = case.inputs["key"].bits
        return {"key": Array.of(np.concatenate(fold((key[:1], key[1:]), case.inputs["x"].bits)))}

    def leaf_id(self, case: Case) -> dict[str, Array]:
        return {"id": Array.of(np.array([hs.leaf_id(case.arguments["leaf"])], np.uint32))}

    def leaf_key(self, case: Case) -> dict[str, Array]:
        leaf, step = hs.leaf_id(case.arguments["leaf"]), int(case.inputs["step"].bits)
        return {"key": Array.of(leaf_keys(seed_of(case), [step], [leaf], [case.arguments["role"]])[0])}

    def random_words(self, case: Case) -> dict[str, Array]:
        a, step = case.arguments, int(case.inputs["step"].bits)
        words = hs.random_words(seed_of(case), step, a["leaf"], a["role"], a["shape"], offset_of(case))
        return {"words": from_torch(words)}

    def round_to(self, case: Case) -> dict[str, Array]:
        a = case.arguments
        words = to_torch(case.inputs["words"]) if "words" in case.inputs else None
        dtype = getattr(torch, a["dtype"], a["dtype"])
        y = hs.round_to(to_torch(case.inputs["x"]), dtype, words, saturate=a["saturate"])
        return {"y": from_torch(y, a["dtype"])}

    def bias_correction(self, case: Case) -> dict[str, Array]:
        values = [bias_correction(scalar(case, "b"), int(t)) for t in case.inputs["count"].bits]
        return {"correction": Array.of(np.array(values, np.float32))}

    def round_stochastically(self, case: Case) -> dict[str, Array]:
        p, u = to_torch(case.inputs["p"]), to_torch(case.inputs["u"])
        step = int(case.inputs["step"].bits)
        words = hs.random_words(seed_of(case), step, case.arguments["leaf"], hs.Role.PARAM, p.shape).view(
            torch.int32
        )
        rule = hs.round_stochastically(seed_of(case)).bind("test", (), ParamInfo(p.dtype, p.shape))

        def apply(p, u, words):
            p32 = p.to(torch.float32)
            if rule is not None:
                u, _ = rule.update(u, p32, {}, (), [lambda shape: words])
            return u, apply_updates(p32, u, p.dtype)

        emitted, applied = apply(p, u, words)
        return {"u": from_torch(emitted), "p": from_torch(applied)}

    def encode(self, case: Case) -> dict[str, Array]:
        a, x = case.arguments, to_torch(case.inputs["x"])
        fmt = Format(a["dtype"], a["scaled"], a["block_size"], 0, 0, **codes_of(case)).for_shape(x.shape)
        words = to_torch(case.inputs["words"]).view(torch.int32) if "words" in case.inputs else None

        def encode(x, words):
            stored = fmt.encode(x, words, keep_nonzero=a["keep_nonzero"])
            return stored, fmt.decode(stored, words)

        stored, values = encode(x, words)
        codes, values = stored.codes.view(fmt.code_shape(x.shape)), values.view(x.shape)
        outputs = {
            "codes": from_torch(codes, "" if fmt.relative else a["dtype"]),
            "values": from_torch(values),
        }
        if stored.scale is None:
            return outputs
        return outputs | {"scale": from_torch(stored.scale.view(fmt.scale_shape(x.shape)))}

    def step(self, case: Case) -> dict[str, Array]:
        i = case.inputs
        p = torch.nn.Parameter(to_torch(i["p"]))
        make = _stored if case.op == "store_state_step" else _optimizer
        optimizer = make(case, p, compile=self.mode == "compile")
        keys = _state_keys(optimizer) | {"extra": EXTRA.get(case.arguments["param_storage"], "")}
        keys = {n: keys[n] for n in stored_names(case)}
        state = {"step": torch.tensor(int(i["count"].bits))}
        for name, key in keys.items():
            state[key] = to_torch(i[name])
            if i[name].dtype == "uint16":
                state[key] = state[key].view(torch.int16)
        optimizer.state[p].update(state)
        rows = []
        for bits in i["g"].bits:
            p.grad = to_torch(Array(i["g"].dtype, bits))
            optimizer.step()
            rows.append([p.detach().clone(), *(optimizer.state[p][key].clone() for key in keys.values())])
        columns = dict(zip(("p", *keys), map(torch.stack, zip(*rows, strict=True)), strict=True))
        return {name: from_torch(x, case.outputs[name].dtype) for name, x in columns.items()}

    def mean(self, case: Case) -> dict[str, Array]:
        x = to_torch(case.inputs["x"])
        return {n: from_torch(STEP_OPS["parameter"].mean(x, axis)) for n, axis in MEANS.items()}

    def inverse_power(self, case: Case) -> dict[str, Array]:
        counts, powers = (case.inputs[n].bits for n in ("count", "power"))
        table = [
            [inverse_power(np.float32(t), c, NumbersOp()) for c in powers.view(np.float32)]
            for t in counts.view(np.int32)
        ]
        return {"y": Array.of(np.array(table, np.float32))}

    def norm(self, case: Case) -> dict[str, Array]:
        return {"norm": from_torch(norm(to_torch(case.inputs["x"])))}

    def to_unit(self, case: Case) -> dict[str, Array]:
        m, v = (to_torch(case.inputs[name]) for name in ("m", "v"))
        return {"z": from_torch(to_unit(m, v))}

    def global_norm(self, case: Case) -> dict[str, Array]:
        tensors = [to_torch(x) for _, x in sorted(case.inputs.items())]
        return {"norm": from_torch(global_norm(tensors, exact=case.arguments.get("exact", True)))}

    def clip(self, case: Case) -> dict[str, Array]:
        u, max_norm = (to_torch(case.inputs[name]) for name in ("u", "max_norm"))
        if "norm" not in case.inputs:
            return {"u": self._link_alone(hs.clip_by_global_norm(max_norm.item(), **case.arguments), u)}
        # Of a norm that is given alone nobody knows that of 2^-64 u: it is given as an infinite one.
        norms = torch.stack([to_torch(case.inputs["norm"]), torch.tensor(math.inf)])
        (clipped,) = clip([u], norms, max_norm)
        return {"u": from_torch(clipped)}

    def accumulate(self, case: Case) -> dict[str, Array]:
        """By backward, whose gradients are the rows."""
        g, name = to_torch(case.inputs["g"]), _parameter_name(case)
        p, totals = torch.nn.Parameter(torch.zeros_like(g[0])), []
        handle = hs.accumulate_gradients([(name, p)], seed=seed_of(case))
        count = int(case.inputs["count"].bits)
        handle.load_state_dict(
            {**handle.state_dict(), "counts": dict.fromkeys(handle.state_dict()["counts"], count)}
        )
        for row in g:
            p.backward(row)
            totals.append(p.grad.clone())
        handle.remove()
        return {"total": from_torch(torch.stack(totals))}

    def ema_params(self, case: Case) -> dict[str, Array]:
        i, parts, root = case.inputs, _parameter_name(case).split("."), torch.nn.Module()
        model = root
        for part in parts[:-1]:
            model.add_module(part, torch.nn.Module())
            model = model.get_submodule(part)
        p, average = torch.nn.Parameter(to_torch(i["average"])), to_torch(i["average"])
        model.register_parameter(parts[-1], p)
        multi_avg_fn, averages = hs.ema_params(root, scalar(case, "decay"), seed_of(case)), []
        for k, bits in enumerate(i["p"].bits):
            p.data.copy_(to_torch(Array(i["p"].dtype, bits)))
            count = torch.tensor(int(i["count"].bits) + k + 1)
            multi_avg_fn([average], [p.detach()], count)
            averages.append(average.clone())
        return {"average": from_torch(torch.stack(averages))}

    def newton_schulz(self, case: Case) -> dict[str, Array]:
        axes = {name: tuple(case.arguments[name]) for name in ("reduction_axis", "output_axis")}
        links = hs.scale_by_muon(beta=0.0, nesterov=False, scale=None, mu_dtype="float32", **axes)
        x = to_torch(case.inputs["x"])
        p = torch.nn.Parameter(torch.zeros_like(x))
        p.grad = x
        # Up the gradient at a rate of 1: from weights of 0 to the factor.
        up = hs.scale_by_learning_rate(1.0, flip_sign=False)
        hs.Optimizer([("w", p)], hs.chain(links, up), compile=self.mode == "compile").step()
        return {"factor": from_torch(p)}

    def trust_ratio(self, case: Case) -> dict[str, Array]:
        given = ratio_numbers(case)
        if "u" in case.inputs:
            p, u = (to_torch(case.inputs[name]) for name in ("p", "u"))
            return {"u": self._link_alone(hs.scale_by_trust_ratio(**given, **case.arguments), u, p)}
        p_norm, u_norm = (to_torch(case.inputs[name]) for name in ("p_norm", "u_norm"))
        n = types.SimpleNamespace(**UNBOUNDED | given, trust_power=given.get("power", 1.0))
        rule = ScaleByTemperedTrustRatio() if n.trust_power != 1 else ScaleByTrustRatio()
        one = torch.ones_like(u_norm)
        return {"ratio": from_torch(rule.ratio(p_norm, u_norm, one, n, STEP_OPS["parameter"]))}

    def _link_alone(self, link: hs.Rule, u: torch.Tensor, p: torch.Tensor | None = None) -> Array:
        """Return what a link makes of updates, as the next one of its chain sees it."""
        seen = []

        class Seen(hs.Rule):
            scope = "parameter"

            def update(self, g, p, n, m, op):
                seen.append(g.clone() if isinstance(g, torch.Tensor) else g)
                return g

        param = torch.nn.Parameter(torch.zeros_like(u) if p is None else p)
        param.grad = u
        hs.Optimizer([("w", param)], hs.chain(link, Seen()), compile=self.mode == "compile").step()
        return from_torch(seen[-1])


# Classes whose names do not say the rule and the kind of decay; `Lion` says "lion", decoupled.
_CLASSES = {
    ("adam_step", "l2"): hs.Adam,
    ("adam_step", "decoupled"): hs.AdamW,
    ("adam_step", "cautious"): functools.partial(hs.AdamW, cautious=True),
    ("lion_step", "cautious"): functools.partial(hs.Lion, cautious=True),
    ("trace_step", "l2"): hs.SGD,
}


def _optimizer(case: Case, p: torch.nn.Parameter, **options) -> torch.optim.Optimizer:
    """Return the public class that a case asks for, or its chain where the class has no such argument."""
    rule, storage = unrefused(rule_arguments(case, hs)), case.arguments["param_storage"]
    decay, rate = scalar(case, "weight_decay"), scalar(case, "learning_rate")
    named = [(_parameter_name(case), p)]
    if case.op == "adafactor_step":
        links = hs.chain(*adafactor_links(case, hs))
        return hs.Optimizer(named, with_param_storage("step", links, storage, seed_of(case)), **options)
    if case.op == "adamw_in_codes_step":
        return hs.Optimizer(named, hs.chain(AdamWInCodes(rate, **rule, weight_decay=decay)), **options)
    if "rates" in case.inputs:
        first, rates = int(case.inputs["count"].bits), case.inputs["rates"].bits.view(np.float32).tolist()
        rate = lambda count: rates[min(max(count - first, 0), len(rates) - 1)]  # noqa: E731
        rule_class = AdamWFedBack if case.op == "adamw_fed_back_step" else SGDFedBack
        decays = {"weight_decay": decay} if rule_class is AdamWFedBack else {}
        return hs.Optimizer(named, hs.chain(rule_class(rate, **rule, **decays)), **options)
    if case.op == "adamw_fed_back_step":
        return _fed_back(case, named, rate, decay, rule, options)
    if case.op == "sgd_fed_back_step":
        return _sgd_fed_back(named, rate, decay, rule, options)
    make = None if case.arguments.get("given") else _class(case, rule)
    given = _class_arguments(make, _link(case.op), rule) if make else None
    if given is not None:
        return make(named, rate, weight_decay=decay, **given, param_storage=storage, **options)
    seed, links = seed_of(case), [*_links(case, rule), hs.scale_by_learning_rate(rate)]
    link = hs.add_decayed_weights(decay, cautious=case.arguments["decay"] == "cautious")
    links.insert(0 if case.arguments["decay"] == "l2" else 1, link)
    return hs.Optimizer(named, with_param_storage("step", hs.chain(*links), storage, seed), **options)


def _fed_back(case: Case, named, rate, decay, rule: dict, options: dict) -> torch.optim.Optimizer:
    """Return the class by `param_storage="feedback"`, or a chain for what the class has not."""
    if rule.get("nesterov") or rule["eps_root"] or not rule["b1"]:
        return hs.Optimizer(named, hs.chain(AdamWFedBack(rate, **rule, weight_decay=decay)), **options)
    del rule["eps_root"]
    betas, peak = (rule.pop("b1"), rule.pop("b2")), rule.pop("peak_lr")
    make = hs.Adam if case.arguments["decay"] == "l2" else hs.AdamW
    given = {"betas": betas, **rule, "weight_decay": decay, "param_storage": "feedback"}
    optimizer = make(named, rate, **given, **options)
    if peak:
        optimizer.param_groups[0]["initial_lr"] = float(peak)  # as a scheduler writes it
    return optimizer


def _sgd_fed_back(named, rate, decay, rule: dict, options: dict) -> torch.optim.Optimizer:
    """Return SGD by `param_storage="feedback"`, or a chain without momentum, which the class refuses."""
    if not rule["decay"]:
        return hs.Optimizer(named, hs.chain(SGDFedBack(rate, **rule)), **options)
    momentum, peak = rule.pop("decay"), rule.pop("peak_lr")
    optimizer = hs.SGD(named, rate, momentum, weight_decay=decay, param_storage="feedback", **rule, **options)
    if peak:
        optimizer.param_groups[0]["initial_lr"] = float(peak)
    return optimizer


def _class(case: Case, rule: dict) -> type | None:
    """Return the public class of a rule and a kind of decay, or None."""
    if "trust_power" in rule:
        return hs.Lamb16
    named = getattr(hs, case.op.removesuffix("_step").capitalize(), None)
    decoupled = named if case.arguments["decay"] == "decoupled" else None
    return _CLASSES.get((case.op, case.arguments["decay"]), decoupled)


def _class_arguments(make: type, link: Callable, rule: dict) -> dict | None:
    """Return a rule's arguments as its class takes them; None where that has one of them not."""
    taken, defaults = inspect.signature(make).parameters, inspect.signature(link).parameters
    given = {{"decay": "momentum"}.get(name, name): value for name, value in rule.items()}
    if "betas" in taken:
        betas = sorted(name for name in given if re.fullmatch(r"b\d", name))
        given["betas"] = tuple(given.pop(name) for name in betas)
    if "max_norm" in taken:
        given.setdefault("max_norm", None)
    others = [name for name in given if name not in taken]
    if any(given[name] != defaults[name].default for name in others):
        return None
    return {name: value for name, value in given.items() if name in taken}


def _link(op: str) -> Callable:
    """Return the public function that makes the rule of an op."""
    name = op.removesuffix("_step")
    name = "adam" if name == "lamb" else name
    return getattr(hs, f"scale_by_{name}", None) or getattr(hs, name)


def _links(case: Case, rule: dict) -> list[hs.Rule]:
    """Return the links of a rule, without those of decay and learning rate."""
    if case.arguments.get("given"):
        return [given_factor(rule, hs)]
    if case.op != "lamb_step":
        return [_link(case.op)(**rule)]
    ratio = hs.scale_by_trust_ratio(max_norm=rule.pop("max_norm", None), exact=rule.pop("exact", False))
    return [_link(case.op)(**rule), ratio]


def _stored(case: Case, p: torch.nn.Parameter, **options) -> torch.optim.Optimizer:
    """Return a chain whose update rule has its state stored."""
    return hs.Optimizer([(_parameter_name(case), p)], hs.chain(*stored_links(case, hs)), **options)


def _state_keys(optimizer: hs.Optimizer) -> dict[str, str]:
    """Return torch's names for the moments of an optimizer and their scales, by those of the contract."""
    keys = {}
    for link in optimizer._choices[0].chain.links:
        for name, moment in declared(type(link.rule)).moments.items():
            keys |= {name: moment.torch, f"{name}_scale": scale_key(moment.torch)}
    return keys


def _parameter_name(case: Case) -> str:
    return case.arguments["leaf"].replace("/", ".")
