"""Pages written by hand agree with the code where a machine can tell, lead somewhere, and stay short."""

import ast
import re
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from rollout.models import spec
from rollout.models.families import FAMILIES, MULTIMODAL
from scripts.reference_docs import FOLDER, PAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_ABOUT_CODE = "architecture", "glossary", "recipes"
#: Pages about the code: the files and names in them exist.
ABOUT_CODE = [*sorted((DOCS / "design").glob("*.md")), *(DOCS / f"{name}.md" for name in _ABOUT_CODE)]
MOST_WORDS = {
    **dict.fromkeys(
        (page for folder in (".", "design", "integrations") for page in (DOCS / folder).glob("*.md")), 1200
    ),
    ROOT / "README.md": 700,
    ROOT / "CHANGELOG.md": 1500,
    DOCS / "architecture.md": 1500,
    DOCS / "reference/client.md": 1200,
}
#: Words of all pages by hand together, without the changelog.
MOST_WORDS_BY_HAND = 21_700
#: Words of all pages that `scripts.reference_docs` writes, together.
MOST_WORDS_OF_REFERENCES = 10_500
#: Lines of the modules in these folders, about 1% more than there are: a mended fault fits, a feature is paid for by
#: what goes.
MOST_LINES = {("rollout/engine",): 19_450, ("rollout", "rollout_gateway", "trainer_bridge", "kernels"): 97_300}
MOST_DRAWINGS, MOST_GLOSSARY_WORDS = 4, 40
#: Pages that are written by hand; scripts write the other folders of docs.
BY_HAND = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("design/*.md"))]
BY_HAND += [*sorted(DOCS.glob("integrations/*.md")), DOCS / "reference/client.md"]
MOST_NUMBERS = 13
#: Names that the recipes make up.
MADE_UP = {"epsilon", "epsilon_S", "rollout_kv_cached_pct", "NAME"}
SOURCES = ("rollout", "rollout_gateway", "kernels", "trainer_bridge", "scripts", "tests")
SUFFIXES = (".py", ".md", ".toml", ".json", ".svg", ".png")

by_page = pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: page.stem)


