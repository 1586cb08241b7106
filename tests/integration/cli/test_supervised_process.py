"""Supervised processes start, are restarted after they end, and stop; the program is `tiny_program.py`."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fulcrum_cli.local.engines import find_free_ports
from fulcrum_cli.local.runtime import LocalRuntime
from fulcrum_cli.local.supervised_process import (
    STABLE_AFTER_S,
    ProcessSpec,
    Program,
    ProgramTimeouts,
    StartFailed,
    last_log_line,
    next_backoff_step,
    restart_delay_s,
)
from fulcrum_core.api import PDInstance
from fulcrum_core.ports import EngineObservation, EngineState, instance_key
from tests.waiting import wait_until

TINY = (sys.executable, str(Path(__file__).parent / "tiny_program.py"))
DEADLINE_S = 20.0
NAMESPACE = "default"
RUNNING, STARTING, EXITED = EngineState.RUNNING, EngineState.STARTING, EngineState.EXITED


def instance(name: str) -> PDInstance:
    spec = {"service": "e", "pool": "e-flex", "model": "m", "engine": {}}
    return PDInstance.model_validate({"metadata": {"name": name}, "spec": spec})


INSTANCE = instance("e-0")


class RecordedRuntime:
    """A `LocalRuntime` that records every observation of its engines in `trace`."""

    def __init__(self, logs: Path, timeouts: ProgramTimeouts | None = None) -> None:
        self.changed = asyncio.Event()
        self.trace: list[EngineObservation] = []
        self.spec = ProcessSpec(command=TINY)
        self.runtime = LocalRuntime(
            lambda _: self.spec, host="127.0.0.1", logs=logs, on_change=self._note, timeouts=timeouts
        )

    def _note(self, name: str) -> None:
        self.trace += [engine for engine in self.runtime.observe(NAMESPACE) if engine.name == name]
        self.changed.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true, checking it after each change."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def state(self, name: str = "e-0") -> EngineState:
        return next(engine.state for engine in self.runtime.observe(NAMESPACE) if engine.name == name)

    async def stop(self) -> None:
        """Stop the engine; returns when its process has ended."""
        await self.runtime.stop(instance_key(INSTANCE))
        await self.runtime.wait_stopped(instance_key(INSTANCE))

    async def start(self, *command: str, name: str = "e-0", startup_s: float = 0.0) -> None:
        self.spec = ProcessSpec(command=command)
        await self.runtime.start(instance(name), startup_s=startup_s)

    async def start_and_wait(self, *arguments: str, name: str = "e-0") -> int:
        """Start an engine; returns its process id once it runs."""
        await self.start(*TINY, *arguments, name=name)
        await self.wait_until(lambda: self.state(name) is RUNNING)
        return self.runtime.pids()[name]


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[RecordedRuntime]:
    recorder = RecordedRuntime(tmp_path, ProgramTimeouts(stop_grace_s=0.3))
    yield recorder
    await recorder.runtime.close()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_ready_engine_runs_at_the_port_of_its_ready_line(recorded: RecordedRuntime) -> None:
    await recorded.start_and_wait()
    engine = recorded.runtime.observe(NAMESPACE)[0]
    host, _, port = (engine.endpoint or "").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
    assert engine == EngineObservation("e-0", RUNNING, 0, f"127.0.0.1:{port}")


async def test_starting_an_engine_twice_changes_nothing(recorded: RecordedRuntime) -> None:
    pid = await recorded.start_and_wait()
    await recorded.start(*TINY, "--refuse", "something else")
    assert recorded.runtime.pids() == {"e-0": pid}


async def test_a_killed_engine_is_observed_at_once_and_restarted_on_another_port(
    recorded: RecordedRuntime,
) -> None:
    pid = await recorded.start_and_wait()
    before = recorded.runtime.observe(NAMESPACE)[0].endpoint
    recorded.trace.clear()
    recorded.runtime.kill("e-0")
    await recorded.wait_until(
        lambda: recorded.state() is RUNNING and recorded.runtime.observe(NAMESPACE)[0].restarts == 1
    )
    after = recorded.runtime.observe(NAMESPACE)[0].endpoint
    assert recorded.trace == [
        EngineObservation("e-0", EXITED, 0, None, "signal SIGKILL"),
        EngineObservation("e-0", STARTING, 1, None, "signal SIGKILL"),
        EngineObservation("e-0", RUNNING, 1, after, "signal SIGKILL"),
    ]
    assert (is_gone(pid), before != after) == (True, True)


async def test_a_stopped_engine_is_no_longer_observed(recorded: RecordedRuntime) -> None:
    pid = await recorded.start_and_wait()
    await recorded.stop()
    assert (is_gone(pid), recorded.runtime.observe(NAMESPACE)) == (True, ())


async def test_temporary_files_are_removed_with_the_process(
    recorded: RecordedRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))

    def left() -> list[Path]:
        return [path for path in (tmp_path / "t").rglob("*") if path.is_file()]

    await recorded.start_and_wait("--leave-file", "mine")
    (first,) = left()
    recorded.runtime.kill("e-0")
    await recorded.wait_until(
        lambda: recorded.state() is RUNNING and recorded.runtime.observe(NAMESPACE)[0].restarts == 1
    )
    (second,) = left()
    assert (first != second, second.name) == (True, "mine")
    await recorded.stop()
    assert list((tmp_path / "t").glob("*/*")) == []


async def test_stopping_an_unknown_engine_changes_nothing(recorded: RecordedRuntime) -> None:
    await recorded.stop()
    assert recorded.trace == []


async def test_an_engine_that_ignores_sigterm_is_killed(recorded: RecordedRuntime) -> None:
    pid = await recorded.start_and_wait("--ignore-sigterm")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await recorded.stop()
    assert is_gone(pid)
    assert loop.time() - began_s > 0.25  # the grace period


async def test_an_engine_can_be_stopped_before_it_is_ready(recorded: RecordedRuntime) -> None:
    await recorded.start(*TINY, "--never-ready")
    await recorded.stop()
    assert (recorded.runtime.observe(NAMESPACE), recorded.runtime.pids()) == ((), {})


async def test_an_engine_that_is_not_ready_in_time_is_restarted(tmp_path: Path) -> None:
    recorded = RecordedRuntime(tmp_path, ProgramTimeouts(ready_timeout_s=0.125, stop_grace_s=0.3))
    await recorded.start(*TINY, "--never-ready", startup_s=0.25)
    await recorded.wait_until(lambda: recorded.runtime.observe(NAMESPACE)[0].restarts == 1)
    await recorded.stop()
    assert recorded.trace[1].exit_reason == "not ready within 0.375 s"  # start-up time plus ready timeout


async def test_the_start_up_time_of_an_engine_extends_the_ready_timeout(tmp_path: Path) -> None:
    recorded = RecordedRuntime(tmp_path, ProgramTimeouts(ready_timeout_s=0.001))
    await recorded.start(*TINY, startup_s=60.0)
    await recorded.wait_until(lambda: recorded.state() is not STARTING)
    await recorded.stop()
    assert [engine.state for engine in recorded.trace] == [STARTING, RUNNING]


async def test_an_engine_that_refuses_its_arguments_reports_why(recorded: RecordedRuntime) -> None:
    await recorded.start(*TINY, "--refuse", "profile (x.yaml) cannot be read")
    await recorded.wait_until(lambda: bool(recorded.runtime.start_failures()))
    assert recorded.runtime.start_failures() == {"e-0": "exit code 2: profile (x.yaml) cannot be read"}


async def test_a_missing_program_reports_why(recorded: RecordedRuntime) -> None:
    await recorded.start("/nowhere/at/all")
    await recorded.wait_until(lambda: recorded.state() is EXITED)
    assert recorded.trace[-1].exit_reason == "cannot be started: No such file or directory"


async def test_a_program_that_crashes_before_ready_fails_its_start(
    tmp_path: Path,
) -> None:
    program = Program(
        "router",
        lambda _: ProcessSpec(command=(sys.executable, "-c", "raise SystemExit('no such module')")),
        log=tmp_path / "router.log",
        on_change=lambda: None,
    )
    program.start()
    with pytest.raises(StartFailed) as failed:
        await program.wait_ready()
    await program.stop()
    assert str(failed.value) == "router does not start: exit code 1: no such module"


async def test_a_restarted_program_can_keep_its_port(tmp_path: Path) -> None:
    changed = asyncio.Event()
    program = Program(
        "router",
        lambda last_ports: ProcessSpec(
            command=(*TINY, "--port", str(last_ports["port"] if last_ports else 0))
        ),
        log=tmp_path / "router.log",
        on_change=changed.set,
    )
    program.start()
    before = await program.wait_ready()
    program.kill()
    async with asyncio.timeout(DEADLINE_S):
        while not (program.restarts and program.state is RUNNING):
            changed.clear()
            await changed.wait()
    after = program.ports
    await program.stop()
    assert after == before


@pytest.mark.parametrize(
    ("ready_for_s", "step"),
    [
        pytest.param(STABLE_AFTER_S, 1, id="ready for ten seconds"),
        pytest.param(STABLE_AFTER_S - 0.1, 3, id="ready for less than ten seconds"),
        pytest.param(0.0, 3, id="never ready"),
    ],
)
def test_only_a_process_that_was_ready_for_ten_seconds_resets_the_backoff(
    ready_for_s: float, step: int
) -> None:
    assert next_backoff_step(2, ready_for_s=ready_for_s) == step


async def test_an_unreadable_ready_line_restarts_the_program(tmp_path: Path) -> None:
    changed = asyncio.Event()
    code = "print('ready [8101]', flush=True); import signal; signal.pause()"
    spec = ProcessSpec(command=(sys.executable, "-c", code))
    program = Program("router", lambda _: spec, log=tmp_path / "r.log", on_change=changed.set)
    program.start()
    async with asyncio.timeout(10):
        await changed.wait()
    await program.stop()
    assert program.exit_reason == "the ready line cannot be parsed"


def test_the_restart_delay_doubles_up_to_five_seconds() -> None:
    assert [restart_delay_s(runs) for runs in (1, 2, 3, 4, 99)] == [0.1, 0.2, 0.4, 0.8, 5.0]


@pytest.mark.parametrize(
    ("log", "line"),
    [
        pytest.param(
            "started\nerror: port (8000) is in use\n",
            "port (8000) is in use",
            id="the line of exit_with_error",
        ),
        pytest.param("Traceback\nValueError: no\n\n", "ValueError: no", id="the end of a traceback"),
        pytest.param("", "", id="an empty log"),
    ],
)
def test_the_last_log_line_is_the_exit_reason(tmp_path: Path, log: str, line: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(log)
    assert last_log_line(path) == line


SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, file=sys.stderr, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    calls = 0
    def do_GET(self):
        Handler.calls += 1
        self.send_response(200 if Handler.calls > 2 else 503)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def test_a_program_without_ready_line_is_polled_for_health_and_its_children_are_killed(
    tmp_path: Path,
) -> None:
    (port,) = find_free_ports("127.0.0.1", 1)
    leftover, log, changed = tmp_path / "left", tmp_path / "e.log", asyncio.Event()
    leftover.touch()
    spec = ProcessSpec(
        command=(
            sys.executable,
            "-m",
            "fulcrum_cli.local.exec_with_parent",
            sys.executable,
            "-c",
            SERVER,
            str(port),
        ),
        ports={"port": port},
        health_url=f"http://127.0.0.1:{port}/health",
        leftover_files=(leftover,),
    )
    program = Program("e-0", lambda _: spec, log=log, on_change=changed.set)
    program.start()
    async with asyncio.timeout(DEADLINE_S):
        ports = await program.wait_ready()
    child = int(log.read_text())
    running = not is_gone(child)
    await program.stop()
    await wait_until(lambda: _is_dead_or_zombie(child), "the program's child has ended")
    assert (ports, running, leftover.exists()) == ({"port": port}, True, False)


def test_exec_with_parent_without_a_program_says_what_is_missing() -> None:
    command = [sys.executable, "-m", "fulcrum_cli.local.exec_with_parent"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: PROGRAM (not given) is required\n")


def _is_dead_or_zombie(pid: int) -> bool:
    """Whether the process has ended, also if its parent has not collected its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
