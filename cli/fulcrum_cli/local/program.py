"""One supervised process: started, waited for, started again with back-off, ended for good.

A program of ours says on standard output, in one line, that it serves and on which ports (`ready {json}`),
and logs to standard error, which goes to its file. Another one is told its ports and asked for its health.
Each is ended with SIGTERM, and with SIGKILL after a grace; with it end its children and its temporary files.
"""

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import structlog

from fulcrum_cli.local.life import Life, Ports
from fulcrum_cli.local.run_folder import scratch_folder
from fulcrum_core.errors import FulcrumError, InvalidInput
from fulcrum_core.ports import EngineState

STABLE_S = 10.0
"""A program that served for so long starts with the shortest back-off again."""

FUTILE_STARTS = 3
"""A program that ended so often without ever serving is not waited for any longer."""

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_TAIL_BYTES = 4096
_BAD_INPUT = 2
_HEALTH_PAUSE_S = 0.25
_HEALTH_ANSWER_S = 2.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOptions:
    """How long a program may take. All in seconds."""

    ready_timeout_s: float = 30.0
    """From its start to its ready line; an engine's own start-up time comes on top."""
    stop_grace_s: float = 1.2
    """From SIGTERM to SIGKILL."""


class StartFailed(FulcrumError):
    """A program turned down its arguments or never came to serve. The text is one line: program, reason."""

    def __init__(self, program: str, reason: str) -> None:
        super().__init__(f"{program} does not start: {reason}")


class Program:
    """Keeps one program running from `start` until `stop`.

    Args:
        name: What it is called in logs.
        life: What is started next, given the ports of its last life (None before the first), so that one
            that others know by its port can keep it.
        log: Where its standard error goes, appended.
        on_change: Called after every change of what is public here.
    """

    def __init__(
        self,
        name: str,
        life: Callable[[Ports | None], Life],
        *,
        log: Path,
        on_change: Callable[[], None],
        options: ProgramOptions | None = None,
    ) -> None:
        self.name = name
        self.state = EngineState.STARTING
        self.restarts = 0
        self.ports: Ports | None = None
        self.exit_reason: str | None = None
        self._next_life, self._log_path, self._on_change = life, log, on_change
        self._options = options or ProgramOptions()
        self._process: Process | None = None
        self._grace_s = self._options.stop_grace_s
        self._task: asyncio.Task[None] | None = None
        self._stopping, self._settled = asyncio.Event(), asyncio.Event()
        self._short_lives, self._refused = 0, False
        self._served_since_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it has one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Have it run from now on; once only."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def hopeless(self) -> str | None:
        """Why it will never serve: it turned down its arguments, or never got that far; None while it may."""
        if self.ports is not None or self.exit_reason is None:
            return None
        return self.exit_reason if self._refused or self._short_lives >= FUTILE_STARTS else None

    async def served(self) -> Ports:
        """Its ports, once it has served.

        Raises:
            StartFailed: if it never will.
        """
        await self._settled.wait()
        if self.hopeless:
            raise StartFailed(self.name, self.hopeless)
        assert self.ports is not None
        return self.ports

    def kill(self) -> None:
        """Kill the process as a crash would; it is started again."""
        if self._process:
            _signal(self._process, signal.SIGKILL)

    async def stop(self) -> None:
        """End it for good; returns when it is gone."""
        self._stopping.set()
        self._end()
        if self._task:
            await asyncio.shield(self._task)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._served_since_s = None
            try:
                reason = await self._live()
            except OSError as error:
                reason = f"cannot be started: {error.strerror}"
            except InvalidInput as error:
                reason = str(error)
            if self._stopping.is_set():
                return
            self._short_lives = short_lives_after(self._short_lives, served_s=self._served_s())
            delay_s = restart_delay_s(self._short_lives)
            _log.warning("program ended", program=self.name, reason=reason, restart_s=delay_s)
            self._change(EngineState.EXITED, exit_reason=reason)
            if await self._stopped_within(delay_s):
                return
            self.restarts += 1
            self._change(EngineState.STARTING)

    def _served_s(self) -> float:
        since_s = self._served_since_s
        return 0.0 if since_s is None else asyncio.get_running_loop().time() - since_s

    async def _live(self) -> str:
        """One life, from start to end; returns why it ended."""
        with scratch_folder() as scratch:
            return await self._live_in(scratch)

    async def _live_in(self, scratch: str) -> str:
        life = self._next_life(self.ports)
        self._grace_s = self._options.stop_grace_s if life.stop_grace_s is None else life.stop_grace_s
        with self._log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *life.command,
                stdin=DEVNULL,
                stdout=PIPE if life.ports is None else log,
                stderr=log,
                env={**os.environ, "TMPDIR": scratch, **life.env},
                start_new_session=True,
            )
        self._process = process
        if self._stopping.is_set():
            self._end()
        try:
            overdue = await self._serve(process, life)
            code = await process.wait()
        finally:
            self._process = None
            _clear_away(process.pid, life)
        self._refused = code == _BAD_INPUT
        return overdue or _reason(code, self._log_path)

    async def _serve(self, process: Process, life: Life) -> str | None:
        """Follow its output until that ends; returns why it was killed, if it was."""
        patience_s = max(self._options.ready_timeout_s, life.patience_s)
        try:
            async with asyncio.timeout(patience_s):
                ports = await _serving(process, life)
        except TimeoutError:
            _signal(process, signal.SIGKILL)
            return f"not ready within {patience_s:g} s"
        except (ValueError, TypeError, AttributeError):
            _signal(process, signal.SIGKILL)
            return "its ready line cannot be read"
        if ports is not None:
            self.ports = ports
            self._served_since_s = asyncio.get_running_loop().time()
            self._change(EngineState.RUNNING)
        while process.stdout is not None and await process.stdout.read(65536):
            pass  # nothing more is promised there, but a full pipe would stop the program
        return None

    def _end(self) -> None:
        if self._process:
            _signal(self._process, signal.SIGTERM)
            loop = asyncio.get_running_loop()
            loop.call_later(self._grace_s, _signal, self._process, signal.SIGKILL)

    async def _stopped_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    def _change(self, state: EngineState, *, exit_reason: str | None = None) -> None:
        self.state = state
        self.exit_reason = exit_reason or self.exit_reason
        if state is EngineState.RUNNING or self.hopeless:
            self._settled.set()
        self._on_change()


