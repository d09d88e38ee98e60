"""The Triton text of a step in Triton's own interpreter has the bits of plain steps."""

import json
import os
import subprocess
import sys

NAMES = [
    "default",
    "one_pass",
    "eight_bit",
    "four_bit",
    "feedback",
    "split8",
    "split8 of float16",
    "split16 of float16",
    "nearest",
    "rows",
    "Lamb",
    "Lamb16",
    "clipped",
    "exact clipped",
    "exact Lamb",
    "copies",
]


def test_the_text_has_the_bits_of_plain_steps():
    path = os.pathsep.join(x for x in sys.path if x)
    # Triton reads the variable when it is imported.
    done = subprocess.run(
        [sys.executable, "-m", "gpu_bits.interpreted_steps", *NAMES],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: of["difference"] for name, of in found.items()} == dict.fromkeys(NAMES, "")
    assert all(of["launches"] >= 2 for of in found.values())
