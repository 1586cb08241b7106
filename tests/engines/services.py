"""Starts `fulcrum up --local` with vLLM; tests pause, suspend and kill its engines."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fulcrum_cli.local.engine_environment import find_engine_environment
from fulcrum_cli.local.run_folder import RunInfo, find_runs
from fulcrum_cluster.client import open_store
from fulcrum_core.api import PDAssignment, PDInstance
from fulcrum_core.assignment import build_flip
from fulcrum_core.errors import InvalidInput
from fulcrum_core.merge_patch import create_merge_patch
from fulcrum_core.ports import Store
from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_core.values import Actor, Phase, Role
from tests.waiting import wait_until

START_S = 420.0
"""Longest start of engines on a busy machine."""
DEADLINE_S = 60.0
MODEL = "tiny-model"
MEMORY_BYTES = 8 * 2**30
"""Memory of all engines that run at once: seven, two of them with a cache server."""
KV_BYTES = 16 * 2**20
"""16,384 tokens, twice the longest prompt: freed blocks are soon overwritten."""
NAMESPACE = "default"
P, D = Role.PREFILL, Role.DECODE


def require_engines() -> None:
    """Skip with the reason if no engines can run here, or if ENGINE_TESTS=off; fail if it is `required`."""
    mode = os.environ.get("ENGINE_TESTS", "")
    missing = "ENGINE_TESTS=off leaves them out" if mode == "off" else _find_missing_requirement()
    if missing and mode == "required":
        pytest.fail(f"{missing}, and ENGINE_TESTS=required")
    if missing:
        pytest.skip(f"level 5, real engines: {missing}")


def _find_missing_requirement() -> str | None:
    """Return the first missing requirement, or None."""
    try:
        find_engine_environment()
    except InvalidInput:
        return "no engine environment; `make engine` creates it"
    memory_info = Path("/proc/meminfo").read_text(encoding="utf-8")
    available = int(re.findall(r"MemAvailable: +(\d+) kB", memory_info)[0]) * 1024
    if available < MEMORY_BYTES:
        return f"{available / 2**30:.1f} GiB of memory left, {MEMORY_BYTES / 2**30:.0f} needed"
    return None


def build_manifest(**spec: Any) -> dict[str, Any]:
    """Return a PDService with two engines and without an autoscaler's flips."""
    made = {
        "model": MODEL,
        "engine": {
            "type": "vLLM",
            "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}],
            "args": ["--kv-cache-memory-bytes", str(KV_BYTES)],
        },
        "instances": 2,
        "autoscaling": {"mode": "Off", "flip": {"prefillToDecodeCooldown": "0s"}},
        "drain": {"timeout": "20s"},
        **spec,
    }
    head = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService", "metadata": {"name": "chat"}}
    return {**head, "spec": made}


