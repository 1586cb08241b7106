"""Gives each engine of a measurement its own share of a processor, as each would have its own GPU.

Without it all engines of a machine share its processors, and one more engine adds no
capacity. Control groups of the kernel do it, version 1 or 2, which needs root; they are made directly
under the root group, so that a limit on the bench's own group does not hold for the engines. The benches
`…_vllm` use it.
"""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Thread

from fulcrum_core.errors import InvalidInput

PERIOD_US = 10_000
"""A group that has used its share waits for the end of such a period. With 4 ms, three groups of 0.3 on one
processor got a tenth to a fifth less than that."""
SHARES_V1, WEIGHT_V2 = 335, 33
"""A third of the usual weight, that of niceness 5: the router and the load come first."""
SPEED_HELD = 0.5
"""Engines whose speed is held are as fast as their shares of a processor with this part of its best speed."""
BEST_OF = 80
"""Readings of a processor's speed at the beginning, of which the fastest counts; they take 20 s."""
QUOTA_CHANGE_MIN = 0.02
"""Smaller changes of a share are left out: the kernel begins a new period with each."""
QUOTA_MIN_US = 1_000
"""The kernel takes no less."""
_MEASURE_SPEED = """
import os, time
while os.getppid() == {parent}:
    loops, cpu_s, end_s = 0, time.process_time(), time.monotonic() + {interval_s}
    while time.monotonic() < end_s:
        for _ in range(5_000): pass
        loops += 1
    print(loops / (time.process_time() - cpu_s), flush=True)
"""
_INTERVAL_S = 0.25
_REMOVAL_MAX_S = 10.0


class ProcessorShares:
    """The control groups of one run of a bench; `root` is where the kernel shows them."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup")) -> None:
        self._root = root
        self._groups: list[Path] = []
        self._limits: list[_Limit] = []
        self._speedometer: subprocess.Popen[str] | None = None
        self._following: Thread | None = None
        self._readings = self._too_slow = 0

    def limit(self, name: str, processes: Iterable[int], share: float) -> None:
        """Limit these processes, with all their threads, to a share of one processor together.

        Raises:
            InvalidInput: if the kernel refuses, usually because this process does not run as root.
        """
        group = self._make_group(name)
        key, weight = ("cpu.weight", WEIGHT_V2) if self._is_v2 else ("cpu.shares", SHARES_V1)
        self._write(group / key, str(weight))
        if not self._is_v2:
            self._write(group / "cpu.cfs_period_us", str(PERIOD_US))
        self._set_quota(group, share)
        self._add_processes(group, processes)
        self._limits.append(_Limit(group, share, now=share))

    def hold_speed(self, processor: int, *, readings: int = BEST_OF) -> None:
        """From now on, give all limited processes a smaller share the faster this processor is.

        Processors of shared hosts change their speed by a factor of two within seconds. A process of the
        lowest priority measures it, in the time that the others leave. This also keeps the processor awake:
        after each sleep it is slower, and an engine alone took 53 ms for a step that took 47 ms beside
        another one. The fastest of its first `readings` is the best speed. To be called once.

        Raises:
            InvalidInput: if the kernel refuses, usually because this process does not run as root.
        """
        group = self._make_group("speed")
        self._write(group / "cpu.idle", "1")
        code = _MEASURE_SPEED.format(parent=os.getpid(), interval_s=_INTERVAL_S)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        self._speedometer = process
        os.sched_setaffinity(process.pid, {processor})
        self._add_processes(group, [process.pid])
        speeds = map(float, process.stdout or ())
        held = SPEED_HELD * max(islice(speeds, readings))
        self._following = Thread(target=self._follow, args=[speeds, held], daemon=True)
        self._following.start()

    def take_time_too_slow(self) -> float:
        """Return for which part of the time since the last call the processor was below the held speed.

        Raises:
            RuntimeError: if it is not measured, or not any more.
        """
        if self._following is None or not self._following.is_alive():
            raise RuntimeError("the speed of the processor is not measured any more")
        share = self._too_slow / max(1, self._readings)
        self._readings = self._too_slow = 0
        return share

    def _follow(self, speeds: Iterable[float], held: float) -> None:
        """Adapt the shares to each reading, until the process that measures ends."""
        for speed in speeds:
            self._readings += 1
            self._too_slow += speed < held
            for limit in self._limits:
                share = limit.share * held / max(speed, held)
                if abs(share / limit.now - 1) > QUOTA_CHANGE_MIN:
                    self._set_quota(limit.group, share)
                    limit.now = share

    def _set_quota(self, group: Path, share: float) -> None:
        quota_us = max(QUOTA_MIN_US, int(share * PERIOD_US))
        if self._is_v2:
            self._write(group / "cpu.max", f"{quota_us} {PERIOD_US}")
        else:
            self._write(group / "cpu.cfs_quota_us", str(quota_us))

    @property
    def _is_v2(self) -> bool:
        return (self._root / "cgroup.controllers").exists()

    def _make_group(self, name: str) -> Path:
        parent = self._root if self._is_v2 else self._root / "cpu"
        group = parent / f"fulcrum-bench-{os.getpid()}-{name}"
        if self._is_v2:
            self._write(self._root / "cgroup.subtree_control", "+cpu")
        try:
            group.mkdir()
        except OSError as error:
            raise _make_refusal(error) from error
        self._groups.append(group)
        return group

    def _add_processes(self, group: Path, processes: Iterable[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):  # it has ended
                self._write(group / "cgroup.procs", str(process))

    def _write(self, setting: Path, value: str) -> None:
        try:
            setting.write_text(value)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise _make_refusal(error) from error

    def remove(self) -> None:
        """Remove the groups, whose processes have ended; say which could not be removed."""
        if self._speedometer is not None:
            self._speedometer.kill()
            if self._following is not None:
                self._following.join()
            self._speedometer.communicate()
        for group in self._groups:
            _remove_group(group)


@dataclass
class _Limit:
    """The group of an engine, its share, and the one that it has now at the processor's speed."""

    group: Path
    share: float
    now: float


def _remove_group(group: Path) -> None:
    """Remove a group, or say that it stays: it is busy until the kernel has cleared the last process away."""
    end_s = time.monotonic() + _REMOVAL_MAX_S
    while True:
        try:
            group.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end_s:
                print(f"warning: {group} stays: {error.strerror}", file=sys.stderr)
                return
        time.sleep(0.05)


def _make_refusal(error: OSError) -> InvalidInput:
    rule = f"must let this process make control groups ({error.strerror}): needs root and Linux 5.15"
    return InvalidInput("control groups", error.filename, rule)


@contextmanager
def processor_shares() -> Iterator[ProcessorShares]:
    """Remove the control groups at the end of the block."""
    shares = ProcessorShares()
    try:
        yield shares
    finally:
        shares.remove()
