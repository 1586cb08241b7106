"""Supervision of one process of a local run: start, wait until it is ready, restart with back-off, stop.

Fulcrum's programs print one line with their ports on standard output (`ready {json}`) and log to standard
error. Other programs get their ports as arguments and are polled for their health. Stopping is SIGTERM, then
SIGKILL after a grace period. When a process has ended, its child processes are killed and its temporary files
are deleted. `run` has one for router and autoscaler each, `runtime` one for each engine.
"""

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import structlog

from fulcrum_cli.local.cores import use_all_cores
from fulcrum_cli.local.run_folder import scratch_folder
from fulcrum_core.errors import FulcrumError, InvalidInput
from fulcrum_core.ports import EngineState
from fulcrum_core.values import FAILED_STARTS_MAX

STABLE_AFTER_S = 10.0
"""Time that a program must have been ready for its next restart to have the shortest back-off, in seconds."""

_RESTART_DELAY_MIN_S = 0.1
_RESTART_DELAY_MAX_S = 5.0
_TAIL_BYTES = 4096
_EXIT_CODE_BAD_INPUT = 2
_HEALTH_INTERVAL_S = 0.25
_HEALTH_TIMEOUT_S = 2.0

_log = structlog.get_logger()

Ports = Mapping[str, int]
"""Ports that a program listens on, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What one process of a program is started with.

    Args:
        command: Program and arguments.
        env: Variables added to the environment of the calling process.
        ports: Ports that are among the arguments; None if the program chooses them and prints a ready line.
        health_url: URL that returns 200 once the program serves; used only where `ports` are given.
        ready_timeout_s: Shortest ready timeout, in seconds. The longer of this one and that of the program's
            `ProgramTimeouts` is used.
        stop_grace_s: Time from SIGTERM to SIGKILL, in seconds; None: that of the program's `ProgramTimeouts`.
        leftover_files: Files to delete after the process has ended.
        binds_cores: Whether the program binds its threads to cores, which is undone once it is ready.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ports: Ports | None = None
    health_url: str = ""
    ready_timeout_s: float = 0.0
    stop_grace_s: float | None = None
    leftover_files: tuple[Path, ...] = ()
    binds_cores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTimeouts:
    """Timeouts of the programs of a local run.

    A `ProcessSpec` can make the ready timeout longer and set another grace period.
    """

    ready_timeout_s: float = 30.0
    """Longest time from a start until the program is ready, in seconds.

    `LocalRuntime` adds an engine's expected start-up time.
    """
    stop_grace_s: float = 1.2
    """Time from SIGTERM to SIGKILL, in seconds."""


class StartFailed(FulcrumError):
    """The start of a program failed (`Program.start_failure`). The text is one line: program and reason."""

    def __init__(self, program: str, reason: str) -> None:
        super().__init__(f"{program} does not start: {reason}")


class Program:
    """Keeps one program running from `start` until `stop`.

    Args:
        name: Name of the program in logs and errors.
        next_spec: Returns what to start next, given the ports of the last process (None before the
            first): a program whose clients know its port keeps it.
        log: File to which standard error is appended.
        on_change: Called after every change of a public attribute.
    """

    def __init__(
        self,
        name: str,
        next_spec: Callable[[Ports | None], ProcessSpec],
        *,
        log: Path,
        on_change: Callable[[], None],
        timeouts: ProgramTimeouts | None = None,
    ) -> None:
        self.name = name
        self.state = EngineState.STARTING
        self.restarts = 0
        self.ports: Ports | None = None
        self.exit_reason: str | None = None
        self._next_spec, self._log_path, self._on_change = next_spec, log, on_change
        self._timeouts = timeouts or ProgramTimeouts()
        self._process: Process | None = None
        self._grace_s = self._timeouts.stop_grace_s
        self._task: asyncio.Task[None] | None = None
        self._stopping, self._ready_or_failed = asyncio.Event(), asyncio.Event()
        self._backoff_step, self._refused_arguments = 0, False
        self._ready_since_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Id of the running process; None between two processes."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the program and keep it running. To be called once."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def start_failure(self) -> str | None:
        """Why the start counts as failed; None if it does not.

        The last process refused its arguments, or several ended one after the other, and none was ever ready.
        The program is still restarted, and a later process may become ready.
        """
        if self.ports is not None or self.exit_reason is None:
            return None
        return (
            self.exit_reason if self._refused_arguments or self._backoff_step >= FAILED_STARTS_MAX else None
        )

    async def wait_ready(self) -> Ports:
        """Return the program's ports once it has been ready.

        Raises:
            StartFailed: if the start counts as failed.
        """
        await self._ready_or_failed.wait()
        if self.start_failure:
            raise StartFailed(self.name, self.start_failure)
        assert self.ports is not None
        return self.ports

    def kill(self) -> None:
        """Kill the process as a crash would; the program is restarted."""
        if self._process:
            _send_signal(self._process, signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the program for good; returns when the process has ended."""
        self._stopping.set()
        self._terminate()
        if self._task:
            await asyncio.shield(self._task)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._ready_since_s = None
            try:
                reason = await self._run_once()
            except OSError as error:
                reason = f"cannot be started: {error.strerror}"
            except InvalidInput as error:
                reason = str(error)
            if self._stopping.is_set():
                return
            self._backoff_step = next_backoff_step(self._backoff_step, ready_for_s=self._ready_for_s())
            delay_s = restart_delay_s(self._backoff_step)
            _log.warning("program ended", program=self.name, reason=reason, restart_delay_s=delay_s)
            self._set_state(EngineState.EXITED, exit_reason=reason)
            if await self._stopped_within(delay_s):
                return
            self.restarts += 1
            self._set_state(EngineState.STARTING)

    def _ready_for_s(self) -> float:
        since_s = self._ready_since_s
        return 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s

    async def _run_once(self) -> str:
        """Start a process and wait for its end; returns why it ended."""
        with scratch_folder() as scratch:
            return await self._run_once_in(scratch)

    async def _run_once_in(self, scratch: str) -> str:
        spec = self._next_spec(self.ports)
        self._grace_s = self._timeouts.stop_grace_s if spec.stop_grace_s is None else spec.stop_grace_s
        with self._log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=DEVNULL,
                stdout=PIPE if spec.ports is None else log,
                stderr=log,
                env={**os.environ, "TMPDIR": scratch, **spec.env},
                start_new_session=True,
            )
        self._process = process
        if self._stopping.is_set():
            self._terminate()
        try:
            kill_reason = await self._follow_output(process, spec)
            code = await process.wait()
        finally:
            self._process = None
            _clean_up(process.pid, spec)
        self._refused_arguments = code == _EXIT_CODE_BAD_INPUT
        return kill_reason or _exit_reason(code, self._log_path)

    async def _follow_output(self, process: Process, spec: ProcessSpec) -> str | None:
        """Wait for readiness, then read the output to the end; returns why the process was killed, if so."""
        ready_timeout_s = max(self._timeouts.ready_timeout_s, spec.ready_timeout_s)
        try:
            async with asyncio.timeout(ready_timeout_s):
                ports = await _wait_ready(process, spec)
        except TimeoutError:
            _send_signal(process, signal.SIGKILL)
            return f"not ready within {ready_timeout_s:g} s"
        except (ValueError, TypeError, AttributeError):
            _send_signal(process, signal.SIGKILL)
            return "the ready line cannot be parsed"
        if ports is not None:
            if spec.binds_cores:
                use_all_cores(process.pid)
            self.ports = ports
            self._ready_since_s = asyncio.get_running_loop().time()
            self._set_state(EngineState.RUNNING)
        while process.stdout is not None and await process.stdout.read(65536):
            pass  # output after the ready line is not used, but a full pipe would block the program
        return None

    def _terminate(self) -> None:
        if self._process:
            _send_signal(self._process, signal.SIGTERM)
            loop = asyncio.get_running_loop()
            loop.call_later(self._grace_s, _send_signal, self._process, signal.SIGKILL)

    async def _stopped_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    def _set_state(self, state: EngineState, *, exit_reason: str | None = None) -> None:
        self.state = state
        self.exit_reason = exit_reason or self.exit_reason
        if state is EngineState.RUNNING or self.start_failure:
            self._ready_or_failed.set()
        self._on_change()


