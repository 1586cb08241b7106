"""The figures of a run, for programs and for people."""

from pathlib import Path

import pytest

from fulcrum_cli.play.command import leave
from fulcrum_cli.play.recorder import Flip, Recorder
from fulcrum_cli.play.report import RunFigures
from fulcrum_core.api.pdinstance import PDInstanceStatus
from fulcrum_core.errors import FulcrumError
from fulcrum_core.values import Actor, Phase, Role, Slo
from fulcrum_simulator.client import Ending, Outcome, Tally


def figures(*, lateness_p99_ms: float | None = 4.0) -> RunFigures:
    tally = Tally(Slo(ttft_s=1.0, tpot_s=0.1))
    for index, ending in enumerate((Ending.OK, Ending.OK, Ending.FAILED, Ending.BROKEN)):
        tally.offer()
        reason = "" if ending is Ending.OK else "status 503"
        ttft_s = 0.5 if ending is Ending.OK else None
        tally.end(
            Outcome(index, ending, 0.001, 1.0, output_tokens=4, ttft_s=ttft_s, tpot_s=0.05, reason=reason)
        )
    recorder = Recorder()
    recorder.second({"a": PDInstanceStatus(phase=Phase.STARTING)})
    recorder.flips.append(
        Flip("a", Role.PREFILL, Role.DECODE, 102.5, Actor.AUTOSCALER, "decode load 1.2", 3, 4.5)
    )
    return RunFigures(
        load="moving",
        mode="Auto",
        seed=7,
        instances=1,
        began_at_s=100.0,
        lasted_s=60.0,
        requests=tally.report(),
        recorder=recorder,
        lateness_p99_ms=lateness_p99_ms,
    )


def test_the_json_holds_what_was_promised() -> None:
    report = figures().as_json()
    requests = report["requests"]
    assert {key: requests[key] for key in ("offered", "ok", "failed", "broken", "wrong")} == {
        "offered": 4, "ok": 2, "failed": 1, "broken": 1, "wrong": 0,
    }  # fmt: skip
    assert report["flips"] == [
        {
            "instance": "a", "from": "Prefill", "to": "Decode", "at_s": 2.5, "reason": "decode load 1.2",
            "by": "Autoscaler", "ack_ms": 4.5,
        }
    ]  # fmt: skip
    known = (
        "attainment",
        "roles_over_time",
        "engine_lateness_ms_p99",
        "machine_too_slow",
        "seed",
        "mode",
        "load",
    )
    assert {key: report[key] for key in known} == {
        "attainment": 0.5, "roles_over_time": {"a": "."}, "engine_lateness_ms_p99": 4.0,
        "machine_too_slow": False, "seed": 7, "mode": "Auto", "load": "moving",
    }  # fmt: skip


def test_the_summary_accounts_for_every_request() -> None:
    text = figures().as_text()
    assert "4 offered = 2 ok + 1 failed + 1 broken + 0 wrong" in text
    assert "2 × status 503" in text
    assert "0 to Prefill, 1 to Decode, acknowledged by the router in 4.5 ms (p99)" in text


def test_a_machine_that_is_too_slow_says_so_loudly() -> None:
    slow = figures(lateness_p99_ms=10.5)
    assert slow.as_json()["machine_too_slow"] is True
    assert "MACHINE TOO SLOW" in slow.as_text()
    assert "MACHINE TOO SLOW" not in figures(lateness_p99_ms=10.0).as_text()
    assert figures(lateness_p99_ms=None).too_slow is False


def test_a_file_that_cannot_be_written_does_not_keep_the_other_from_it(tmp_path: Path) -> None:
    from tests.unit.cli.play.test_view import frame

    gone, picture = tmp_path / "gone" / "figures.json", tmp_path / "play.svg"
    with pytest.raises(FulcrumError) as caught:
        leave(figures(), frame(), json_file=gone, snapshot=picture)
    assert str(caught.value) == f"--json ({gone}) cannot be written: No such file or directory"
    assert picture.read_text().startswith("<svg")
    with pytest.raises(
        FulcrumError, match=r"--json .* cannot be written: .*; --snapshot .* cannot be written"
    ):
        leave(figures(), frame(), json_file=gone, snapshot=gone)
