"""The report of a `play` run, as JSON for programs and as a summary for people."""

from dataclasses import replace
from pathlib import Path

import pytest

from fulcrum_cli.commands.play import write_results
from fulcrum_cli.play.recorder import RecordedFlip, Recorder
from fulcrum_cli.play.report import RunFigures
from fulcrum_core.api.pdinstance import PDInstanceStatus
from fulcrum_core.errors import FulcrumError
from fulcrum_core.values import Actor, Phase, Role, Slo
from fulcrum_simulator.client import LoadOutcome, LoadResults, OutcomeKind


def figures(*, lateness_p99_ms: float | None = 4.0) -> RunFigures:
    results = LoadResults(Slo(ttft_s=1.0, tpot_s=0.1))
    for index, kind in enumerate((OutcomeKind.OK, OutcomeKind.OK, OutcomeKind.FAILED, OutcomeKind.BROKEN)):
        results.record_offered()
        reason = "" if kind is OutcomeKind.OK else "status 503"
        ttft_s = 0.5 if kind is OutcomeKind.OK else None
        results.record_outcome(
            LoadOutcome(index, kind, 0.001, 1.0, output_tokens=4, ttft_s=ttft_s, tpot_s=0.05, reason=reason)
        )
    recorder = Recorder()
    recorder.record_second({"a": PDInstanceStatus(phase=Phase.STARTING)})
    recorder.flips.append(
        RecordedFlip("a", Role.PREFILL, Role.DECODE, 102.5, Actor.AUTOSCALER, "decode load 1.2", 3, 4.5)
    )
    return RunFigures(
        load="moving",
        mode="Auto",
        seed=7,
        instances=1,
        engine="Simulated",
        started_at_s=100.0,
        duration_s=60.0,
        requests=results.report(),
        recorder=recorder,
        lateness_p99_ms=lateness_p99_ms,
    )


def test_the_json_report_holds_its_documented_keys() -> None:
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
        "engine_lateness_p99_ms",
        "machine_too_slow",
        "seed",
        "mode",
        "load",
    )
    assert {key: report[key] for key in known} == {
        "attainment": 0.5, "roles_over_time": {"a": "."}, "engine_lateness_p99_ms": 4.0,
        "machine_too_slow": False, "seed": 7, "mode": "Auto", "load": "moving",
    }  # fmt: skip


def test_the_summary_accounts_for_every_request() -> None:
    text = figures().as_text()
    assert "4 offered = 2 ok + 1 failed + 1 broken + 0 wrong" in text
    assert "2 × status 503" in text
    assert "0 to Prefill, 1 to Decode, acknowledged by the router in 4.5 ms (p99)" in text


def test_the_report_has_the_figures_of_each_tier() -> None:
    results = LoadResults(Slo(ttft_s=1.0, tpot_s=0.1))
    for tier, kind, end_s in (
        ("free", OutcomeKind.REFUSED, 3.0),
        ("premium", OutcomeKind.OK, 4.0),
        ("premium", OutcomeKind.REFUSED, 5.0),
    ):
        index = results.record_offered(tier)
        ttft_s = 0.5 if kind is OutcomeKind.OK else None
        results.record_outcome(LoadOutcome(index, kind, 0.0, end_s, 90, 10, tier, ttft_s))
    made = replace(figures(), requests=results.report())
    assert made.as_json()["tiers"] == {
        "free": {"offered": 1, "ok": 0, "refused": 1, "attainment": 0.0, "tokens_within_slo": 0},
        "premium": {"offered": 2, "ok": 1, "refused": 1, "attainment": 0.5, "tokens_within_slo": 100},
    }
    assert made.as_json()["tiers_by_first_refusal"] == ["free", "premium"]
    assert "premium     2 offered, 1 ok, 1 refused, attainment 50.0%" in made.as_text()
    assert "3 offered = 1 ok + 0 failed + 0 broken + 0 wrong + 2 refused" in made.as_text()


def test_a_machine_that_is_too_slow_is_reported_in_json_and_text() -> None:
    slow = figures(lateness_p99_ms=10.5)
    assert slow.as_json()["machine_too_slow"] is True
    assert "MACHINE TOO SLOW" in slow.as_text()
    assert "MACHINE TOO SLOW" not in figures(lateness_p99_ms=10.0).as_text()
    assert figures(lateness_p99_ms=None).too_slow is False


def test_an_unwritable_result_file_does_not_prevent_the_other(tmp_path: Path) -> None:
    from tests.unit.cli.play.test_view import frame

    gone, picture = tmp_path / "gone" / "figures.json", tmp_path / "play.svg"
    with pytest.raises(FulcrumError) as caught:
        write_results(figures(), frame(), json_file=gone, snapshot=picture)
    assert str(caught.value) == f"--json ({gone}) cannot be written: No such file or directory"
    assert picture.read_text().startswith("<svg")
    with pytest.raises(
        FulcrumError, match=r"--json .* cannot be written: .*; --snapshot .* cannot be written"
    ):
        write_results(figures(), frame(), json_file=gone, snapshot=gone)
