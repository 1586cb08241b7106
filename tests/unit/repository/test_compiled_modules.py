"""What `tools/compiled` compiles is in the checkout, and nothing compiled is."""

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
