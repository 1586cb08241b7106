"""`fulcrum regret` with a saved response of `/requests`: what it prints and records, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.commands.regret import RegretOptions, run
from fulcrum_cli.target.selection import TargetOptions
from fulcrum_cli.web.recording import read_states
from fulcrum_cli.web.replay import Replay
from fulcrum_core.errors import InvalidInput
from tests.unit.cli.regret.test_recorded_traffic import ok_requests, page

SIMULATED = {"model": "m", "instances": 5, "engine": {"type": "Simulated", "profile": "laptop"}}


def regret(file: Path, **changes: Any) -> None:
    options = {"service": None, "save": None, "record": None, "profile": None, "seeds": 1} | changes
    run(RegretOptions(target=TargetOptions(), file=file, **options))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved page of a service with simulated engines."""
    file = tmp_path / "requests.json"
    slo = {"ttft_s": 1.5, "tpot_s": 0.05}
    file.write_text(json.dumps(page(*ok_requests(30), slo=slo, spec=SIMULATED)), encoding="utf-8")
    return file


def test_what_ran_is_compared_with_policies_splits_and_instances(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regret(saved)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("chat: 30 requests in 29s, 1.03/s, mean prompt 114 and mean answer 11 tokens")
    rows = [line.split() for line in lines if line.startswith(("arrow", "balanced", "static"))]
    assert [(row[0].partition(":")[0], row[1]) for row in rows] == [
        ("balanced", "5"),
        ("arrow", "5"),
        ("static", "5"),
        ("balanced", "5"),
        ("balanced", "4"),
        ("balanced", "6"),
        ("balanced", "7"),
    ]
    assert [row[0].partition("+")[2] for row in rows[:4]] == ["", "", "", "nodeflect"]
    assert rows[0][2:] == ["100.0", "as", "it", "ran"]
    assert lines[-1] == "With as many instances, nothing is clearly better than what ran."


def test_the_recorded_requests_become_a_recording_that_the_live_page_replays(
    saved: Path, tmp_path: Path
) -> None:
    recording = tmp_path / "run.gz"
    regret(saved, record=recording)
    replay = Replay(read_states(recording), recording)
    replay.position_s = replay.duration_s / 2
    state = replay.read_state()
    assert (len(state["tiles"]), state["rates"]["offered"] > 0, replay.duration_s > 28) == (5, True, True)
    assert (state["mode"], state["slo"]["attained"]) == ("Auto", 0.99)
    assert state["source"].startswith("simulated run of recorded requests of chat, policy balanced:")
    assert state["source"].endswith(", replay of run.gz")


def test_what_cannot_be_saved_is_one_line(saved: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--save \(/dev/full\) cannot be written: No space left"):
        regret(saved, save=Path("/dev/full"))


def test_real_engines_need_a_measured_profile(saved: Path) -> None:
    document = json.loads(saved.read_text(encoding="utf-8"))
    saved.write_text(json.dumps(document | {"spec": {"model": "m", "instances": 5}}), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"--profile \(none\) is needed: measure the engines"):
        regret(saved)


@pytest.mark.parametrize("seeds", [0, 21])
def test_the_number_of_seeds_is_limited(saved: Path, seeds: int) -> None:
    with pytest.raises(InvalidInput, match=rf"--seeds \({seeds}\) must be between 1 and 20"):
        regret(saved, seeds=seeds)


def test_recorded_requests_that_are_all_too_long_are_an_invalid_input(saved: Path) -> None:
    document = json.loads(saved.read_text(encoding="utf-8"))
    for request in document["requests"]:
        request[document["fields"].index("prompt_tokens")] = 10_000_000
    saved.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"recorded requests \(30\) are all too long: "):
        regret(saved)