@dataclass(frozen=True, slots=True)
class VllmService:
    """A running service, with clients of its store and its router."""

    pid: int
    info: RunInfo
    store: Store
    client: httpx.AsyncClient

    @property
    def url(self) -> str:
        """URL of the router for clients."""
        return self.info.router_url

    async def read_state(self) -> RouterState:
        """Read the router's state port."""
        headers = {"authorization": f"Bearer {self.info.token}"}
        response = await self.client.get(f"{self.info.router_state_url}/state", headers=headers)
        return RouterState.model_validate_json(response.raise_for_status().content)

    async def read_instance_state(self, name: str) -> InstanceState:
        """Return the router's ledger of one instance."""
        return next(seen for seen in (await self.read_state()).instances if seen.name == name)

    async def list_instances(self) -> dict[str, PDInstance]:
        """Return all PDInstances by name."""
        found = await self.store.list(PDInstance, namespace=NAMESPACE)
        return {instance.metadata.name: instance for instance in found.items}

    async def find_instance(self, role: Role) -> str:
        """Return the name of the instance with this role."""
        return next(seen.name for seen in (await self.read_state()).instances if seen.role is role)

    async def engine_url(self, name: str) -> str:
        """Return the URL of the engine itself."""
        return f"http://{(await self.list_instances())[name].status.endpoint}"

    async def find_leader_pid(self, name: str) -> int:
        """Return the process id of the leader of the engine's process group."""
        port = (await self.engine_url(name)).rpartition(":")[2]
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="utf-8").split()
        return next(pid for pid in map(int, listed) if f"\0--port\0{port}\0" in _cmdline(pid))

    async def signal_engine(self, name: str, number: signal.Signals) -> None:
        """Send the signal to the engine's process group."""
        os.killpg(await self.find_leader_pid(name), number)

    @asynccontextmanager
    async def suspend_process(self, name: str) -> AsyncIterator[None]:
        """Stop the engine's processes with SIGSTOP while the block runs: they hang."""
        leader = await self.find_leader_pid(name)
        os.killpg(leader, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGCONT)

    @asynccontextmanager
    async def pause_engine(self, name: str) -> AsyncIterator[None]:
        """Pause the engine while the block runs: healthy, accepts requests, computes nothing."""
        url = await self.engine_url(name)
        await self.client.post(f"{url}/pause", params={"mode": "keep"})
        try:
            yield
        finally:
            await self.client.post(f"{url}/resume")

    async def flip_both(self) -> int:
        """Swap the roles of both engines in one write; return its generation."""
        now = await self.store.get(PDAssignment, "chat", namespace=NAMESPACE)
        spec = now.spec
        for name, entry in now.spec.roles.items():
            to = P if entry.role is D else D
            spec = build_flip(spec, name, to, by=Actor.PERSON, reason="asked", now_s=time.time())
        patch = {"spec": create_merge_patch(now.spec.dump(), spec.dump())}
        version = now.metadata.resource_version
        made = await self.store.patch(
            PDAssignment, "chat", patch, namespace=NAMESPACE, resource_version=version
        )
        return made.metadata.generation

    async def read_metric(self, name: str, metric: str) -> float:
        """Return the sum of an engine's samples of this metric."""
        text = (await self.client.get(f"{await self.engine_url(name)}/metrics")).text
        found = re.findall(rf"^{re.escape(metric)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)

    async def wait_until(self, condition: Callable[[], Any], *, limit_s: float = DEADLINE_S) -> None:
        """Wait until the condition is true; a request that fails counts as false."""
        await wait_until(lambda: self._evaluate(condition), timeout_s=limit_s, interval_s=0.05)

    @staticmethod
    async def _evaluate(condition: Callable[[], Any]) -> bool:
        try:
            return bool(await condition())
        except (httpx.HTTPError, StopIteration):
            return False

    async def wait_until_idle(self) -> None:
        """Wait until all engines serve, both roles are there, and nothing is in flight."""
        await self.wait_until(self._is_idle, limit_s=START_S)

    async def _is_idle(self) -> bool:
        phases = [instance.status.phase for instance in (await self.list_instances()).values()]
        seen = (await self.read_state()).instances
        return (
            set(phases) == {Phase.SERVING}
            and {one.role for one in seen} == {P, D}
            and all(one.serving and not one.legs and not one.missed_probes for one in seen)
            and all([await self.read_metric(one.name, "vllm:num_requests_running") == 0 for one in seen])
        )


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class RunningService:
    """The process that runs a service."""

    pid: int
    info: RunInfo

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[VllmService]:
        """Connect to the service once it is idle."""
        async with (
            open_store(self.info.store_address) as store,
            httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client,
        ):
            service = VllmService(self.pid, self.info, store, client)
            await service.wait_until_idle()
            yield service


def find_running_service(folder: Path) -> RunningService:
    """Return the service whose local run is in this folder."""
    (info,) = find_runs(folder / f"fulcrum-{os.getuid()}")
    return RunningService(info.pid, info)


class LocalServices:
    """Starts services one by one and stops them in parallel: one stop takes 10 s."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._programs: dict[Path, subprocess.Popen[bytes]] = {}
        """Processes by the folder with their logs."""
        self._ending: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *objects: dict[str, Any]) -> RunningService:
        """Start a manifest with these objects with `fulcrum up --local`."""
        folder = self._folder / name
        folder.mkdir()
        file = folder / "service.yaml"
        file.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
        command = (sys.executable, "-m", "fulcrum_cli", "up", "-f", str(file), "--local", "--port", "0")
        with (folder / "up.log").open("wb") as log:
            process = self._programs[folder] = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
                start_new_session=True,
            )
        assert process.stdout is not None
        for line in process.stdout:  # ends with the process, which has a deadline of its own
            if b"instances serve" in line:
                return find_running_service(folder)
        pytest.fail(f"the service did not come up: {(folder / 'up.log').read_text()}")

    def stop(self, name: str) -> None:
        """Ask the service to end and keep its logs; does not wait for the end."""
        folder = self._folder / name
        for path in folder.glob(f"fulcrum-{os.getuid()}/*/*.log"):
            (folder / path.name).write_bytes(path.read_bytes())
        process = self._programs.pop(folder)
        process.send_signal(signal.SIGINT)
        self._ending.append(process)

    def stop_all(self) -> None:
        """Stop all services and wait for their ends; fail if one had to be killed."""
        for folder in list(self._programs):
            self.stop(folder.name)
        killed = [process.pid for process in self._ending if not _wait_for_exit(process)]
        assert killed == []


def _wait_for_exit(process: "subprocess.Popen[bytes]") -> bool:
    """Wait for the process; return False if it had to be killed (its engines die with it)."""
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    finally:
        assert process.stdout is not None
        process.stdout.close()
    return True
