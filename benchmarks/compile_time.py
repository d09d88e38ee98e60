"""What a first step costs before it runs: seconds to trace, lower and compile it, and equations per leaf.

    python benchmarks/compile_time.py [--leaves 10 50 100] [--shapes 30] [--repeats 3]
        [--json benchmarks/results/NAME.json]

Trees of bfloat16 leaves, of 30 shapes at most, as models repeat theirs. Processor time, the least of some
turns: what else a machine does changes that little. Nothing is kept of a step before. Equations are those of
the whole traced step; what several calls share counts once.
"""

import argparse
import itertools
import json
import pathlib
import platform
import time

import jax
import jax.extend
import jax.numpy as jnp
import optax

import halfstep_jax as hs

FP8 = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
STEPS = {
    "optax.adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "adamw": lambda: hs.adamw(1e-3, weight_decay=0.1),
    "adamw, split16": lambda: hs.adamw(1e-3, weight_decay=0.1, param_storage="split16"),
    "adamw, fp8": lambda: hs.adamw(1e-3, weight_decay=0.1, **FP8),
    "adamw, eight_bit": lambda: hs.adamw(1e-3, weight_decay=0.1, recipe="eight_bit"),
    "adamw, four_bit": lambda: hs.adamw(1e-3, weight_decay=0.1, recipe="four_bit"),
    "lamb": lambda: hs.lamb(1e-3, weight_decay=0.1),
    "optax.yogi": lambda: optax.yogi(1e-3),
    "store_state(optax.yogi)": lambda: hs.store_state(optax.yogi(1e-3), "bfloat16"),
}


def measure(tx, leaves: int, kinds: int) -> dict[str, float]:
    """Return seconds and equations of one step of `tx` on leaves of so many shapes, nothing of it traced."""
    jax.clear_caches()
    shapes = [(64 + 8 * (i % kinds), 128) for i in range(leaves)]
    params = {f"layer_{i}/kernel": jax.ShapeDtypeStruct(s, jnp.bfloat16) for i, s in enumerate(shapes)}
    state = jax.eval_shape(tx.init, params)

    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    times = [time.process_time()]
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, params)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    compiled = lowered.compile()
    times.append(time.process_time())
    trace, lower, compile_ = (after - before for before, after in itertools.pairwise(times))
    memory = compiled.memory_analysis()
    return {
        "trace": trace,
        "lower": lower,
        "compile": compile_,
        "total": times[-1] - times[0],
        "equations per leaf": _equations(traced.jaxpr.jaxpr, set()) / leaves,
        "temporaries": memory.temp_size_in_bytes if memory else 0,
    }


def _least(found: list[dict[str, float]]) -> dict[str, float]:
    """Return what took the least time in all."""
    return min(found, key=lambda row: row["total"])


def _equations(jaxpr, seen: set[int]) -> int:
    """Count the equations of a program and of those that it calls, each of these once."""
    if id(jaxpr) in seen:
        return 0
    seen.add(id(jaxpr))
    called = (j for eqn in jaxpr.eqns for j in jax.extend.core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(_equations(j, seen) for j in called)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--repeats", type=int, default=1, help="the least of so many is shown")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    measure(optax.sgd(1e-3), 1, 1)  # what the first compilation of a process costs is nobody's
    keys = [(name, n) for n in args.leaves for name in args.steps]
    turns = [
        {(name, n): measure(STEPS[name](), n, args.shapes) for name, n in keys} for _ in range(args.repeats)
    ]
    rows = {key: _least([turn[key] for turn in turns]) for key in keys}
    columns = list(next(iter(rows.values())))
    print("| step | leaves |", " | ".join(columns), "|\n|---|--:|" + "--:|" * len(columns))
    for (name, n), row in rows.items():
        print(f"| {name} | {n} |", " | ".join(f"{row[column]:.2f}" for column in columns), "|", flush=True)
    if args.json:
        record = {"machine": platform.processor() or platform.machine(), "jax": jax.__version__}
        record["shapes"] = args.shapes
        found = [{"step": name, "leaves": n, **row} for (name, n), row in rows.items()]
        args.json.write_text(json.dumps(record | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
