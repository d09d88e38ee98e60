"""What fine-tuning at 1e-5 and 1e-6 keeps of float32's run, by the way 16-bit weights are stored.

    make fine-tuning
    python benchmarks/fine_tuning.py [--only TEXT ...] [--json benchmarks/results/NAME.json]

A transformer of 3.23 million parameters is trained in float32 on the source of Python's standard library, as
characters, at a rate that stays and falls to 0 in the last fifth of the steps. Its weights are rounded to
bfloat16, and every row goes on from there on other text, Python's documentation in English: AdamW, 150 steps
of 4 x 64 characters, a warm-up of 15, a cosine to 0, three seeds of batches and random words. Products are of
float32 copies of the weights, so rows differ in how weights and state are kept alone.

Printed are mean and standard deviation over seeds. *loss*: on validation text, in nats per character, less
that of the float32 run. *KL*: of the float32 run's model to this one, nats per character. *moved*: the share
of weights that are not what they were. *dist* = |w - w32| / |w32 - w0|; *proj* is the projection of the
movement on float32's. Weights are read with what an optimizer keeps beside them, but where a row says so.

The trained model and the ends of float32 runs are kept in a folder of the user's caches. With `--json` each
run is written as it ends, and a run that stands there is not run again.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import halfstep_torch as hs
import report

# Behind this folder, whose `report` is another than that of the examples.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import text as topics
import train_torch
from recipe import Recipe
from recipe import Row as Weights

RATES, SEEDS, STEPS, WARM_UP, BATCH = ("1e-5", "1e-6"), 3, 150, 15, 4
BEFORE = Recipe(layers=4, heads=4, width=256, context=64, batch=8, steps=28000, learning_rate=1e-3)
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"), "halfstep-fine-tuning")
CHARACTERS = 128  # of ASCII; others are question marks
DECAY = 0.01


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to fine-tune.

    Attributes:
        name: for the table.
        make: named parameters, rate and seed -> optimizer.
        dtype: of the weights.
        order: added to the seed of the batches.
        beside: whether weights are read with what the optimizer keeps beside them.
    """

    name: str
    make: Callable[..., torch.optim.Optimizer]
    dtype: torch.dtype = torch.bfloat16
    order: int = 0
    beside: bool = True


def _torch(named, rate: float, _seed: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=rate, weight_decay=DECAY, foreach=True)


def in_torchao(named, rate: float, seed: int) -> torch.optim.Optimizer:
    """Return torchao's AdamW, which rounds weights stochastically."""
    from torchao.optim.adam import _AdamW

    torch.manual_seed(seed)  # its random words are torch's own
    return _AdamW([p for _, p in named], lr=rate, weight_decay=DECAY, bf16_stochastic_round=True)


def in_halfstep(**options) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes our AdamW with these options."""
    return lambda named, rate, seed: hs.AdamW(named, lr=rate, weight_decay=DECAY, seed=seed, **options)


FLOAT32, OTHER_ORDER, NEAREST = "float32", "float32, another batch order", "bfloat16, torch AdamW"
STOCHASTIC, FED_BACK, SPLIT8 = "bfloat16, stochastic (the default)", "bfloat16, fed back", "split8"
OF_MODEL = "split8, its 16 bits in the model alone"
ROWS = (
    Row(FLOAT32, _torch, torch.float32),
    Row(OTHER_ORDER, _torch, torch.float32, 100),
    Row(NEAREST, _torch),
    Row("bfloat16, torchao, stochastic", in_torchao),
    Row(STOCHASTIC, in_halfstep()),
    Row(FED_BACK, in_halfstep(param_storage="feedback")),
    Row(SPLIT8, in_halfstep(param_storage="split8")),
    Row(OF_MODEL, in_halfstep(param_storage="split8"), beside=False),
    Row("float16 under a scaler, stochastic", in_halfstep(), torch.float16),
)


def codes(written: str) -> np.ndarray:
    """Return the characters of a text as int32."""
    return np.frombuffer(written.encode("ascii", "replace"), np.uint8).astype(np.int32) % CHARACTERS


def library() -> topics.Text:
    """Return the source of the standard library, without tests and without its documentation."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data"}
    files = [p for p in sorted(root.rglob("*.py")) if not left_out & set(p.relative_to(root).parts)]
    source = codes("".join(p.read_text("utf8", "replace") for p in files))
    cut = source.size * 9 // 10
    return topics.Text("", source[:cut], source[cut:])


