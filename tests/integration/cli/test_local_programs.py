"""Supervised processes: started, seen to die, started again, ended; with a program that does nothing else."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from fulcrum_cli.local import Life, LocalRuntime, ProgramOptions, StartFailed
from fulcrum_cli.local.engines import free_ports
from fulcrum_cli.local.program import STABLE_S, Program, last_words, restart_delay_s, short_lives_after
from fulcrum_core.api import PDInstance
from fulcrum_core.ports import EngineObservation, EngineState, instance_key

TINY = (sys.executable, str(Path(__file__).parent / "tiny_program.py"))
DEADLINE_S = 20.0
NAMESPACE = "default"
RUNNING, STARTING, EXITED = EngineState.RUNNING, EngineState.STARTING, EngineState.EXITED


def instance(name: str) -> PDInstance:
    spec = {"service": "e", "pool": "e-flex", "model": "m", "engine": {}}
    return PDInstance.model_validate({"metadata": {"name": name}, "spec": spec})


E_0 = instance("e-0")


class Watched:
    """A runtime, and all that was ever seen of its engines."""

    def __init__(self, logs: Path, options: ProgramOptions | None = None) -> None:
        self.changed = asyncio.Event()
        self.trace: list[EngineObservation] = []
        self.life = Life(command=TINY)
        self.runtime = LocalRuntime(
            lambda _: self.life, host="127.0.0.1", logs=logs, on_change=self._note, options=options
        )

    def _note(self, name: str) -> None:
        self.trace += [seen for seen in self.runtime.observe(NAMESPACE) if seen.name == name]
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until this holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    def state(self, name: str = "e-0") -> EngineState:
        return next(seen.state for seen in self.runtime.observe(NAMESPACE) if seen.name == name)

    async def ended(self) -> None:
        """Ask the engine to end; returns when it is gone."""
        await self.runtime.stop(instance_key(E_0))
        await self.runtime.gone(instance_key(E_0))

    async def start(self, *command: str, name: str = "e-0", startup_s: float = 0.0) -> None:
        self.life = Life(command=command)
        await self.runtime.start(instance(name), startup_s=startup_s)

    async def running(self, *arguments: str, name: str = "e-0") -> int:
        """Start an engine; returns its process id once it runs."""
        await self.start(*TINY, *arguments, name=name)
        await self.until(lambda: self.state(name) is RUNNING)
        return self.runtime.pids()[name]


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    made = Watched(tmp_path, ProgramOptions(stop_grace_s=0.3))
    yield made
    await made.runtime.close()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_an_engine_that_says_ready_runs_at_the_port_it_named(watched: Watched) -> None:
    await watched.running()
    seen = watched.runtime.observe(NAMESPACE)[0]
    host, _, port = (seen.endpoint or "").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
    assert seen == EngineObservation("e-0", RUNNING, 0, f"127.0.0.1:{port}")


async def test_starting_what_was_started_changes_nothing(watched: Watched) -> None:
    pid = await watched.running()
    await watched.start(*TINY, "--refuse", "something else")
    assert watched.runtime.pids() == {"e-0": pid}


async def test_a_killed_engine_is_seen_at_once_and_started_again_elsewhere(watched: Watched) -> None:
    pid = await watched.running()
    before = watched.runtime.observe(NAMESPACE)[0].endpoint
    watched.trace.clear()
    watched.runtime.kill("e-0")
    await watched.until(
        lambda: watched.state() is RUNNING and watched.runtime.observe(NAMESPACE)[0].restarts == 1
    )
    after = watched.runtime.observe(NAMESPACE)[0].endpoint
    assert watched.trace == [
        EngineObservation("e-0", EXITED, 0, None, "signal SIGKILL"),
        EngineObservation("e-0", STARTING, 1, None, "signal SIGKILL"),
        EngineObservation("e-0", RUNNING, 1, after, "signal SIGKILL"),
    ]
    assert (gone(pid), before != after) == (True, True)


async def test_a_stopped_engine_is_gone(watched: Watched) -> None:
    pid = await watched.running()
    await watched.ended()
    assert (gone(pid), watched.runtime.observe(NAMESPACE)) == (True, ())


async def test_temporary_files_of_a_life_are_gone_with_it_however_it_ended(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))

    def left() -> list[Path]:
        return [path for path in (tmp_path / "t").rglob("*") if path.is_file()]

    await watched.running("--temporary", "mine")
    (first,) = left()
    watched.runtime.kill("e-0")
    await watched.until(
        lambda: watched.state() is RUNNING and watched.runtime.observe(NAMESPACE)[0].restarts == 1
    )
    (second,) = left()
    assert (first != second, second.name) == (True, "mine")
    await watched.ended()
    assert list((tmp_path / "t").glob("*/*")) == []


async def test_stopping_what_is_not_there_changes_nothing(watched: Watched) -> None:
    await watched.ended()
    assert watched.trace == []


async def test_an_engine_that_does_not_listen_to_sigterm_is_killed(watched: Watched) -> None:
    pid = await watched.running("--deaf")
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await watched.ended()
    assert gone(pid)
    assert loop.time() - began_s > 0.25  # its grace


async def test_an_engine_may_be_stopped_before_it_is_ready(watched: Watched) -> None:
    await watched.start(*TINY, "--silent")
    await watched.ended()
    assert (watched.runtime.observe(NAMESPACE), watched.runtime.pids()) == ((), {})


async def test_an_engine_that_never_gets_ready_is_ended_and_tried_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, ProgramOptions(ready_timeout_s=0.125, stop_grace_s=0.3))
    await watched.start(*TINY, "--silent", startup_s=0.25)
    await watched.until(lambda: watched.runtime.observe(NAMESPACE)[0].restarts == 1)
    await watched.ended()
    assert watched.trace[1].exit_reason == "not ready within 0.375 s"  # its start-up time, then the time-out


async def test_an_engine_that_loads_for_longer_than_the_time_out_is_waited_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path, ProgramOptions(ready_timeout_s=0.001))
    await watched.start(*TINY, startup_s=60.0)
    await watched.until(lambda: watched.state() is not STARTING)
    await watched.ended()
    assert [seen.state for seen in watched.trace] == [STARTING, RUNNING]


async def test_an_engine_that_turns_down_its_arguments_says_why(watched: Watched) -> None:
    await watched.start(*TINY, "--refuse", "profile (x.yaml) cannot be read")
    await watched.until(lambda: bool(watched.runtime.hopeless()))
    assert watched.runtime.hopeless() == {"e-0": "exit code 2: profile (x.yaml) cannot be read"}


async def test_a_program_that_is_not_there_says_why(watched: Watched) -> None:
    await watched.start("/nowhere/at/all")
    await watched.until(lambda: watched.state() is EXITED)
    assert watched.trace[-1].exit_reason == "cannot be started: No such file or directory"


async def test_a_program_that_crashes_before_it_serves_is_given_up_by_who_waits_for_it(
    tmp_path: Path,
) -> None:
    program = Program(
        "router",
        lambda _: Life(command=(sys.executable, "-c", "raise SystemExit('no such module')")),
        log=tmp_path / "router.log",
        on_change=lambda: None,
    )
    program.start()
    with pytest.raises(StartFailed) as failed:
        await program.served()
    await program.stop()
    assert str(failed.value) == "router does not start: exit code 1: no such module"


async def test_a_program_that_keeps_its_port_is_started_again_on_it(tmp_path: Path) -> None:
    changed = asyncio.Event()
    program = Program(
        "router",
        lambda last: Life(command=(*TINY, "--port", str(last["port"] if last else 0))),
        log=tmp_path / "router.log",
        on_change=changed.set,
    )
    program.start()
    before = await program.served()
    program.kill()
    async with asyncio.timeout(DEADLINE_S):
        while not (program.restarts and program.state is RUNNING):
            changed.clear()
            await changed.wait()
    after = program.ports
    await program.stop()
    assert after == before


@pytest.mark.parametrize(
    ("served_s", "lives"),
    [
        pytest.param(STABLE_S, 1, id="one that served for long begins anew"),
        pytest.param(STABLE_S - 0.1, 3, id="one that served for a moment counts"),
        pytest.param(0.0, 3, id="however long it took, one that never served counts"),
    ],
)
def test_short_lives_in_a_row(served_s: float, lives: int) -> None:
    assert short_lives_after(2, served_s=served_s) == lives


async def test_a_ready_line_that_is_no_object_is_seen_and_tried_again(tmp_path: Path) -> None:
    changed = asyncio.Event()
    code = "print('ready [8101]', flush=True); import signal; signal.pause()"
    life = Life(command=(sys.executable, "-c", code))
    program = Program("router", lambda _: life, log=tmp_path / "r.log", on_change=changed.set)
    program.start()
    async with asyncio.timeout(10):
        await changed.wait()
    await program.stop()
    assert program.exit_reason == "its ready line cannot be read"


def test_restarts_come_at_once_and_then_later_and_later() -> None:
    assert [restart_delay_s(lives) for lives in (1, 2, 3, 4, 99)] == [0.1, 0.2, 0.4, 0.8, 5.0]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        pytest.param(
            "started\nerror: port (8000) is in use\n", "port (8000) is in use", id="a line for users"
        ),
        pytest.param("Traceback\nValueError: no\n\n", "ValueError: no", id="the end of a traceback"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_the_last_words_of_a_log(tmp_path: Path, log: str, words: str) -> None:
    path = tmp_path / "x.log"
    path.write_text(log)
    assert last_words(path) == words


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


async def test_a_program_that_says_nothing_serves_once_its_health_says_so_and_takes_its_children_along(
    tmp_path: Path,
) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    left, log, changed = tmp_path / "left", tmp_path / "e.log", asyncio.Event()
    left.touch()
    life = Life(
        command=(
            sys.executable,
            "-m",
            "fulcrum_cli.local.die_with_parent",
            sys.executable,
            "-c",
            SERVER,
            str(port),
        ),
        ports={"port": port},
        health_url=f"http://127.0.0.1:{port}/health",
        leaves=(left,),
    )
    program = Program("e-0", lambda _: life, log=log, on_change=changed.set)
    program.start()
    async with asyncio.timeout(DEADLINE_S):
        ports = await program.served()
    child = int(log.read_text())
    running = not gone(child)
    await program.stop()
    async with asyncio.timeout(DEADLINE_S):
        while not _ended(child):
            await asyncio.sleep(0.01)
    assert (ports, running, left.exists()) == ({"port": port}, True, False)


def _ended(pid: int) -> bool:
    """Whether it is gone, or dead and only not asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
