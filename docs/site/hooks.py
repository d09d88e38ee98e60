"""What the documentation site needs beyond MkDocs: pages of the whole repository, tabs, anchors, a reference.

Pages stay plain files that read well on a code host. The site shows each under the path that it has there.
"""

import ast
import functools
import html as entities
import pathlib
import posixpath
import re
import sys
import urllib.parse
from html.parser import HTMLParser

import tomllib
import yaml
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs" / "site"))
import messages  # noqa: E402 (beside this file)
import try_data  # noqa: E402

CONTRACT = "shared_spec/README.md"
PAGES = (
    "*.md",
    CONTRACT,
    "notebooks/*.ipynb",
    "docs/**/*.md",
    "docs/images/**/*.*",
    "docs/site/*.css",
    "docs/site/*.js",
    "docs/site/*.svg",
)
PACKAGES = {"JAX": "halfstep_jax", "PyTorch": "halfstep_torch"}
BRIDGE = "halfstep_torch.bridge"


def _address() -> str:
    """Return the address of the project, in pyproject.toml."""
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    return hatch["metadata"]["hooks"]["custom"]["address"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the addresses from pyproject.toml, and add the pages of the reference to the navigation."""
    address = _address()
    config.site_url, config.repo_url = f"{address}/docs/", f"{address}/source"
    assert config.nav is not None
    (section,) = (entry for entry in config.nav if "Reference" in entry)
    section["Reference"] = list(reference_pages())
    return config


@event_priority(100)  # before mkdocs-jupyter, which looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the pages of the repository under their own paths, the reference, and what the theme brings."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted({path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)})
    pages = [File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths]
    pages += [File.generated(config, path, content=text) for path, text in reference_pages().items()]
    pages.append(File.generated(config, "docs/site/try-data.js", content=try_data.script(ROOT)))
    for page in pages:
        # Pages of the root have names in capitals; their addresses do not.
        short = page.dest_uri.removeprefix("docs/").replace("shared_spec/", "contract/")
        page.dest_uri = short if "/" in page.src_uri else short.lower()
        if page.src_uri == "README.md":
            page.dest_uri = "index.html"
    return Files([*theme, *pages])


_BOOSTS = {
    "docs/recipes.md": 4,
    "docs/install.md": 3,
    "docs/faq.md": 3,
    "docs/troubleshooting.md": 3,
    "docs/how-to/pytorch-loop.md": 3,
    "docs/how-to/memory-and-formats.md": 0.3,
    "docs/how-to/": 2,
    "docs/benchmarks/": 0.2,
    "README.md": 0.5,
    "CHANGELOG.md": 0.1,
    "docs/mirror.md": 0.1,
}
"""How much more a page counts in a search, by the beginning of its path."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make tabs, links to the repository and, in the contract, an anchor for each clause."""
    for start, boost in _BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
            break
    path = page.file.src_uri
    markdown = with_source_links(markdown, path, files, f"{config.repo_url}/blob/main")
    if path == "README.md":  # which shows a code host one picture; the site has one for the dark, too
        markdown = re.sub(r"!\[[^]]*\]\(([^)]*)\.svg\)", _with_dark_twin, markdown)
    if path == CONTRACT:
        markdown = re.sub(r"\*\*([A-Z]\d+)\*\*", r"[**\1**](#\1){ #\1 }", markdown)
    return with_tabs(with_list_indents(markdown))


def _with_dark_twin(picture: re.Match[str]) -> str:
    """Return a picture, and behind it its twin for the dark scheme, if there is one."""
    if not (ROOT / f"{picture[1]}-dark.svg").exists():
        return picture[0]
    light, dark = (picture[0].replace(".svg", end) for end in (".svg#only-light", "-dark.svg#only-dark"))
    return f"{light}\n{dark}"


_PAGES: list[tuple[str, str, str]] = []
"""Title, place and first sentence of every page, for `llms.txt`."""


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the clauses that a page or a docstring names: "contract L1, N1", "clause F3". Draw formulas."""
    text = re.search(r"<p>(.*?)</p>", html, flags=re.DOTALL)
    words = " ".join(re.sub("<[^>]*>", "", text[1]).split()) if text else ""
    sentence = re.split(r"(?<=[.:]) ", words)[0]
    _PAGES.append((page.title or page.url, page.url, sentence))
    if sentence:
        page.meta.setdefault("description", entities.escape(entities.unescape(sentence.rstrip(":"))))
    if page.file.src_uri.endswith(".ipynb"):
        file = posixpath.basename(page.file.src_uri)
        html = f'<p><a href="{file}" download>Download this notebook</a></p>{with_formulas(html)}'
    contract = files.get_file_from_path(CONTRACT)
    assert contract is not None
    if page.file is contract:
        return html
    url = contract.url_relative_to(page.file)

    def clauses(match: re.Match[str]) -> str:
        return match[1] + re.sub(r"[A-Z]\d+", rf'<a href="{url}#\g<0>">\g<0></a>', match[2])

    return re.sub(r"(\b(?:[Cc]lauses?|[Cc]ontract:?) )([A-Z]\d+(?:(?:,| and| to) [A-Z]\d+)*)", clauses, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Say what a link to the page shows elsewhere: title, first sentence and the picture of `make demo`."""
    title = "" if page.file.dest_uri == "index.html" else page.title
    card = {
        "type": "website",
        "title": entities.escape(entities.unescape(title or config.site_name)),
        "description": page.meta.get("description", config.site_description),
        "url": page.canonical_url,
        "image": f"{config.site_url}images/demo.png",
    }
    tags = [f'<meta property="og:{name}" content="{text}">' for name, text in card.items()]
    tags.append('<meta name="twitter:card" content="summary_large_image">')
    return output.replace("</head>", "\n".join([*tags, "</head>"]), 1)


def with_list_indents(markdown: str) -> str:
    """Indent what belongs to an item of a list by four spaces, as Python-Markdown asks, where pages have two.

    It also wants a blank line between a paragraph of an item and the next item.
    """
    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [re.sub(r"^ {2,3}(?=\S)", "    ", part, flags=re.MULTILINE) for part in parts[::2]]
    paragraph = r"(\n\n    [^\n]+(?:\n    [^\n]+)*)\n(?=(?:[-*]|\d+\.) )"
    return re.sub(paragraph, r"\1\n\n", "".join(parts))


def with_formulas(html: str) -> str:
    """Turn $...$ and $$...$$ outside of code into MathML, which browsers draw without a script."""

    def formula(match: re.Match[str]) -> str:
        block, inline = match["block"], match["inline"]
        if block is None and inline is None:
            return match[0]
        return convert(entities.unescape(block or inline), display="block" if block else "inline")

    code = r"<(?P<tag>pre|code|script|style|svg)\b.*?</(?P=tag)>"
    html = re.sub(rf"{code}|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$<>]+)\$", formula, html, flags=re.DOTALL)
    if "$" in re.sub(code, "", html, flags=re.DOTALL):
        raise PluginError("A formula of a notebook begins with $ and does not end with it.")
    return html


def with_source_links(markdown: str, path: str, files: Files, source: str) -> str:
    """Lead links to files that are no pages to the repository, and links to folders to their page."""
    folder = posixpath.dirname(path)

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        readme = posixpath.join(target, "README.md")
        if files.get_file_from_path(readme):
            return f"]({posixpath.relpath(readme, folder or '.')}{match[2]})"
        if files.get_file_from_path(target) or not (ROOT / target).exists():
            return match[0]  # MkDocs judges it
        return f"]({source}/{target}{match[2]})"

    return re.sub(r"\]\((?!\w+:)([^)#]+)((?:#[^)]*)?)\)", link, markdown)


def with_tabs(markdown: str) -> str:
    """Turn each part between `<!-- tabs -->` and `<!-- end of tabs -->` into tabs, one for each bold line."""

    def tabs(match: re.Match[str]) -> str:
        _, *parts = re.split(r"^\*\*(.+)\*\*$", match[1], flags=re.MULTILINE)
        names, texts = parts[::2], parts[1::2]
        indented = [re.sub(r"^(?=.)", "    ", text.strip(), flags=re.MULTILINE) for text in texts]
        return (
            "\n\n".join(f'=== "{name}"\n\n{text}' for name, text in zip(names, indented, strict=True)) + "\n"
        )

    markdown = re.sub(
        r"^<!-- tabs -->\n(.*?)^<!-- end of tabs -->$", tabs, markdown, flags=re.DOTALL | re.MULTILINE
    )
    if re.search("<!-- (end of )?tabs -->", markdown):
        raise PluginError("A page has <!-- tabs --> without <!-- end of tabs -->, or the reverse.")
    return markdown


@functools.cache
def reference_pages() -> dict[str, str]:
    """Return the pages of the reference by path: public names, the bridge, `halfstep_spec`, messages."""
    table = yaml.safe_load((ROOT / "docs" / "site" / "reference.yml").read_text())
    pages = {
        f"docs/reference/{file}.md": "\n".join(
            [
                *(f"# {entry['title']}", "", entry["about"], "", *_summary(entry["names"]), ""),
                *(_entry(name) for name in entry["names"]),
            ]
        )
        for file, entry in table.items()
    }
    for file, title, package in (
        ("bridge", "Bridge", BRIDGE),
        ("spec", "Reference in NumPy", "halfstep_spec"),
    ):
        names = [name for name in sources(package) if name != "SPEC_VERSION"]
        blocks = "\n".join(_block(package, name) for name in names)
        pages[f"docs/reference/{file}.md"] = f"# {title}\n\n{blocks}"
    pages["docs/reference/messages.md"] = messages.page(ROOT, _source())
    return pages


def _names_of(entry: str) -> dict[str, str]:
    """Return the name that an entry has in each package, "" where it has none."""
    parts = [part.strip() for part in entry.split("|")]
    return dict(zip(PACKAGES, parts * 2 if len(parts) == 1 else parts, strict=True))


def _summary(entries: list[str]) -> list[str]:
    """Return a table of the names of a page, with the first sentence of each."""
    rows = [f"| {' | '.join(PACKAGES)} | what it does |", "|---|---|---|"]
    for entry in entries:
        names = _names_of(entry)
        tab = next(tab for tab, name in names.items() if name)
        cells = [f"[`{x}`][{documented(PACKAGES[tab], x)}]" if x else "" for tab, x in names.items()]
        rows.append(f"| {' | '.join(cells)} | {first_sentence(PACKAGES[tab], names[tab])} |")
    return rows


_DOCUMENTED = (ast.FunctionDef, ast.ClassDef)


def defined(package: str, name: str) -> tuple[pathlib.Path, ast.stmt | None]:
    """Return the file of a public name, and the statement there that makes it; None: the name is the file."""
    return _defined_in(sources(package)[name], name)


def _defined_in(module: str, name: str) -> tuple[pathlib.Path, ast.stmt | None]:
    root = {"halfstep_jax": "pkg_jax", "halfstep_torch": "pkg_torch"}.get(module.split(".")[0], "shared_spec")
    path = ROOT.joinpath(root, *module.split("."))
    if path.is_dir():  # a module, such as `recipes`, or what halfstep re-exports
        if (file := path / f"{name}.py").is_file():
            return file, None
        origin = sources(module).get(name, module)
        return (path / "__init__.py", None) if origin == module else _defined_in(origin, name)
    path = path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        assigned = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        if assigned or (isinstance(node, _DOCUMENTED) and node.name == name):
            return path, node
        if isinstance(node, ast.ImportFrom) and name in [x.asname or x.name for x in node.names]:
            assert node.module
            return _defined_in(node.module, name)
    return path, None


def first_sentence(package: str, name: str) -> str:
    """Return the first sentence of a public name's docstring, from the source; "" where it has none."""
    path, node = defined(package, name)
    if node is None:
        return _first_sentence(ast.get_docstring(ast.parse(path.read_text()))) if path.stem == name else ""
    made_of: list[ast.expr] = []
    if isinstance(node, _DOCUMENTED):
        if docstring := ast.get_docstring(node):
            return _first_sentence(docstring)
        made_of = node.bases if isinstance(node, ast.ClassDef) else []
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        made_of = node.value.args[::-1]
    # Made of a rule, function or class of `halfstep`, whose docstring it has.
    names = (ast.unparse(x).split(".")[-1] for x in made_of)
    return next((sentence for x in names if (sentence := shared_sentences().get(x))), "")


@functools.cache
def shared_sentences() -> dict[str, str]:
    """Return the first sentence of everything that `halfstep` defines, by name."""
    trees = (
        ast.parse(path.read_text()) for path in sorted((ROOT / "shared_spec" / "halfstep").rglob("*.py"))
    )
    nodes = (x for tree in trees for x in ast.walk(tree) if isinstance(x, _DOCUMENTED))
    return {x.name: _first_sentence(ast.get_docstring(x)) for x in nodes}


def _first_sentence(docstring: str | None) -> str:
    text = " ".join((docstring or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", text)[0].rstrip(":").replace("|", "\\|")


def _entry(entry: str) -> str:
    """Return the text of one name: a tab for each package, or a single text where both share the object."""
    names = _names_of(entry)
    title = "\n## " + ", ".join(f"`{name}`" for name in dict.fromkeys(filter(None, names.values()))) + "\n"
    origins = {sources(PACKAGES[tab])[name].split(".")[0] for tab, name in names.items() if name}
    if origins == {"halfstep"} or not all(names.values()):
        tab = next(tab for tab, name in names.items() if name)
        return f"{title}\n{_block(PACKAGES[tab], names[tab])}"
    tabs = (
        f'=== "{tab}"\n\n' + re.sub(r"^(?=.)", "    ", _block(PACKAGES[tab], name), flags=re.MULTILINE)
        for tab, name in names.items()
    )
    return "\n".join([title, *tabs])


def _block(package: str, name: str) -> str:
    """Return what mkdocstrings replaces by the documentation of a name, and a link to its source."""
    path, node = defined(package, name)
    line = f"#L{node.lineno}" if node else ""
    link = f"[Source]({_source()}/{path.relative_to(ROOT).as_posix()}{line})"
    target = documented(package, name)
    heading = f"      heading: {package}.{name}\n" if target != f"{package}.{name}" else ""
    return f"::: {target}\n    options:\n      show_root_toc_entry: false\n{heading}\n{link}\n"


def documented(package: str, name: str) -> str:
    """Return the path under which Griffe knows a public name: by the name alone it finds its file first."""
    return (
        f"{package}.{name}.{name}" if sources(package)[name] == f"{package}.{name}" else f"{package}.{name}"
    )


@functools.cache
def _source() -> str:
    """Return the address of the repository's files."""
    return f"{_address()}/source/blob/main"


@functools.cache
def sources(package: str) -> dict[str, str]:
    """Return the public names of a package, and the module from which it imports each."""
    (folder,) = (
        ROOT / root
        for root in ("pkg_jax", "pkg_torch", "shared_spec")
        if (ROOT / root / package.split(".")[0]).is_dir()
    )
    tree = ast.parse((folder / package.replace(".", "/") / "__init__.py").read_text())
    public: list[str] = []
    origin: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            origin |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = ast.literal_eval(node.value)
    return {name: origin.get(name, package) for name in public}


class _Links(HTMLParser):
    """The addresses to which a page links, its anchors, ids it has twice; what it loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = {""}
        self.loaded: set[str] = set()
        self.ids: set[str] = set()
        self.twice: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, names or loads."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if "id" in values:
            (self.twice if values["id"] in self.ids else self.ids).add(values["id"])
        target = values.get("href") or values.get("src")
        if target and (tag == "a" or "src" in values or values.get("rel") == "stylesheet"):
            self.links.add(target)
            if tag != "a" and re.match("(https?:)?//", target):
                self.loaded.add(target)


def swallowed_items(html: str) -> list[str]:
    """Return the lines of paragraphs that were meant to be items of a list: Python-Markdown joined them."""
    text = re.sub(r"<(nav|pre|code|script|style|svg|math)\b.*?</\1>", "", html, flags=re.DOTALL)
    paragraphs = re.findall(r"<(?:p|li)\b[^>]*>(.*?)(?=</?(?:p|li|ul|ol|div|table)\b)", text, flags=re.DOTALL)
    lines = (line.strip() for paragraph in paragraphs for line in paragraph.splitlines()[1:])
    return [line for line in lines if re.match(r"(?:[-*]|[1-9]\d*\.) ", line)]


def on_post_build(config: MkDocsConfig) -> None:
    """Follow each link of the built site, also those that plugins made; find lists that are none."""
    site = pathlib.Path(config.site_dir)
    lines = [f"- [{title}]({url or './'}): {words}" for title, url, words in _PAGES]
    (site / "llms.txt").write_text(
        "\n".join(["# halfstep", "", f"> {config.site_description}", "", *lines, ""])
    )
    pages = {page: _Links() for page in sorted(site.rglob("*.html"))}
    for page, links in pages.items():
        links.feed(page.read_text())
    lists = {page: swallowed_items(page.read_text()) for page in pages}
    wrong = [
        f"{page.relative_to(site)}: a paragraph holds the item {lines[0][:60]!r}, and {len(lines) - 1} more"
        for page, lines in lists.items()
        if lines
    ]
    wrong += [
        f"{page.relative_to(site)} loads {url}" for page, links in pages.items() for url in links.loaded
    ]
    wrong += [
        f"{page.relative_to(site)} has the id {name} twice"
        for page, links in pages.items()
        for name in links.twice
    ]
    for page, links in pages.items():
        if page.name == "404.html":  # its links begin at the root of the published site
            continue
        for link in sorted(links.links):
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (page.parent / urllib.parse.unquote(url.path)).resolve() if url.path else page
            target = target / "index.html" if target.is_dir() else target
            anchor = urllib.parse.unquote(url.fragment)
            if not target.is_file():
                wrong.append(f"{page.relative_to(site)} links to {link}: there is no such page")
            elif target in pages and anchor not in pages[target].anchors:
                wrong.append(f"{page.relative_to(site)} links to {link}: that page has no such anchor")
    if wrong:
        raise PluginError("\n".join(wrong))
