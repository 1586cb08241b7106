"""What `tools/compiled` compiles is in the checkout, and nothing compiled is."""

import ast
from itertools import chain

import pytest

from tests.paths import ROOT
from tools.compiled.build import PACKAGES, list_modules


def test_compiled_modules_exist_once_and_in_order() -> None:
    modules = list_modules()
    assert modules == sorted({module for module in modules if (ROOT / module).is_file()})


def test_compiled_modules_are_of_the_packages_that_are_copied() -> None:
    assert {ROOT.joinpath(*module.split("/")[:2]) for module in list_modules()} == {
        ROOT / package for package in PACKAGES
    }


def test_checkout_holds_no_compiled_module() -> None:
    assert [path for package in PACKAGES for path in (ROOT / package).rglob("*.so")] == []


@pytest.mark.parametrize("module", list_modules())
def test_compiled_modules_await_nothing_while_they_handle_an_exception(module: str) -> None:
    """mypyc leaves it the exception of the thread, which all later ones then refer to and keep in memory."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    handling = chain.from_iterable((*node.handlers, *node.finalbody) for node in tries)
    waits = (ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncWith, ast.AsyncFor)
    assert [inner.lineno for node in handling for inner in ast.walk(node) if isinstance(inner, waits)] == []