def next_backoff_step(before: int, *, ready_for_s: float) -> int:
    """Back-off step after the end of a process that was ready for `ready_for_s` (0: never).

    A process that was ready long enough resets the back-off to its first step, 1.
    """
    return 1 if ready_for_s >= STABLE_AFTER_S else before + 1


def restart_delay_s(backoff_step: int) -> float:
    """Seconds before the next start at a back-off step, from 1: doubles from 0.1 s to 5 s."""
    return float(min(_RESTART_DELAY_MAX_S, _RESTART_DELAY_MIN_S * 2 ** min(backoff_step - 1, 20)))


def last_log_line(log: Path) -> str:
    """Return the last line of a log that is not blank, without the prefix of `exit_with_error`."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "").strip().removeprefix("error: ")


async def _wait_ready(process: Process, spec: ProcessSpec) -> Ports | None:
    """Ports of the program once it is ready; None if it ends before."""
    if process.stdout is not None:
        return await _read_ready_line(process.stdout)
    async with httpx.AsyncClient(timeout=_HEALTH_TIMEOUT_S, trust_env=False, verify=False) as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(spec.health_url)).status_code == httpx.codes.OK:
                    return spec.ports
            await asyncio.sleep(_HEALTH_INTERVAL_S)
    return None


async def _read_ready_line(output: asyncio.StreamReader) -> Ports | None:
    """Ports of the ready line; None if the output ends without one."""
    async for line in output:
        keyword, _, rest = line.decode(errors="replace").partition(" ")
        if keyword == "ready":
            return {name: int(port) for name, port in json.loads(rest).items()}
    return None


def _send_signal(process: Process, number: signal.Signals) -> None:
    """Send a signal; nothing happens if the process has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _clean_up(leader: int, spec: ProcessSpec) -> None:
    """Kill the remaining processes of an ended process' group and delete its leftover files."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for path in spec.leftover_files:
        path.unlink(missing_ok=True)


def _exit_reason(code: int, log: Path) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    last_line = last_log_line(log) if code else ""
    return f"exit code {code}: {last_line}" if last_line else f"exit code {code}"
