"""Locks, settings, make targets, decision pages and changelog fragments are consistent with one another."""

import re
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

from tests.paths import ROOT

ROOMS = ("core", "cluster", "router", "autoscaler", "operator", "simulator", "cli")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
PIN = re.compile(r"([a-z0-9-]+)==([^ ;]+)( ; [^\\]+)? \\")


def pinned_versions(lock: str) -> dict[str, str]:
    """Return the version of each package in a lock; fail on a line that is neither a pin nor a hash."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8").splitlines():
        if pin := PIN.fullmatch(line):
            found[pin[1]] = pin[2]
        else:
            assert HASH.fullmatch(line), line
    return found


def requirements_of(*extras: str) -> list[Requirement]:
    """Return the requirements of the project and of these extras, with our own extras resolved."""
    lists = [PROJECT["project"]["dependencies"]]
    lists += [PROJECT["project"]["optional-dependencies"][extra] for extra in extras]
    found: list[Requirement] = []
    for requirement in (Requirement(text) for texts in lists for text in texts):
        found += requirements_of(*requirement.extras) if requirement.name == "fulcrum" else [requirement]
    return found


@pytest.mark.parametrize(("lock", "extra"), [("play", "cli"), ("image", "image"), ("dev", "dev")])
def test_lock_satisfies_its_extra(lock: str, extra: str) -> None:
    locked = pinned_versions(lock)
    backend = [Requirement(text) for text in PROJECT["build-system"]["requires"]]
    unmet = [
        str(requirement)
        for requirement in [*requirements_of(extra), *(backend if lock != "image" else [])]
        if not requirement.specifier.contains(locked.get(requirement.name.lower().replace("_", "-"), "0"))
    ]
    assert unmet == []


@pytest.mark.parametrize("lock", ["play", "image"])
def test_user_locks_are_subsets_of_the_dev_lock(lock: str) -> None:
    assert pinned_versions(lock).items() <= pinned_versions("dev").items()


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").iterdir()), ids=lambda path: path.name)
def test_requirements_name_no_index(path: Path) -> None:
    named = re.findall(
        r"https?://|--(?:extra-)?index|--find-links|--trusted-host|@ ", path.read_text(encoding="utf-8")
    )
    assert named == []


def test_engine_lock_contains_the_pins_of_the_extra() -> None:
    lines = (ROOT / "requirements" / "engine.lock").read_text(encoding="utf-8").splitlines()
    assert set(PROJECT["project"]["optional-dependencies"]["engine"]) <= set(lines)


def test_all_settings_name_the_same_rooms() -> None:
    tool = PROJECT["tool"]
    packages = {f"fulcrum_{room}" for room in ROOMS}
    assert {
        "wheel": set(tool["hatch"]["build"]["targets"]["wheel"]["packages"]),
        "editable": set(tool["hatch"]["build"]["dev-mode-dirs"]),
        "types": set(tool["mypy"]["mypy_path"].split(":")),
        "contracts": set(tool["importlinter"]["root_packages"]),
        "sorting": set(tool["ruff"]["lint"]["isort"]["known-first-party"]),
    } == {
        "wheel": {f"{room}/fulcrum_{room}" for room in ROOMS},
        "editable": set(ROOMS),
        "types": set(ROOMS),
        "contracts": packages,
        "sorting": packages,
    }


def test_wheel_contains_the_files_that_the_code_reads(tmp_path: Path) -> None:
    """Without these files `fulcrum play` of an installed package fails at start."""
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(wheel) as packed:
        contained = {name for name in packed.namelist() if name.endswith(".yaml")}
    profiles = (ROOT / "core/fulcrum_core/data/profiles").glob("*.yaml")
    assert contained == {
        *(f"fulcrum_core/data/profiles/{profile.name}" for profile in profiles),
        *(f"fulcrum_cli/examples/{name}.yaml" for name in ("play", "play-tiers", "replay", "vllm-cpu")),
    }


def test_phony_make_targets_have_a_help_text() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    described = re.findall(r"^([a-z-]+):.*## \S", makefile, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)\\$", makefile, re.MULTILINE)
    assert phony
    assert sorted(described) == sorted(phony[1].split())


def test_decisions_have_unique_numbers_and_at_most_40_lines() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    numbers = [page.name[:4] for page in pages]
    assert numbers == sorted(set(numbers))
    assert [page.name for page in pages if page.read_text(encoding="utf-8").count("\n") > 40] == []


def test_changelog_fragments_are_named_by_kind() -> None:
    fragments = [path.name for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md"]
    assert [
        name
        for name in fragments
        if not re.fullmatch(r"[a-z0-9-]+\.(added|change|fix|breaking|deprecation)\.md", name)
    ] == []


def test_relative_links_between_pages_exist() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "changelog.d").glob("*.md"),
        *(ROOT / "requirements").glob("*.md"),
        *(ROOT / "bench").glob("*.md"),
    ]
    dead = [
        f"{page.relative_to(ROOT)} -> {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert dead == []
