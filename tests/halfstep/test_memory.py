"""`python -m halfstep memory`: the bytes are those that recipes are known for, and bad words are told."""

import subprocess
import sys

import pytest

import halfstep.__main__ as command
from halfstep.memory import RECIPES, bytes_per_weight, count_of, memory_table
from halfstep.version import __version__


def test_the_bytes_of_a_recipe_are_those_of_its_table():
    sizes = {name: sum(bytes_per_weight(name)) - 2 for name in RECIPES}
    recorded = {
        **{"full_precision": 12, "near_float32": 7, "sixteen_bit": 6},
        **{"one_pass": 4, "eight_bit": 4.01, "four_bit": 3.55},  # of a model with small arrays, too
    }
    assert sizes == pytest.approx(recorded, abs=0.015)


def test_a_table_has_a_row_of_each_recipe_and_of_other_optimizers_in_100_columns():
    text = str(memory_table(8 * 10**9))
    assert all(f"halfstep {name}" in text for name in RECIPES)
    assert max(map(len, text.splitlines())) <= 100
    row = next(line for line in text.splitlines() if "one_pass" in line)
    assert row.split()[-3:] == ["48.00", "GB", "62%"]  # 6 bytes of 16


def test_the_command_prints_one_recipe(capsys):
    assert command.main(["memory", "--params", "8e9", "--recipe", "one_pass"]) == 0
    text = capsys.readouterr().out
    assert "one_pass" in text
    assert "four_bit" not in text
    assert "8,000,000,000 weights" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["memory"], "--params"),
        (["memory", "--params", "-3"], "is not a number of weights. Use one such as 8e9 or 8B."),
        (["memory", "--params", "nan"], "is not a number of weights"),
        (["memory", "--params", "many"], "is not a number of weights"),
        (["memory", "--params", "1B", "--recipe", "one-pass"], 'Did you mean "one_pass"?'),
        (["memory", "--params", "1B", "--recipe", "bf16"], 'Did you mean "sixteen_bit"?'),
        (["memori"], "invalid choice"),
    ],
)
def test_a_word_that_is_wrong_is_told(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"halfstep {__version__}"


def test_numbers_are_read_as_people_write_them():
    assert [count_of(x) for x in ("7_000", "1,000", "0.5B", " 3T ")] == [7000, 1000, 5 * 10**8, 3 * 10**12]
    with pytest.raises(ValueError, match=r"memory: params='0' is not a number of weights\. Use one such"):
        count_of("0")


@pytest.mark.parametrize("package", ["halfstep_jax", "halfstep_torch"])
def test_a_framework_that_is_missing_is_named_with_the_line_to_write(package):
    framework = package.removeprefix("halfstep_")
    code = f"import sys; sys.modules[{framework!r}] = None; import {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].endswith(
        f'{package} needs {framework}, which is not installed. Write: pip install "halfstep[{framework}]"'
    )


def test_an_optimizer_that_is_looked_for_in_halfstep_is_found():
    for name, package in {
        "AdamW": "halfstep_torch",
        "adamw": "halfstep_jax",
        "SGD": "halfstep_torch",
    }.items():
        with pytest.raises(ImportError, match=f"Write: from {package} import {name}$"):
            exec(f"from halfstep import {name}")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from halfstep import nothing")
