"""Rules of the source that no linter checks: location, size, names and docstrings of modules; sleeps."""

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.paths import ROOT

ROOMS = ("core", "cluster", "router", "autoscaler", "operator", "simulator", "cli")
PACKAGES = [ROOT / room / f"fulcrum_{room}" for room in ROOMS]
MODULES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".lock", ".in", ".json", ".svg", ""}

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60

# These name parts say nothing about the purpose of the thing.
MEANINGLESS_NAMES = re.compile(r"(^|_)(manager|helpers?|utils?|misc|common|worker)(_|$)")


def module_params(*, excluded: tuple[str, ...] = ()) -> list[object]:
    """Return every module as a test parameter with its path as id."""
    return [
        pytest.param(path, id=str(path.relative_to(ROOT))) for path in MODULES if path.name not in excluded
    ]


def import_name(path: Path) -> str:
    """Return the module's import name: its path below the room folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts).removesuffix(".__init__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the rules need of a module. Its syntax tree is dropped: 700 trees make garbage collection slow."""

    lines: int
    is_empty: bool
    docstring: str | None
    functions: tuple[tuple[str, int], ...]
    """Names and numbers of lines."""
    classes: tuple[str, ...]
    imported: frozenset[str]
    is_program: bool


@cache
def read_source(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    return Source(
        lines=text.count("\n"),
        is_empty=not tree.body,
        docstring=ast.get_docstring(tree),
        functions=tuple(
            (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        classes=tuple(node.name for node in nodes if isinstance(node, ast.ClassDef)),
        imported=frozenset(name for node in nodes for name in imported_names(node)),
        is_program='if __name__ == "__main__":' in text,
    )


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield every imported name that may be a module: a and a.b for `from a import b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def committed_files() -> list[Path]:
    """Return the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("folder", [*ROOMS, "tests"])
def test_room_folders_have_no_init_file(folder: str) -> None:
    """`operator/__init__.py` would hide Python's own operator module from the whole interpreter."""
    inside = (
        ROOT.joinpath(folder).rglob("__init__.py") if folder == "tests" else [ROOT / folder / "__init__.py"]
    )
    assert [path for path in inside if path.exists()] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_package_is_typed(package: Path) -> None:
    assert (package / "py.typed").exists()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_folder_of_a_package_is_a_package(package: Path) -> None:
    """The import contracts ignore a folder without `__init__.py`."""
    folders = {path.parent for path in package.rglob("*.py")}
    assert sorted(folder for folder in folders if not (folder / "__init__.py").exists()) == []


@pytest.mark.parametrize("path", module_params(excluded=("__main__.py",)))
def test_every_module_can_be_imported_alone(path: Path) -> None:
    """Circular imports and errors at import time pass the type checker."""
    assert importlib.import_module(import_name(path)).__name__ == import_name(path)


@pytest.mark.parametrize("path", module_params())
def test_every_module_has_a_docstring(path: Path) -> None:
    source = read_source(path)
    assert source.docstring or source.is_empty


@pytest.mark.parametrize("path", module_params())
def test_modules_and_functions_stay_below_the_size_limits(path: Path) -> None:
    source = read_source(path)
    too_long = {name: lines for name, lines in source.functions if lines > FUNCTION_LINES_MAX}
    assert (too_long, source.lines <= MODULE_LINES_MAX) == ({}, True), f"{source.lines} lines"


@pytest.mark.parametrize("path", module_params())
def test_no_name_contains_manager_helper_or_utils(path: Path) -> None:
    source = read_source(path)
    names = [path.stem, *source.classes, *(name for name, _ in source.functions)]
    snake = {name: re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in names}
    assert [name for name, spelled in snake.items() if MEANINGLESS_NAMES.search(spelled)] == []


def test_half_of_all_functions_are_short() -> None:
    sizes = sorted(lines for path in MODULES for _, lines in read_source(path).functions)
    assert sizes[len(sizes) // 2] <= 8


def test_every_module_is_imported_or_started() -> None:
    """A module that is neither imported nor started as a program is dead code."""
    imported = frozenset().union(*(read_source(path).imported for path in MODULES))
    dead = [
        import_name(path)
        for path in MODULES
        if path.name not in ("__init__.py", "__main__.py")
        and not read_source(path).is_program
        and import_name(path) not in imported
    ]
    assert dead == []


@cache
def list_distributions_by_module() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_distributions_of_its_extra(room: str) -> None:
    """A package that only another room's extra installs may be missing in another environment."""
    by_module = list_distributions_by_module()
    imported = {
        distribution.lower().replace("_", "-")
        for path in sorted((ROOT / room / f"fulcrum_{room}").rglob("*.py"))
        for name in read_source(path).imported
        for distribution in by_module.get(name.split(".")[0], [])
        if not name.startswith("fulcrum_")
    }
    assert imported - allowed_distributions(room) == set()


def test_local_run_imports_no_kubernetes_library() -> None:
    """`make play` installs no Kubernetes library, so no program of a local run may import one."""
    started = (
        "fulcrum_cli.__main__",
        "fulcrum_cli.commands.up",
        "fulcrum_cli.local.run",
        "fulcrum_router.__main__",
    )
    loads = f"import sys, {', '.join(started)}, fulcrum_autoscaler.program; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert {"kopf", "kubernetes", "jwt", "cryptography", "opentelemetry"} & set(done.stdout.split()) == set()


def allowed_distributions(room: str) -> set[str]:
    """Return the distributions that a room may import: those of the project and of the room's extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: distributions(texts) for name, texts in project["optional-dependencies"].items()}
    extras["core"] = set()
    # Only used in a cluster: `test_local_run_imports_no_kubernetes_library` checks that.
    for shell in ("operator", "router"):
        extras[shell] |= extras["kubernetes"]
    shared = (
        extras["router"] & extras["autoscaler"] & extras["operator"]
    )  # `cluster` is installed with each of them
    extras["cluster"] = shared | extras["kubernetes"]
    # `tracing` says how to install it. Several distributions share the module's name.
    parts = importlib.metadata.packages_distributions().get("opentelemetry", ())
    extras["cluster"] |= {part.lower().replace("_", "-") for part in parts}
    extras["cli"] |= extras["operator"] | extras["router"] | extras["autoscaler"] | extras["simulator"]
    extras["cli"] |= extras["plot"]  # `fulcrum simulate --plot` says how to install it
    return distributions(project["dependencies"]) | {"pydantic-core"} | extras[room]  # installed by pydantic


def distributions(requirements: list[str]) -> set[str]:
    return {Requirement(text).name.lower().replace("_", "-") for text in requirements}


SLEEP_FUNCTIONS = frozenset({"asyncio.sleep", "time.sleep", "anyio.sleep", "trio.sleep"})
SLEEP_EXCEPTION = "tests/waiting.py"
"""The shared helpers that poll, and move virtual clocks."""


def find_sleeps(source: str) -> list[int]:
    """Return the lines that use a sleep function: by name, by import, or in the text of a child program."""
    if "sleep" not in source:
        return []
    lines: list[int] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found = ast.unparse(node) in SLEEP_FUNCTIONS
        elif isinstance(node, ast.ImportFrom):
            found = any(f"{node.module}.{alias.name}" in SLEEP_FUNCTIONS for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = any(f"{name}(" in node.value for name in SLEEP_FUNCTIONS)
        else:
            continue
        if found:
            lines.append(node.lineno)
    return sorted(lines)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import time\ntime.sleep(1)", id="call"),
        pytest.param("import asyncio\nnap = asyncio.sleep", id="reference"),
        pytest.param("import asyncio as time\nfrom asyncio import sleep", id="import"),
        pytest.param("import subprocess\nPROGRAM = 'import time; time.sleep(9)'", id="child program"),
    ],
)
def test_sleep_is_found_in_every_form(source: str) -> None:
    assert find_sleeps(source) == [2]


def test_no_test_sleeps_except_the_shared_polling_helpers() -> None:
    found = {
        name: len(lines)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (name := str(path.relative_to(ROOT))) != SLEEP_EXCEPTION and path != Path(__file__)
        if (lines := find_sleeps(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_no_committed_file_names_a_home_folder_or_private_address() -> None:
    """A home folder or a private address in the tree works on one machine and misleads on the others."""
    private = re.compile(r"(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/|\b(?:10|192\.168)(?:\.\d+){2,3}:\d+")
    named = {
        str(path.relative_to(ROOT)): found.group()
        for path in committed_files()
        if path.suffix in TEXTS and path != Path(__file__)
        if (found := private.search(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert named == {}
