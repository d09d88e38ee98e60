"""What a subject's settings do to training, judged by the path and not by the last loss.

    python benchmarks/quality.py adam [--task transformer] [--steps N] [--only TEXT ...] [--json NAME.json]

Subjects are those of `settings.py` and `rule_settings.py`, tasks and figures those of `training.py`: digits
for 1,500 steps (Muon 400), and the transformer for 400. A broken moment often *lowers* the last loss, because
it takes longer steps. A dist below that of another order of the batches is noise; proj off 1 by over 0.01 is
bias. `--only` has the settings in whose names one of these texts stands, beside the first of their kind. A
record keeps the rows of the other task.
"""

import argparse
import json
import pathlib
import sys

import rule_settings
import settings
from training import Setting, Task, Transformer, check, run_all

import report

SUBJECTS = settings.SUBJECTS | rule_settings.SUBJECTS


def chosen(settings: list[Setting], only: list[str]) -> list[Setting]:
    """Return the first setting of each run, and those in whose names one of the texts stands."""
    first = {setting.against: setting for setting in reversed(settings)}
    return [x for x in settings if x is first[x.against] or any(text in x.name for text in only)]


def main() -> int:
    """Print the table, and whether it shows what it must."""
    parser = argparse.ArgumentParser(
        description="Train with the settings of a subject; compare with float32."
    )
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--task", choices=("digits", "transformer"), default="digits")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--only", nargs="*", default=[""], help="settings in whose names one of these stands")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    arguments = parser.parse_args()
    given = {name: x for name in ("steps", "seeds") if (x := getattr(arguments, name))}
    usual = {"steps": 400} if arguments.subject == "muon" else {}
    task = (Transformer if arguments.task == "transformer" else Task)(**usual | given)
    make, claims = SUBJECTS[arguments.subject]
    trained = chosen(make(task), arguments.only)
    labels = list(trained[-1].labels)
    rows = run_all(trained, task)
    report.print_table(
        " | ".join([f"<{label}" for label in labels] + ["bytes | state | loss | over float32 | dist | proj"]),
        (
            (
                *(row[label] for label in labels),
                *(f"{row['bytes']:.2f}", f"{row['state']:.2f}", f"{row['loss']:.5f}", f"{row['over']:+.5f}"),
                *(f"{row['dist']:.4f} ± {row['spread']:.4f}", f"{row['proj']:.4f}"),
            )
            for row in rows
        ),
    )
    record = arguments.json
    before = json.loads(record.read_text()) if record and record.exists() else {}
    held = check(claims, rows, labels)
    return report.finish(held, before | {arguments.task: rows}, record)


if __name__ == "__main__":
    sys.exit(main())
