"""The spec itself as a backend: the runner must pass it, and the meta-tests break it."""

import numpy as np

import halfstep_spec as spec
from backends.protocol import Backend, offset_of, scalar, seed_of
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
        step = int(case.inputs["step"].bits)
        words = spec.random_words(seed_of(case), step, case.arguments["leaf"], spec.Role.PARAM, u.shape)
        with np.errstate(invalid="ignore", over="ignore"):
            emitted = spec.round_stochastically(p.bits, u, p.dtype, words)
            landed = spec.apply_updates(p.bits, emitted, p.dtype)
        return {"u": Array.of(emitted), "p": Array.of(landed, p.dtype)}

    def adam_step(self, case: Case) -> dict[str, Array]:
        a, i = case.arguments, case.inputs
        names = ("mu_dtype", "nu_dtype", "mu_rounding", "nu_rounding", "nesterov")
        hyper = {name: scalar(case, name) for name in ("b1", "b2", "eps", "eps_root")}
        adam = spec.ScaleByAdam(**hyper, **{name: a[name] for name in names}, seed=seed_of(case))
        decay = scalar(case, "weight_decay")
        step = spec.AdamStep(adam, decay, a["decay"], i["p"].dtype, a["param_storage"])
        p, state = i["p"].bits, spec.AdamState(int(i["count"].bits), i["mu"].bits, i["nu"].bits)
        rows = []
        with np.errstate(invalid="ignore", over="ignore"):
            for g in spec.decode(i["g"].bits, i["g"].dtype):
                p, state = step.step(p, g, state, a["leaf"], scalar(case, "learning_rate"))
                rows.append((p, state.mu, state.nu))
        dtypes = {"p": i["p"].dtype, "mu": a["mu_dtype"], "nu": a["nu_dtype"]}
        columns = zip(dtypes.items(), zip(*rows, strict=True), strict=True)
        return {name: Array.of(np.stack(column), dtype) for (name, dtype), column in columns}
