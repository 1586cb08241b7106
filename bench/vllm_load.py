"""Runs a local service with vLLM engines and measures loads on it, for the benches `…_vllm`.

Real engines cannot say that they are late, as the engine model does. So each measurement also says whether
other programs took processor time, and whether the load itself was late.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.live_fleet import LATE_MAX_S
from bench.processor_shares import ProcessorShares
from fulcrum_cli.local.engine_environment import find_engine_environment
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Slo
from fulcrum_simulator.client import LoadReport, LoadResults
from fulcrum_simulator.workload import WorkloadRequest
from tests.engines.loads import send_load
from tests.engines.services import LocalServices, RunningService

OTHER_WORK_MAX = 0.05
"""Share of all processors that other programs may use."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """One load: its requests and outcomes."""

    requests: tuple[WorkloadRequest, ...]
    results: LoadResults
    report: LoadReport
    other_work: float
    """Share of all processors that other programs used."""

    @property
    def is_valid(self) -> bool:
        """Whether the figures are those of the service, and not of other work on the machine."""
        late_s = self.report.sent_late_p99_s
        return self.other_work <= OTHER_WORK_MAX and late_s is not None and late_s <= LATE_MAX_S

    @property
    def failed(self) -> int:
        """Requests that failed, broke off or got a wrong response. Refused ones do not count."""
        return self.report.failed + self.report.broken + self.report.wrong

    def describe_machine(self) -> str:
        """Describe the other work on the machine and how late the load was."""
        late_ms = 1000 * (self.report.sent_late_p99_s or 0.0)
        warning = "" if self.is_valid else " (DOES NOT COUNT)"
        return f"other programs {self.other_work:.0%}, load {late_ms:.0f} ms late (p99){warning}"


@contextmanager
def run_vllm_service(*objects: dict[str, Any]) -> Iterator[RunningService]:
    """Run a service with these objects while the block runs. SIGTERM ends it, too.

    Raises:
        InvalidInput: if there is no engine environment.
    """
    find_engine_environment()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        services = LocalServices(Path(folder))
        try:
            yield services.start("measured", *objects)
        finally:
            services.stop_all()


async def isolate_engines(running: RunningService, shares: ProcessorShares, share: float) -> None:
    """Give each engine a share of one processor, and let it give way to the router and the load.

    With GPUs, router and load would have the processors to themselves, and engines would not slow each
    other. Here a request that was sent or routed late, since no processor was free, would count against its
    engine.

    Raises:
        InvalidInput: if this process does not run as root.
    """
    async with running.connect() as service:
        for name in await service.list_instances():
            leader = await service.find_leader_pid(name)
            shares.limit(name, list_descendants(leader), share)


async def put_engines_on_one_processor(running: RunningService) -> int:
    """Let the engines run on the first processor only, and all else on the others; return its number.

    If the shares add up to at most 1, an engine is as fast while others work as alone: on
    processors of their own they would share caches and memory, which slows each by a quarter to a half.

    Raises:
        InvalidInput: if there is only one processor.
    """
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise InvalidInput("processors", 1, "must be at least two: one for the engines, one for the load")
    async with running.connect() as service:
        leaders = [await service.find_leader_pid(name) for name in await service.list_instances()]
    engines = {pid for leader in leaders for pid in list_descendants(leader)}
    for pid in list_descendants(os.getpid()):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), {first} if pid in engines else others)
    return first


async def measure_load(
    service: RunningService, requests: Iterable[WorkloadRequest], *, slo: Slo, seed: int
) -> MeasuredLoad:
    """Send the requests and wait for their outcomes."""
    loop = asyncio.get_running_loop()
    sent, began_s, other_s = tuple(requests), loop.time(), _read_other_work_s()
    results = await send_load(service.info, sent, slo=slo, seed=seed)
    other_s, took_s = _read_other_work_s() - other_s, loop.time() - began_s
    return MeasuredLoad(sent, results, results.report(), other_s / took_s / (os.cpu_count() or 1))


def _read_other_work_s() -> float:
    """Processor time of all processes but this one and its descendants, in seconds.

    Processes of other containers and other machines on the same host are not seen.
    A process counts with its children that have ended. The kernel measures this exactly; its total in
    /proc/stat is sampled at ticks, and was 6 % off with engines that wait at ticks.
    """
    own = set(list_descendants(os.getpid()))
    others = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sum(_read_ticks(pid) for pid in others if int(pid) not in own) / _TICKS_PER_S


def list_descendants(pid: int) -> list[int]:
    """The process and all its descendants that run."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _read_fields(entry.name)):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, level = [pid], [pid]
    while level:
        level = [child for one in level for child in children.get(one, ())]
        found += level
    return found


def _read_ticks(pid: str) -> int:
    """Ticks of a process and of its children that have ended."""
    fields = _read_fields(pid)
    return sum(map(int, fields[11:15])) if fields else 0


def _read_fields(pid: str) -> list[str]:
    """The fields of a process's stat file from its state on; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
