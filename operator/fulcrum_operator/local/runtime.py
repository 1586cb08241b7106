"""`EngineRuntime` over processes of this machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_operator.local.program import Program, ProgramOptions


class LocalRuntime:
    """Engines as supervised processes; `fulcrum_core.ports.EngineRuntime`.

    Args:
        host: The address on which engines are told to listen.
        logs: The folder where `<name>.log` is written.
        on_change: Called with an engine's name whenever what `observe` says of it has changed.
        options: How long programs may take.
    """

    def __init__(
        self,
        *,
        host: str,
        logs: Path,
        on_change: Callable[[str], None],
        options: ProgramOptions | None = None,
    ) -> None:
        self._host, self._logs, self._on_change = host, logs, on_change
        self._options = options or ProgramOptions()
        self._programs: dict[str, Program] = {}

    async def start(self, name: str, command: tuple[str, ...], *, startup_s: float) -> None:
        """See `EngineRuntime`. An engine that is not ready `ready_timeout_s` after `startup_s` is ended."""
        if name in self._programs:
            return
        ready_timeout_s = startup_s + self._options.ready_timeout_s
        program = Program(
            name,
            lambda _ports: command,
            log=self._logs / f"{name}.log",
            on_change=lambda: self._on_change(name),
            options=replace(self._options, ready_timeout_s=ready_timeout_s),
        )
        self._programs[name] = program
        program.start()
        self._on_change(name)

    async def stop(self, name: str) -> None:
        """End the engine; returns when it is gone."""
        program = self._programs.get(name)
        if program is None:
            return
        await program.stop()
        if self._programs.get(name) is program:
            del self._programs[name]
            self._on_change(name)

    def kill(self, name: str) -> None:
        """Kill the engine as a crash would; it is started again.

        Raises:
            KeyError: if no engine of that name was started.
        """
        self._programs[name].kill()

    def observe(self) -> tuple[EngineObservation, ...]:
        """Every engine that was started and not stopped, by name."""
        return tuple(self._observation(self._programs[name]) for name in sorted(self._programs))

    def hopeless(self) -> dict[str, str]:
        """Engines that never served and never will, with the reason."""
        return {name: program.hopeless for name, program in self._programs.items() if program.hopeless}

    def pids(self) -> dict[str, int]:
        """Process ids of the engines that have one now."""
        return {name: program.pid for name, program in self._programs.items() if program.pid is not None}

    def _observation(self, program: Program) -> EngineObservation:
        runs = program.state is EngineState.RUNNING and program.ports is not None
        return EngineObservation(
            name=program.name,
            state=program.state,
            restarts=program.restarts,
            endpoint=f"{self._host}:{program.ports['port']}" if runs and program.ports else None,
            exit_reason=program.exit_reason,
        )
