"""The command line of test clusters says in one line what it cannot do."""

import sys
from pathlib import Path

import pytest

from tools.kubernetes.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "expected_message"),
    [
        pytest.param(["status"], "error: no cluster is up in {folder}", id="status of none"),
        pytest.param(["load", "{folder}/x.tar"], "error: {folder}/x.tar is not there", id="load of no file"),
        pytest.param(["load", __file__], "error: no cluster is up in {folder}", id="load into none"),
        pytest.param(["kill", "n7"], "error: node n7 is not there; there are none", id="a node that is not"),
    ],
)
def test_command_without_a_cluster_fails_with_one_line(
    arguments: list[str], expected_message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [argument.format(folder=tmp_path) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["kubernetes", "--folder", str(tmp_path), *given])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == expected_message.format(folder=tmp_path)