def section(page: Path, title: str) -> str:
    """The text below a heading, up to the next one of its level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    assert found is not None, f"{page.name} has no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)


@cache
def ends_of_paths() -> frozenset[str]:
    """The paths of all files in the sources, docs and the root, and what remains of each without its first folders."""
    folders = [ROOT / name for name in (*SOURCES, "docs", "configs")]
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*"))]
    parts = [path.relative_to(ROOT).parts for path in paths if path.is_file()]
    return frozenset("/".join(each[first:]) for each in parts for first in range(len(each)))


@cache
def sources() -> dict[Path, str]:
    """The texts of all code. This file is left out: it names what does not exist."""
    files = (path for name in SOURCES for path in (ROOT / name).rglob("*.py") if path != Path(__file__))
    return {path: path.read_text() for path in files}


@cache
def source_words() -> frozenset[str]:
    """All words of the code."""
    texts = [*sources().values(), (ROOT / "pyproject.toml").read_text(), (ROOT / "Makefile").read_text()]
    return frozenset(word for text in texts for word in set(re.findall(r"\w+", text)))


# --- what pages list ---


def test_the_architecture_lists_the_layers_of_the_import_contracts():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    expected = {}
    for contract in contracts:
        if contract["type"] == "layers":
            levels = [re.split(" [|:] ", level) for level in contract["layers"]]
            (inside,) = contract.get("containers") or {name.rpartition(".")[0] for level in levels for name in level}
            expected[inside or "all"] = [{name.rpartition(".")[2] for name in level} for level in levels]
    text = section(DOCS / "architecture.md", "Layers")
    listed = {
        inside: [set(re.findall(r"`(\w+)`", level)) for level in levels.split(" > ")]
        for inside, levels in re.findall(
            r"^- \*\*([\w.]+)\*\*: (.*?)(?=^- |\Z)", text.replace("\n  ", " "), re.M | re.S
        )
    }
    assert listed == expected


def test_the_page_of_models_lists_the_kinds_of_blocks():
    listed = set(re.findall(r"\w+Spec\b", section(DOCS / "design/models.md", "A model is data"))) - {
        "ModelSpec",
        "LayerSpec",
    }
    kinds = (*get_args(spec.KVMixerSpec), *get_args(spec.StateMixerSpec), *get_args(spec.FeedForwardSpec))
    assert listed == {kind.__name__ for kind in kinds}


def test_the_readme_counts_the_native_families():
    (count,) = re.findall(r"^\| model families \| \[(\d+)\]", (ROOT / "README.md").read_text(), re.M)
    assert int(count) == len(FAMILIES.keys() | MULTIMODAL.keys())
    served = r"(\d+)\s+of\s+(?:its|the)\s+(\d+)(?:\s+decoder-only)?\s+causal\s+LMs"
    pages = [
        path.read_text() for path in (ROOT / "README.md", DOCS / "reference/models.md", DOCS / "reference/fallback.md")
    ]
    assert len({found for page in pages for found in re.findall(served, page)}) == 1


def test_the_map_lists_every_package():
    inside = ("rollout", "rollout/engine", "trainer_bridge")
    packages = {init.parent for name in inside for init in (ROOT / name).glob("*/__init__.py")}
    expected = {package.relative_to(ROOT).as_posix() for package in packages} | {
        "kernels/rollout_kernels",
        "rollout_gateway",
        "scripts",
        "tests",
    }
    listed = [folder.strip("`") for folder, _ in rows(section(DOCS / "architecture.md", "Map"))]
    assert sorted(listed) == sorted(expected)


def test_the_architecture_leads_to_every_page_of_a_subsystem():
    linked = re.findall(r"\(design/(\w+\.md)\)", section(DOCS / "architecture.md", "Subsystems"))
    assert sorted(linked) == sorted(page.name for page in (DOCS / "design").glob("*.md"))


def test_each_page_begins_with_its_readers():
    pages = [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    begins = {page: page.read_text().split("\n\n")[1] for page in pages}
    assert not [page.name for page, begin in begins.items() if not begin.startswith("For ")]


# --- what pages name ---


@by_page
def test_files_that_a_page_names_exist(page: Path):
    named = [name for name in re.findall(r"`([\w./-]+)`", prose(page)) if "NAME" not in name]
    named = [name for name in named if name.endswith(SUFFIXES) or name.startswith(tuple(f"{top}/" for top in SOURCES))]
    missing = [
        name
        for name in named
        if name != "config.json"  # of a checkpoint
        and not (ROOT / name).exists()
        and name not in ends_of_paths()
    ]
    assert named and not missing


@by_page
def test_names_that_a_page_quotes_are_in_the_code(page: Path):
    quoted = [name for name in re.findall(r"`([^`\n]+)`", prose(page)) if not name.endswith(SUFFIXES)]
    names = {word for name in quoted for word in re.findall(r"[A-Za-z_]\w*", name)}
    unknown = names - source_words() - MADE_UP
    assert names and not unknown


def test_files_and_classes_that_the_code_quotes_exist():
    defined: dict[str, list[str]] = {}
    for path, text in sources().items():
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for name in re.findall(r"^class (\w+)", text, re.M):
            defined.setdefault(name, []).append(module)
        if path.name == "__init__.py":
            for name in re.findall(r"\b[A-Z]\w*[a-z]\w*", text):
                defined.setdefault(name, []).append(module.removesuffix(".__init__"))
    wrong, in_docstrings = [], 0
    for path, text in sources().items():
        named = re.findall(r"`([\w./-]+\.(?:py|md|toml))`", text)
        if not path.is_relative_to(ROOT / "tests"):  # docstrings of modules also name files without quotes
            docstring = re.match(r'(?:#.*\n|\s)*"""(.*?)"""', text, re.S)
            plain = re.findall(r"[\w/-]+\.(?:py|md|toml)\b", docstring[1] if docstring else "")
            in_docstrings += len(plain)
            named += plain
        wrong += [(path.name, name) for name in named if name not in ends_of_paths()]
        for module, name in re.findall(r"`([a-z_][\w.]*)\.([A-Z]\w+)`", text):
            if name in defined and not any(f".{where}".endswith(f".{module}") for where in defined[name]):
                wrong.append((path.name, f"{module}.{name}"))
    assert len(sources()) > 500 and in_docstrings > 20 and not wrong


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")]),
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_links_lead_to_a_file_and_a_heading(page: Path):
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue  # not in this repository
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert not wrong


def python_blocks() -> list[object]:
    """The blocks of Python of all pages, with the page and the line of each."""
    found = []
    for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")]):
        text = page.read_text()
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
            line = text.count("\n", 0, block.start()) + 1
            found.append(pytest.param(block[1], id=f"{page.relative_to(ROOT).as_posix()}:{line}"))
    return found


@pytest.mark.parametrize("block", python_blocks())
def test_blocks_of_python_parse_and_import_names_that_exist(block: str):
    tree = compile(block, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module is not None and node.module.split(".")[0] in ("rollout", "rollout_gateway", "trainer_bridge"):
            source = find_spec(node.module)
            assert source is not None and source.origin is not None, f"{node.module} is not there"
            words = set(re.findall(r"\w+", Path(source.origin).read_text()))
            missing = [name.name for name in node.names if name.name not in words]
            assert not missing, f"{node.module} has no {missing}"


# --- how long pages are ---


@pytest.mark.parametrize("page", MOST_WORDS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_stay_short(page: Path):
    assert len(page.read_text().split()) <= MOST_WORDS[page]


def test_all_pages_by_hand_together_stay_short():
    pages = [page for page in BY_HAND if page.name != "CHANGELOG.md"]
    assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS_BY_HAND


def test_generated_pages_together_stay_short():
    assert sum(len((FOLDER / name).read_text().split()) for name in PAGES) <= MOST_WORDS_OF_REFERENCES


def paragraphs(text: str) -> list[str]:
    """The paragraphs and entries of lists of a page, without tables."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
    return re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))


