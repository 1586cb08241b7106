"""Recordings of the live page are written and read, and replayed at any position and speed."""

import asyncio
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_cli.web.recording import read_states, record, write_states
from fulcrum_cli.web.replay import Replay
from fulcrum_core.errors import InvalidInput

STATE: dict[str, Any] = {
    "service": "chat", "namespace": "default", "model": "m", "mode": "Auto", "source": "a run",
    "controls": {}, "slo": {}, "rates": {}, "ttft": {}, "tpot": {}, "tiles": [], "flows": [], "tiers": [],
    "desired": [1, 1], "actual": [1, 1], "decisions": [], "unavailable": [], "waiting": 0, "flips": 0,
}  # fmt: skip
STATES = [{**STATE, "at_s": 100.0 + second, "n": second} for second in range(11)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.gz"
    write_states(STATES, path)
    return path


def pack(*changes: dict[str, Any]) -> bytes:
    """Return a recording with these changed states."""
    return gzip.compress(b"".join(orjson.dumps(STATES[5] | each) + b"\n" for each in changes))


def open_replay(file: Path) -> Replay:
    return Replay(read_states(file), file)


async def test_a_page_is_recorded_until_the_file_is_full(tmp_path: Path) -> None:
    broadcast, file = Broadcast(), tmp_path / "page.gz"
    bytes_max = len(orjson.dumps(STATES[0])) + 10
    task = asyncio.create_task(record(broadcast, file, bytes_max=bytes_max))
    await broadcast.wait_opened()
    for state in STATES[:2]:
        broadcast.send(orjson.dumps(state))
    await task
    assert [orjson.loads(line) for line in read_states(file)] == STATES[:2]
    assert broadcast.open_pages == 0


def test_a_state_is_shown_with_its_position_and_without_the_buttons_of_its_run(file: Path) -> None:
    replay = open_replay(file)
    replay.advance(2.5)
    assert replay.read_state() == {
        **STATE, "at_s": 102.0, "n": 2, "source": "a run, replay of run.gz", "controls": None,
        "replay": {
            "position_s": 2.5, "duration_s": 10.0, "playing": True, "speed": 1, "speeds": (1, 4, 16, 64),
        },
    }  # fmt: skip


async def test_the_buttons_move_pause_and_speed_up(file: Path) -> None:
    replay = open_replay(file)
    await replay.run_action({"action": "speed", "speed": 4})
    replay.advance(1.0)
    await replay.run_action({"action": "pause"})
    replay.advance(1.0)
    paused = replay.position_s
    await replay.run_action({"action": "seek", "position_s": 1e9})
    await replay.run_action({"action": "play"})
    assert (paused, replay.position_s, replay.playing) == (4.0, 0.0, True)  # play at the end begins again


def test_the_replay_stops_at_the_end(file: Path) -> None:
    replay = open_replay(file)
    replay.advance(11.0)
    assert (replay.position_s, replay.playing, replay.read_state()["n"]) == (10.0, False, 10)


@pytest.mark.parametrize(
    "action",
    [
        {},
        {"action": "kill", "instance": "i0"},
        {"action": "speed", "speed": 3},
        {"action": "seek", "position_s": "1"},
    ],
)
async def test_other_actions_are_refused(file: Path, action: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="action"):
        await open_replay(file).run_action(action)


def test_the_beginning_of_a_recording_whose_writer_was_killed_is_shown(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) * 9 // 10])
    assert 0 < len(read_states(file)) < len(STATES)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        pytest.param(None, "cannot be read", id="no file"),
        pytest.param(b"not gzip", "cannot be read", id="another format"),
        pytest.param(gzip.compress(b""), "has no state", id="empty"),
        pytest.param(gzip.compress(b"{}\n"), "is not a recording", id="JSON of something else"),
        pytest.param(gzip.compress(b"nonsense\n"), "is not a recording", id="no JSON"),
        pytest.param(pack({}, {"at_s": 1}), "not in order", id="out of order"),
        pytest.param(gzip.compress(b'{"at_s":0}\n'), "is not a recording", id="a time only"),
        pytest.param(pack({"at_s": "nan"}), "is not a recording", id="a time that is text"),
        pytest.param(pack({"at_s": 1e300}), "is not a recording", id="a time without end"),
        pytest.param(pack({"tiles": None}), "is not a recording", id="no instances"),
        pytest.param(
            gzip.compress(b"{}\n" * 100_001), "holds more than 100,000 states", id="too many states"
        ),
        pytest.param(gzip.compress(b" " * (9 << 20)), "has a state above 8 MiB", id="a line without end"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_its_name(
    tmp_path: Path, content: Any, rule: str
) -> None:
    file = tmp_path / "x.gz"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"--replay \({file}\).*{rule}") as refused:
        open_replay(file)
    assert str(refused.value).count(str(file)) == 1


def test_a_recording_that_is_full_is_replayed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulcrum_cli.web.recording.BYTES_MAX", 2 * len(orjson.dumps(STATES[0])))
    write_states(STATES, file)
    assert len(read_states(file)) == 2


def test_an_older_recording_stays_if_a_new_one_fails(file: Path) -> None:
    def fail() -> Iterator[dict[str, Any]]:
        yield STATES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_states(fail(), file)
    assert len(read_states(file)) == len(STATES)
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--record"):
        write_states(STATES, tmp_path / "missing" / "x.gz")
