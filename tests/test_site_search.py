"""What the built site offers a stranger: search, arguments, sources. Skipped where it cannot be built."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MKDOCS, NODE = ROOT / ".venv-docs" / "bin" / "mkdocs", shutil.which("node")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MKDOCS.is_file() or NODE is None, reason="needs `make docs`, and node"),
]
# What is typed, and the beginning of a place that is among the first three.
DUE = {
    "8-bit": "recipes/",
    "install": "install/",
    "GPU": "install/#gpu",
    "TPU": "faq/#does-it-run-on-gpus-and-tpus",
    "generated kernels": "how-to/pytorch-loop/#generated-kernels",
    "weight decay": "faq/#does-weight-decay-work-in-16-bits",
    "named_parameters": "faq/#why-named_parameters",
    "huggingface": "how-to/trainers/",
    "wandb": "how-to/lost-updates/",
    "cite": "faq/",
    "quick start": "quick-start",
    "lora": "faq/",
    "qlora": "faq/",
    "gradscaler": "how-to/schedules/",
    "fsdp2": "how-to/fsdp2/",
    "resume": "how-to/checkpoints/",
    "out of memory": "troubleshooting/#out-of-memory",
    "NaN": "troubleshooting/#nan",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    site = tmp_path_factory.mktemp("site")
    build = [str(MKDOCS), "build", "--quiet", "--site-dir", str(site)]
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"}
    subprocess.run(build, cwd=ROOT, check=True, timeout=500, env=environment)
    return site


@pytest.fixture(scope="module")
def found(site) -> dict[str, list[str]]:
    ask = [str(NODE), str(ROOT / "tests" / "search.js"), str(site), *DUE]
    lines = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return dict(map(json.loads, lines))


@pytest.mark.parametrize("query", DUE)
def test_a_search_finds_the_page(found, query):
    assert any(place.startswith(DUE[query]) for place in found[query][:3]), found[query]


def test_a_shared_link_shows_title_sentence_and_picture(site):
    page = (site / "how-to" / "muon" / "index.html").read_text()
    card = dict(re.findall(r'<meta property="og:(\w+)" content="([^"]*)">', page))
    assert card["title"] == "Muon and Adafactor"
    assert card["description"].startswith("Muon updates each hidden matrix")
    assert f'<meta name="description" content="{card["description"]}">' in page
    assert (site / card["image"].partition("/docs/")[2]).is_file()


def test_a_language_model_finds_every_page_in_llms_txt(site):
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# halfstep"
    assert len(lines[2]) > 20
    places = [re.search(r"\]\(([^)]*)\): ", line)[1] for line in lines if line.startswith("- ")]
    assert len(places) == len(set(places)) > 50
    assert all((site / place / "index.html").is_file() for place in places if "." not in place.strip("./"))
    assert any(line.startswith("- [Install](install/): ") for line in lines)


def test_the_reference_lists_arguments_in_both_packages_and_leads_to_the_source(site):
    page = (site / "reference" / "optimizers" / "index.html").read_text()
    for name in ("adamw", "lion", "sgd", "AdamW", "Lion", "SGD"):
        package = "halfstep_torch" if name[0].isupper() else "halfstep_jax"
        after = page.split(f'id="{package}.{name}"')[1]
        part = after.split("Examples:")[0]
        listed = re.findall(r"<b><code>(\w+)</code></b>", part)
        assert {"seed", "param_storage"} <= set(listed), name
        assert re.search(r'href="[^"]*/blob/main/pkg_\w+/[\w/]+\.py#L\d+">Source<', after)