def short_lives_after(before: int, *, served_s: float) -> int:
    """Short lives in a row after one more, which served for so long; 0: it never came to serve."""
    return 1 if served_s >= STABLE_S else before + 1


def restart_delay_s(short_lives: int) -> float:
    """The wait before a start after so many short lives in a row: at once, then doubling."""
    return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** min(short_lives - 1, 20)))


def last_words(log: Path) -> str:
    """The last line of a log that holds anything, without the `error: ` of a line for users."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "").strip().removeprefix("error: ")


async def _serving(process: Process, life: Life) -> Ports | None:
    """The ports on which it serves, once it does; None if it ends before."""
    if process.stdout is not None:
        return await _ready(process.stdout)
    async with httpx.AsyncClient(timeout=_HEALTH_ANSWER_S, trust_env=False, verify=False) as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(life.health_url)).status_code == httpx.codes.OK:
                    return life.ports
            await asyncio.sleep(_HEALTH_PAUSE_S)
    return None


async def _ready(output: asyncio.StreamReader) -> Ports | None:
    """The ports of the ready line; None if the output ends without one."""
    async for line in output:
        word, _, rest = line.decode(errors="replace").partition(" ")
        if word == "ready":
            return {name: int(port) for name, port in json.loads(rest).items()}
    return None


def _signal(process: Process, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended meanwhile."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _clear_away(leader: int, life: Life) -> None:
    """End what a program that has ended has started, and remove what it leaves."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    for path in life.leaves:
        path.unlink(missing_ok=True)


def _reason(code: int, log: Path) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    words = last_words(log) if code else ""
    return f"exit code {code}: {words}" if words else f"exit code {code}"
