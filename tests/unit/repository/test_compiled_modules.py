"""What `tools/compiled` compiles is in the checkout, and nothing compiled is."""

import ast
from itertools import chain
from pathlib import Path

import pytest

from tests.paths import ROOT
from tools.compiled import build
from tools.compiled.build import Program, describe_router, describe_simulator, read_modules

PROGRAMS = [
    pytest.param(describe_router(), id="the router"),
    pytest.param(describe_simulator(), id="the simulator"),
]


@pytest.mark.parametrize("name", ["modules.txt", "simulator.txt"])
def test_compiled_modules_exist_once_and_in_order(name: str) -> None:
    modules = read_modules(name)
    assert modules == sorted({module for module in modules if (ROOT / module).is_file()})


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_modules_are_of_the_packages_that_are_copied(program: Program) -> None:
    assert {ROOT.joinpath(*module.split("/")[:2]) for module in program.modules} == {
        ROOT / package for package in program.packages
    }


def test_image_holds_no_compiled_simulator() -> None:
    assert Path("simulator/fulcrum_simulator") not in describe_router().packages


def test_compiled_simulator_leaves_out_what_serves_sockets() -> None:
    assert [module for module in describe_simulator().modules if "/http1/" in module] == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_checkout_holds_no_compiled_module(program: Program) -> None:
    assert [path for package in program.packages for path in (ROOT / package).rglob("*.so")] == []


@pytest.mark.parametrize("module", sorted({*describe_router().modules, *describe_simulator().modules}))
def test_compiled_modules_await_nothing_while_they_handle_an_exception(module: str) -> None:
    """mypyc leaves it the exception of the thread, which all later ones then refer to and keep in memory."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    handling = chain.from_iterable((*node.handlers, *node.finalbody) for node in tries)
    waits = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)
    assert [inner.lineno for node in handling for inner in ast.walk(node) if isinstance(inner, waits)] == []


def test_sources_that_another_process_has_compiled_meanwhile_are_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    compiled = tmp_path / ".cache" / "compiled"

    def compile_second(_modules: tuple[str, ...], scratch: Path) -> None:
        (scratch / "lib").mkdir()
        (scratch / "lib" / "mine.so").touch()
        other = compiled / build._hash_inputs(Program((), ()))
        other.mkdir()
        (other / "theirs.so").touch()

    monkeypatch.setattr(build, "_compile", compile_second)
    monkeypatch.setattr(build, "SETTINGS", ())
    folder = build.compile_packages(Program((), ()))
    assert [path.name for path in build.list_libraries(folder)] == ["theirs.so"]
    assert list(compiled.iterdir()) == [folder]