def numbers(paragraph: str) -> list[str]:
    """The numbers of a paragraph, such as 3.5, 8B or a date with its time; not the number of an entry of a list."""
    text = re.sub(r"\d{4}-\d\d-\d\d( \d\d:\d\d)?", "1", re.sub(r"^\s*\d+\. ", "", paragraph))
    return re.findall(r"(?<!\w)\d[\d.,]*", text)


def test_numbers_of_a_paragraph_are_counted_outside_of_tables_and_code():
    page = "1. one 2 and\n3.5 of 8B\n2. another: 4\n\n| 5 | 6 |\n\n2026-11-27 10:26 and 7\n"
    assert [len(numbers(paragraph)) for paragraph in paragraphs(page)] == [3, 1, 2]


@pytest.mark.parametrize(
    "page",
    [*BY_HAND, *sorted(DOCS.glob("benchmarks/*.md")), *sorted(DOCS.glob("reference/*.md"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_no_paragraph_is_full_of_numbers(page: Path):
    full = [text for text in paragraphs(prose(page)) if len(numbers(text)) > MOST_NUMBERS]
    assert not full


def test_tests_that_the_page_of_public_reports_names_exist():
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (ROOT / "tests/public_reports.md").read_text())
    sources = {path: (ROOT / "tests" / path).read_text() for path, _ in named}
    assert len(named) > 50
    assert not [test for path, test in named if test and f"def {test}(" not in sources[path]]


@pytest.mark.parametrize("folders", MOST_LINES, ids=" ".join)
def test_the_product_stays_small(folders: tuple[str, ...]):
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    lines = sum(file.read_text().count("\n") for file in files)
    assert 0.9 * MOST_LINES[folders] < lines <= MOST_LINES[folders]


def test_the_architecture_has_few_drawings():
    text = (DOCS / "architecture.md").read_text()
    assert len(re.findall(r"^!\[", text, re.M)) + len(re.findall(r"^```", text, re.M)) // 2 <= MOST_DRAWINGS


def test_the_glossary_is_short_and_has_one_meaning_a_word():
    words = [word for word, _ in rows((DOCS / "glossary.md").read_text())]
    assert len(words) <= MOST_GLOSSARY_WORDS and words == sorted(set(words))
