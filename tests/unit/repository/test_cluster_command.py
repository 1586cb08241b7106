"""The command line of the test clusters reports each error in one line."""

import sys
from pathlib import Path

import pytest

from tools.kubernetes.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        pytest.param(["status"], "error: no cluster is up in {folder}", id="status without a cluster"),
        pytest.param(
            ["load", "{folder}/x.tar"],
            "error: file {folder}/x.tar does not exist",
            id="load of a missing file",
        ),
        pytest.param(["load", __file__], "error: no cluster is up in {folder}", id="load without a cluster"),
        pytest.param(["kill", "n7"], "error: no node n7; nodes: none", id="unknown node"),
    ],
)
def test_command_without_a_cluster_fails_with_one_line(
    arguments: list[str], expected_message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [argument.format(folder=tmp_path) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["kubernetes", "--folder", str(tmp_path), *given])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == expected_message.format(folder=tmp_path)
