"""`fulcrum play` as a process of its own, with all processes that it starts and stops."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.web.recording import read_states
from tests.waiting import wait_until

DEADLINE_S = 30.0
PROCESSES = 10
"""Eight engines, a router and an autoscaler."""
PROGRAMS = ("fulcrum_simulator.server", "fulcrum_router", "fulcrum_autoscaler")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Yield an environment without other local runs. Its path is short: socket paths have a limit."""
    with tempfile.TemporaryDirectory(prefix="fulcrum-") as folder:
        yield {**os.environ, "XDG_RUNTIME_DIR": folder}


def play(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fulcrum_cli", "play", "--headless", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def figures(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    path = Path(environment["XDG_RUNTIME_DIR"]) / "figures.json"
    process = play(environment, "--json", str(path), *arguments)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, out + err
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def child_command_lines(environment: dict[str, str]) -> list[str]:
    """Return the command lines of the programs started in this environment."""
    variable = f"XDG_RUNTIME_DIR={environment['XDG_RUNTIME_DIR']}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # the process ended, or belongs to another user
    return [line for line in found if any(program in line for program in PROGRAMS)]


def every_request_is_accounted_for(requests: dict[str, Any]) -> bool:
    return bool(
        requests["offered"] == sum(requests[key] for key in ("ok", "refused", "failed", "broken", "wrong"))
    )


def test_a_short_run_serves_every_request_and_leaves_no_process_or_file(
    environment: dict[str, str], tmp_path: Path
) -> None:
    recording = tmp_path / "run.gz"
    report = figures(environment, "--for", "6s", "--seed", "1", "--record", str(recording))
    requests = report["requests"]
    assert every_request_is_accounted_for(requests)
    assert requests["offered"] > 40
    assert (requests["failed"], requests["broken"], requests["wrong"]) == (0, 0, 0)
    assert len(report["roles_over_time"]) == 8
    assert report["flips"], "a load for prefill makes the autoscaler flip within seconds"
    last = json.loads(read_states(recording)[-1])
    assert [len(last["tiles"]), last["attained"] is not None] == [8, True]
    assert child_command_lines(environment) == []
    assert list(Path(environment["XDG_RUNTIME_DIR"]).glob("fulcrum-*/*")) == []


def test_a_flood_of_the_lowest_tier_is_refused_and_no_premium_request(environment: dict[str, str]) -> None:
    report = figures(environment, "--for", "12s", "--load", "tiers-flood")
    requests, tiers = report["requests"], report["tiers"]
    assert every_request_is_accounted_for(requests)
    assert (requests["failed"], requests["broken"], requests["wrong"]) == (0, 0, 0)
    assert (tiers["premium"]["ok"], tiers["premium"]["refused"]) == (tiers["premium"]["offered"], 0)
    assert tiers["free"]["refused"] > tiers["standard"]["refused"]


def test_mode_off_never_flips(environment: dict[str, str]) -> None:
    report = figures(environment, "--for", "4s", "--mode", "Off")
    assert (report["mode"], report["flips"]) == ("Off", [])
    assert {letter for history in report["roles_over_time"].values() for letter in history} <= set("PD.")


def test_forced_flips_are_all_acknowledged_and_harm_no_request(environment: dict[str, str]) -> None:
    report = figures(environment, "--flips", "40", "--load", "steady", "--mode", "Off")
    forced = [flip for flip in report["flips"] if flip["by"] == "Person"]
    requests = report["requests"]
    assert len(forced) == 40
    assert all(flip["ack_ms"] is not None for flip in forced)
    assert [flip["to"] for flip in forced] == ["Decode", "Prefill"] * 20
    assert every_request_is_accounted_for(requests)
    assert (requests["failed"], requests["broken"], requests["wrong"]) == (0, 0, 0)


def test_a_killed_engine_is_restarted_and_its_requests_are_accounted_for(
    environment: dict[str, str],
) -> None:
    # Requests end before the next kill: one with which two engines died fails, as a query of death.
    report = figures(environment, "--for", "7s", "--load", "steady", "--kill-every", "2s")
    requests = report["requests"]
    assert every_request_is_accounted_for(requests)
    assert (requests["failed"], requests["wrong"], requests["broken_silently"]) == (0, 0, 0)
    killed = [
        name for name, history in report["roles_over_time"].items() if re.search(r"[PD][x.]+[PD]", history)
    ]
    assert len(killed) >= 2


def test_a_recording_is_replayed_completely(environment: dict[str, str]) -> None:
    path = Path(environment["XDG_RUNTIME_DIR"]) / "trace.csv"
    rows = "".join(f"{number / 4},{200 + number},{1 + number % 5}\n" for number in range(60))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    report = figures(environment, "--trace", str(path), "--speed", "5")
    assert (report["load"], report["requests"]["ok"]) == ("trace.csv", 60)
    assert report["requests"]["output_tokens"] == sum(1 + number % 5 for number in range(60))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_ends_every_process(environment: dict[str, str], number: signal.Signals) -> None:
    process = play(environment, "--for", "60s")
    try:
        await wait_until(
            lambda: len(child_command_lines(environment)) == PROCESSES,
            "all programs run",
            timeout_s=DEADLINE_S,
        )
        process.send_signal(number)
        await wait_until(
            lambda: process.poll() is not None and not child_command_lines(environment),
            "no program runs",
            timeout_s=DEADLINE_S,
        )
    finally:
        process.kill()
        process.communicate()
    assert list(Path(environment["XDG_RUNTIME_DIR"]).glob("fulcrum-*/*")) == []


async def test_killing_the_command_ends_its_processes(environment: dict[str, str]) -> None:
    process = play(environment, "--for", "60s")
    await wait_until(
        lambda: len(child_command_lines(environment)) == PROCESSES, "all programs run", timeout_s=DEADLINE_S
    )
    process.kill()
    process.communicate()
    await wait_until(lambda: not child_command_lines(environment), "no program runs", timeout_s=DEADLINE_S)
