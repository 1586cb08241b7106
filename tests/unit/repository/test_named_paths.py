"""Files, folders and modules that the documentation and docstrings name between backticks exist."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.unit.repository.test_source_rules import PACKAGES, ROOMS

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"]
SOURCES = [path for folder in (*PACKAGES, ROOT / "tools", ROOT / "bench") for path in folder.rglob("*.py")]
SLASHED, DOTTED = re.compile(r"[\w.-]+(?:/[\w.*-]+)+"), re.compile(r"fulcrum_\w+(?:\.\w+)+")


@cache
def list_paths() -> frozenset[str]:
    """List the files of the repository and their folders."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {Path(line) for line in done.stdout.splitlines()}
    return frozenset(str(path) for file in files for path in (file, *file.parents))


def is_missing(name: str) -> bool:
    """Whether a name is a path or a module of ours that does not exist. Others, as `a/b`, are not ours.

    Paths begin in the repository, in a room's package, or leave the package out: `operator/plan`.
    """
    name = name.rstrip("/")
    if DOTTED.fullmatch(name):
        return not _is_module(name.split("."))
    if not SLASHED.fullmatch(name):
        return False
    first, _, rest = name.partition("/")
    places = [package.relative_to(ROOT) for package in PACKAGES]
    found = [f"{place}/{name}" for place in places if f"{place}/{first}" in list_paths()]
    found += [f"{first}/fulcrum_{first}/{rest}"] if first in ROOMS else []
    found += [name] if first in list_paths() else []
    return bool(found) and not any(map(_exists, found))


def _is_module(parts: list[str]) -> bool:
    """Whether these are a module, or a module and something that it defines."""
    path = "/".join([parts[0].removeprefix("fulcrum_"), *parts])
    module, _, attribute = path.rpartition("/")
    if _exists(path):
        return True
    file = next((f for f in (f"{module}.py", f"{module}/__init__.py") if f in list_paths()), None)
    return file is not None and re.search(rf"\b{attribute}\b", (ROOT / file).read_text("utf-8")) is not None


def _exists(path: str) -> bool:
    return {path, f"{path}.py"} & list_paths() != set() or ("*" in path and any(ROOT.glob(path)))


def list_docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def list_missing(text: str) -> list[str]:
    return [name for name in re.findall(r"`([^`\n]+)`", text) if is_missing(name)]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("tests/unit/repository", False),
        ("tests/unit/nothing", True),
        ("operator/plan/status/", False),
        ("plan/status", False),
        ("plan/nothing", True),
        ("tests/*/conftest.py", False),
        ("fulcrum_core.values.Role", False),
        ("fulcrum_core.api", False),
        ("fulcrum_core.values.Nothing", True),
        ("fulcrum_core.nothing", True),
        ("application/json", False),
        ("/v1/completions", False),
        ("a name", False),
    ],
)
def test_a_name_is_missing_if_it_is_ours_and_does_not_exist(name: str, missing: bool) -> None:
    assert is_missing(name) is missing


def test_pages_name_paths_that_exist() -> None:
    pages = [page for page in PAGES if page.parent.name != "decisions"]  # those tell how it was
    missing = {str(page.relative_to(ROOT)): list_missing(page.read_text(encoding="utf-8")) for page in pages}
    assert {page: names for page, names in missing.items() if names} == {}


def test_docstrings_name_paths_that_exist() -> None:
    missing = {
        str(file.relative_to(ROOT)): [name for text in list_docstrings(file) for name in list_missing(text)]
        for file in SOURCES
    }
    assert {file: names for file, names in missing.items() if names} == {}