@functools.cache
def documentation() -> topics.Text:
    """Return the demo's text in these characters."""
    of_demo = topics.load_text()

    def anew(part: np.ndarray) -> np.ndarray:
        return codes("".join(of_demo.vocabulary[i] for i in part))

    return topics.Text("", anew(of_demo.train), anew(of_demo.validation))


def warm_and_fall(optimizer: torch.optim.Optimizer, warm_up: int, steps: int):
    """Return a scheduler: linear from 0 to the optimizer's rate, then a cosine to 0."""

    def share(step: int) -> float:
        part = (step - warm_up) / (steps - warm_up)
        return (step + 1) / warm_up if step < warm_up else (1 + math.cos(math.pi * part)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def warm_and_stay(optimizer: torch.optim.Optimizer, warm_up: int, steps: int):
    """Return a scheduler: linear from 0 to the optimizer's rate, and linear to 0 in the last fifth."""
    last = max(1, steps // 5)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1, (steps - step) / last)
    )


def pretrained() -> dict[str, torch.Tensor]:
    """Return the weights that all rows start from; train them where no run has kept them."""
    kept = CACHE / f"{BEFORE.layers}x{BEFORE.width}-{BEFORE.steps}.pt"
    if kept.exists():
        return torch.load(kept)
    CACHE.mkdir(parents=True, exist_ok=True)
    model = train_torch.make_model(BEFORE, Weights("float32", "float32", "none"), CHARACTERS)
    optimizer = _torch(list(model.named_parameters()), BEFORE.learning_rate, 0)
    scheduler = warm_and_stay(optimizer, 100, BEFORE.steps)
    parts = (model, optimizer, scheduler)
    partly = kept.with_suffix(".part")
    done, spent = 0, 0.0
    if partly.exists():
        done, spent, *states = torch.load(partly)
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    start = time.process_time()
    batches = library().batches(BEFORE.steps, BEFORE.batch, BEFORE.context, BEFORE.seed)
    for step, pair in enumerate(tqdm(batches, total=BEFORE.steps, desc="pretraining"), 1):
        if step <= done:
            continue
        optimizer.zero_grad()
        loss = train_torch.loss_of(model, *train_torch.as_tensors(pair))
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            seconds = spent + time.process_time() - start
            tqdm.write(f"{step} steps, {seconds:.0f} s of processor time, loss {loss.item():.3f}", sys.stderr)
            torch.save((step, seconds, *(part.state_dict() for part in parts)), partly)
    torch.save({name: w.detach().to(torch.bfloat16).float() for name, w in model.named_parameters()}, kept)
    return torch.load(kept)


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of a seed."""
    for pair in documentation().batches(STEPS, BATCH, BEFORE.context, seed):
        yield train_torch.as_tensors(pair)


@functools.cache
def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    """Return validation windows."""
    return train_torch.as_tensors(documentation().validation_windows(128, BEFORE.context))


def tune(row: Row, rate: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the weights at the end of a run."""
    model = train_torch.make_model(BEFORE, Weights("float32", "float32", "none"), CHARACTERS)
    model.load_state_dict(pretrained())
    model.to(row.dtype)
    optimizer = row.make(list(model.named_parameters()), float(rate), seed)
    scheduler = warm_and_fall(optimizer, WARM_UP, STEPS)
    scaler = torch.amp.GradScaler("cpu", enabled=row.dtype is torch.float16)
    for pair in batches(1 + seed + row.order):
        optimizer.zero_grad()
        scaler.scale(train_torch.loss_of(model, *pair)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    if isinstance(optimizer, hs.AdamW) and row.beside:
        return {name: w.detach().clone() for name, w in hs.float32_params(optimizer).items()}
    return {name: w.detach().float() for name, w in model.named_parameters()}


@torch.no_grad()
def log_probabilities(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return those of all characters at each place of the validation windows."""
    model = train_torch.Transformer(BEFORE, CHARACTERS)
    model.load_state_dict(weights)
    return model(held_out()[0]).log_softmax(-1).flatten(0, 1)


def compare(mine: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the figures of an end beside float32's."""

    def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([weights[name].flatten().double() for name in truth])

    start, end, right = map(flat, (pretrained(), mine, truth))
    of_truth = log_probabilities(truth)
    of_mine = of_truth if mine is truth else log_probabilities(mine)
    following = held_out()[1].flatten()
    way = right - start
    return {
        "loss": torch.nn.functional.nll_loss(of_mine, following).item(),
        "loss of float32": torch.nn.functional.nll_loss(of_truth, following).item(),
        "KL": (of_truth.exp() * (of_truth - of_mine)).sum(-1).mean().item(),
        "moved": (end != start).double().mean().item(),
        "dist": ((end - right).norm() / way.norm()).item(),
        "proj": ((end - start) @ way / (way @ way)).item(),
    }


def of_float32(rate: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the end of the float32 run; run it where no run has kept it."""
    kept = CACHE / f"{BEFORE.layers}x{BEFORE.width}-{BEFORE.steps}-{rate}-{seed}-{STEPS}.pt"
    if not kept.exists():
        torch.save(tune(ROWS[0], rate, seed), kept)
    return torch.load(kept)


def run_all(only: list[str], record: pathlib.Path | None) -> list[dict[str, Any]]:
    """Return the figures of each run; all rows have had a seed before the next one begins."""
    results = json.loads(record.read_text())["runs"] if record and record.exists() else []
    done = {(run["name"], run["rate"], run["seed"]) for run in results}
    rows = report.chosen(ROWS, only)
    cases = [(seed, rate, row) for seed in range(SEEDS) for rate in RATES for row in rows]
    for seed, rate, row in tqdm(cases, unit="run"):
        if (row.name, rate, seed) in done:
            continue
        truth = of_float32(rate, seed)
        with torch.compiler.set_stance("force_eager"):  # torchao would compile each shape
            figures = compare(truth if row.name == FLOAT32 else tune(row, rate, seed), truth)
        results.append({"name": row.name, "rate": rate, "seed": seed, **figures})
        tqdm.write(str(results[-1]), file=sys.stderr)
        if record:
            report.finish({}, {"runs": results}, record)
    return results


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each rate and name: means over seeds of all figures, and their standard deviations."""
    kept: dict[tuple[str, str], list[dict]] = {}
    for rate in RATES:
        for run in (run for run in results if run["rate"] == rate):
            figures = {**run, "loss": run["loss"] - run["loss of float32"]}
            kept.setdefault((rate, run["name"]), []).append(figures)
    rows = []
    for (rate, name), runs in kept.items():
        rows.append({"rate": rate, "name": name, "seeds": len(runs)})
        for figure in ("loss", "KL", "moved", "dist", "proj"):
            values = [run[figure] for run in runs]
            rows[-1] |= {figure: statistics.mean(values), f"{figure} spread": statistics.pstdev(values)}
    return rows


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row."""
    return (
        row["rate"],
        row["name"],
        f"{row['loss']:+.4f} ± {row['loss spread']:.4f}",
        f"{1000 * row['KL']:.3f}",
        f"{row['moved']:.0%}",
        f"{row['dist']:.2f}",
        f"{row['proj']:.2f}",
    )


def claims(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return what the table must show, by sentence; a sentence about a row that was left out is left out."""
    of = {(row["rate"], row["name"]): row for row in rows}
    held: dict[str, bool] = {}
    for rate in RATES:
        with contextlib.suppress(KeyError):
            nearest, stochastic, fed_back, split8 = (
                of[rate, name] for name in (NEAREST, STOCHASTIC, FED_BACK, SPLIT8)
            )
            held |= {
                f"{rate}: nearest moves under a tenth of float32's way": nearest["proj"] < 0.1,
                f"{rate}: stochastic and fed back move all of it, within a tenth": all(
                    abs(row["proj"] - 1) < 0.1 for row in (stochastic, fed_back)
                ),
                f"{rate}: both have under a tenth of the KL of nearest": all(
                    row["KL"] < nearest["KL"] / 10 for row in (stochastic, fed_back)
                ),
                f"{rate}: split8 is nearest of all 16-bit weights": split8["dist"]
                == min(row["dist"] for (r, name), row in of.items() if r == rate and FLOAT32 not in name),
            }
    return held


def main() -> int:
    """Print the table, and whether it shows what it must."""
    arguments = report.arguments("Fine-tune at low rates; compare with float32.", rows=True)
    runs = run_all(arguments.only, arguments.json)
    rows = summary(runs)
    head = "rate | <weights | loss over float32 | KL, 1/1000 | moved | dist | proj"
    report.print_table(head, map(cells, rows))
    before = {"parameters": sum(w.numel() for w in pretrained().values()), **dataclasses.asdict(BEFORE)}
    record = {"date": f"{datetime.date.today()}", "before": before, "rows": rows, "runs": runs}
    return report.finish(claims(rows), record, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
