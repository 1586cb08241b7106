"""Tests that need a cluster are skipped with the reason, or fail if required, where no cluster can run."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_terminal_summary
from tests.kubernetes import clusters
from tools.kubernetes import program
from tools.kubernetes.program import ClusterUnavailable, check_machine

RemoveRequirement = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture
def complete_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that meets all requirements, whatever the real machine is."""
    built = tmp_path / "k8s"
    built.touch()
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(program, "REQUIRED_PROGRAMS", ())
    monkeypatch.setattr(program, "CNI_PLUGIN_FOLDERS", (tmp_path,))
    monkeypatch.setattr(program, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(program, "locate_program", lambda: built)


@pytest.mark.usefixtures("complete_machine")
def test_complete_machine_is_accepted() -> None:
    check_machine()


def without_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "locate_program", lambda: Path("/nowhere"))
    monkeypatch.setattr(program, "find_go", lambda: None)


MISSING_REQUIREMENTS = [
    pytest.param(lambda patch: patch.setattr(sys, "platform", "darwin"), "Linux and root", id="not Linux"),
    pytest.param(lambda patch: patch.setattr(os, "geteuid", lambda: 1000), "Linux and root", id="not root"),
    pytest.param(
        lambda patch: patch.setattr(program, "REQUIRED_PROGRAMS", ("x-tool",)), "x-tool", id="a program"
    ),
    pytest.param(
        lambda patch: patch.setattr(program, "CNI_PLUGIN_FOLDERS", ()), "CNI plugins", id="CNI plugins"
    ),
    pytest.param(lambda patch: patch.setattr(program, "CGROUP_ROOT", Path("/no")), "cgroup v1", id="cgroups"),
    pytest.param(without_go, "needs Go", id="neither Go nor a built program"),
]


@pytest.mark.usefixtures("complete_machine")
@pytest.mark.parametrize(("remove", "expected_message"), MISSING_REQUIREMENTS)
def test_missing_requirement_is_named(
    monkeypatch: pytest.MonkeyPatch, remove: RemoveRequirement, expected_message: str
) -> None:
    remove(monkeypatch)
    with pytest.raises(ClusterUnavailable, match=expected_message):
        check_machine()


@pytest.mark.usefixtures("complete_machine")
@pytest.mark.parametrize(
    ("required", "expected_exception"),
    [
        pytest.param("", pytest.skip.Exception, id="skipped with the reason"),
        pytest.param("required", ClusterUnavailable, id="failed if required"),
    ],
)
def test_levels_that_cannot_run_are_skipped_unless_required(
    monkeypatch: pytest.MonkeyPatch, required: str, expected_exception: type[BaseException]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("KUBERNETES_TESTS", required)
    with pytest.raises(expected_exception, match="a test cluster needs Linux and root"):
        clusters.require_kubernetes()


class Reporter:
    """The methods of pytest's reporter that a summary calls."""

    def __init__(self, *skipped: tuple[str, str]) -> None:
        reports = [
            SimpleNamespace(nodeid=name, longrepr=("file", 1, f"Skipped: {reason}"))
            for name, reason in skipped
        ]
        self.stats, self.lines = {"skipped": reports}, list[str]()

    def section(self, *_: object, **__: object) -> None:
        """Ignore the heading."""

    def line(self, text: str, **_: object) -> None:
        """Record one line."""
        self.lines.append(text)


def test_summary_has_one_line_for_each_reason_of_skipped_tests() -> None:
    reporter: Any = Reporter(
        ("test_a.py::test_b", "no Kubernetes"),
        ("test_a.py::test_a", "no Kubernetes"),
        ("test_b.py::test_a", "no recordings"),
    )
    config: Any = SimpleNamespace(args=["one_file.py"], option=SimpleNamespace(seed=7))
    config.invocation_params = SimpleNamespace(dir=Path("/nowhere"))
    pytest_terminal_summary(reporter, config)
    assert reporter.lines[-3:] == [  # the lines above them are measurements of this run
        "LEFT OUT 2 tests: no Kubernetes",
        "LEFT OUT test_b.py::test_a: no recordings",
        "seed: repeat this run with --seed 7",
    ]
