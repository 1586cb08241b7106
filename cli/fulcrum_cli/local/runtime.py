"""`EngineRuntime` of a local run: one supervised process for each PDInstance.

The operator's reconcile in `run` starts and stops engines with it; `play` kills them. A cluster has
`fulcrum_operator.controller.pods.pod_runtime`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fulcrum_cli.local.supervised_process import ProcessSpec, Program, ProgramTimeouts
from fulcrum_core.api import PDInstance
from fulcrum_core.ports import EngineObservation, EngineState, InstanceKey, instance_key


class LocalRuntime:
    """Engines as supervised processes; `fulcrum_core.ports.EngineRuntime`.

    Args:
        process_spec: Returns what to start for an instance; called for each start.
        host: Address that engines listen on.
        logs: Folder of the files `<name>.log`; names are unique, since a run has one namespace.
        on_change: Called with an engine's name after each change of its observation.
        timeouts: Timeouts of the processes.
    """

    def __init__(
        self,
        process_spec: Callable[[PDInstance], ProcessSpec],
        *,
        host: str,
        logs: Path,
        on_change: Callable[[str], None],
        timeouts: ProgramTimeouts | None = None,
    ) -> None:
        self._process_spec, self._host, self._logs, self._on_change = process_spec, host, logs, on_change
        self._timeouts = timeouts or ProgramTimeouts()
        self._programs: dict[InstanceKey, Program] = {}
        self._stopping: dict[InstanceKey, asyncio.Task[None]] = {}

    async def start(self, instance: PDInstance, *, startup_s: float) -> None:
        """See `EngineRuntime`.

        The ready timeout is `startup_s` plus that of the other programs, or that of the `ProcessSpec` if that
        is longer.
        """
        key = instance_key(instance)
        if key in self._programs:
            return
        ready_timeout_s = startup_s + self._timeouts.ready_timeout_s
        program = Program(
            key.name,
            lambda _ports: self._process_spec(instance),
            log=self._logs / f"{key.name}.log",
            on_change=lambda: self._on_change(key.name),
            timeouts=replace(self._timeouts, ready_timeout_s=ready_timeout_s),
        )
        self._programs[key] = program
        program.start()
        self._on_change(key.name)

    async def stop(self, key: InstanceKey, *, drained: bool = False) -> None:  # noqa: ARG002
        """See `EngineRuntime`. Drained or not, an engine has a few seconds before it is killed."""
        program = self._programs.get(key)
        if program is not None and key not in self._stopping:
            self._stopping[key] = asyncio.get_running_loop().create_task(self._stop_and_forget(key, program))

    async def wait_stopped(self, key: InstanceKey) -> None:
        """Return when the engine has ended, if `stop` was called for it."""
        if key in self._stopping:
            await asyncio.shield(self._stopping[key])

    async def close(self) -> None:
        """Stop every engine; returns when all processes have ended."""
        keys = list(self._programs)
        for key in keys:
            await self.stop(key)
        await asyncio.gather(*(self.wait_stopped(key) for key in keys))

    def kill(self, name: str) -> None:
        """Kill an engine as a crash would; it is restarted.

        Raises:
            KeyError: if there is no engine of that name.
        """
        self._programs_by_name()[name].kill()

    def observe(self, namespace: str) -> tuple[EngineObservation, ...]:
        """See `EngineRuntime`."""
        keys = sorted(key for key in self._programs if key.namespace == namespace)
        return tuple(self._observation(key, self._programs[key]) for key in keys)

    def start_failures(self) -> dict[str, str]:
        """Reason of each engine whose start counts as failed (`Program.start_failure`), by name."""
        return {
            name: program.start_failure
            for name, program in self._programs_by_name().items()
            if program.start_failure
        }

    def pids(self) -> dict[str, int]:
        """Process ids of the running engines, by name."""
        return {
            name: program.pid for name, program in self._programs_by_name().items() if program.pid is not None
        }

    async def _stop_and_forget(self, key: InstanceKey, program: Program) -> None:
        await program.stop()
        del self._programs[key], self._stopping[key]
        self._on_change(key.name)

    def _programs_by_name(self) -> dict[str, Program]:
        return {key.name: program for key, program in self._programs.items()}

    def _observation(self, key: InstanceKey, program: Program) -> EngineObservation:
        runs = program.state is EngineState.RUNNING and program.ports is not None
        return EngineObservation(
            name=program.name,
            state=program.state,
            restarts=program.restarts,
            endpoint=f"{self._host}:{program.ports['port']}" if runs and program.ports else None,
            exit_reason=program.exit_reason,
            terminating=key in self._stopping,
        )
