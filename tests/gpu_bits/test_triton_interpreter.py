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

CAPTURED = ["default", "eight_bit", "feedback"]


def interpreted(module: str, *names: str) -> dict[str, dict]:
    path = os.pathsep.join(x for x in sys.path if x)
    done = subprocess.run(
        [sys.executable, "-m", f"gpu_bits.{module}", *names],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_text_has_the_bits_of_plain_steps():
    found = interpreted("interpreted_steps", *NAMES)
    assert {name: of["difference"] for name, of in found.items()} == dict.fromkeys(NAMES, "")
    assert all(of["launches"] >= 2 for of in found.values())


def test_a_step_with_norms_launches_three_kernels_and_nothing_else():
    expected = {
        "default": ["step"],
        "Lamb16": ["step", "scale", "step"],
        "clipping": ["step", "measure", "step"],
    }
    found = interpreted("counted_launches", *expected)
    assert found == {name: {"launches": of, "operations": []} for name, of in expected.items()}


def test_the_text_of_a_captured_step_has_the_bits_of_plain_steps():
    found = interpreted("interpreted_captures", *CAPTURED)
    assert found.pop("counts") == 1000
    assert found == {name: {"launches": 2, "difference": ""} for name in CAPTURED}
