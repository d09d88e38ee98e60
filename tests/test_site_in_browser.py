"""The page *Try it* rounds by the contract in a real browser, and says what is wrong with a number.

Skipped where there is no Chromium.
"""

import html
import importlib
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SITE = ROOT / "docs" / "site"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed, which would run the page"),
]


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """Return a function that opens the page with some fields filled in, and returns what it shows."""
    monkeypatch.syspath_prepend(str(SITE))
    data = importlib.import_module("try_data").script(ROOT)
    sys.modules.pop("try_data")
    (tmp_path / "try-data.js").write_text(data)
    shutil.copy(SITE / "try.js", tmp_path)
    # Markdown hands its forms and scripts on as they stand; where the site is built they lie in site/.
    page = (ROOT / "docs" / "try.md").read_text().replace("../site/", "")
    (tmp_path / "page.html").write_text(f"<!doctype html><meta charset='utf-8'>{page}")

    def shown(fields: str = "") -> str:
        profile = tmp_path / f"profile{len(list(tmp_path.iterdir()))}"
        address = f"{(tmp_path / 'page.html').as_uri()}#{fields}"
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={profile}", "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return html.unescape(re.sub("<[^>]*>", " ", done.stdout))

    return shown


def test_every_golden_vector_of_rounding_agrees_in_the_browser(shown):
    said = re.search(r"(\d+) of (\d+) golden vectors of rounding agree", shown())
    assert said
    assert said[1] == said[2]
    assert int(said[2]) > 150


def test_small_updates_are_lost_and_large_ones_are_not(shown):
    share = r"([\d.]+) %\s+of updates are lost"
    shares = [
        float(re.search(share, shown(f"rate={rate}&size=0.02&dtype=bfloat16"))[1])
        for rate in ("1e-7", "1e-1")
    ]
    assert shares[0] > 99
    assert shares[1] < 1


def test_memory_is_counted_bytes_times_parameters(shown):
    text = " ".join(shown("parameters=70B").split())
    assert "AdamW, float32 16.00 1.12e+3" in text
    assert "halfstep one_pass 6.00 420" in text
    assert "halfstep four_bit 5.55 389" in text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("parameters=-5", "-5 parameters: use a number from 1 to 1e15."),
        ("parameters=many", '"many" is no number of parameters. Write 8e9, 8B or 350M.'),
        ("rate=-1e-3", 'Learning rate "-1e-3": use a number above 0'),
        ("size=zero", 'Size of a weight "zero": use a number above 0'),
        ("parameters=<b>8</b>", '"<b>8</b>" is no number of parameters.'),
    ],
)
def test_bad_input_is_said_plainly(shown, fields, said):
    assert said in shown(fields)
