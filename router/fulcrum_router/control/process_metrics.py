"""The metrics `process_*` of the router, which from Linux 6.2 on cost the same however many files are open.

The collector of prometheus_client lists all open files of the process at each rendering: 25 ms with 19,000
connections, for which all requests wait.
"""

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_OPEN_FILES = "/proc/self/fd"
_GAUGES = {
    "virtual_memory_bytes": "Virtual memory size in bytes.",
    "resident_memory_bytes": "Resident memory size in bytes.",
    "start_time_seconds": "Start time of the process since unix epoch in seconds.",
    "open_fds": "Number of open file descriptors.",
    "max_fds": "Maximum number of open file descriptors.",
}
"""Gauges by name, with their texts."""


class ProcessMetrics(Collector):
    """Processor time, memory and open files of this process, under the names of prometheus_client.

    None where /proc is missing, as on macOS.
    """

    def __init__(self) -> None:
        self._started_at_s = _read_start_time_s() if os.path.isdir(_OPEN_FILES) else None

    def collect(self) -> Iterator[Metric]:
        """Read all values now."""
        if self._started_at_s is None:
            return
        values = {
            "start_time_seconds": self._started_at_s,
            "max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }
        with contextlib.suppress(OSError):  # the process can open no more files: the page has the rest
            values |= _read_memory_bytes()
        with contextlib.suppress(OSError):
            values["open_fds"] = count_open_files(_OPEN_FILES)
        for name, text in _GAUGES.items():
            if name in values:
                yield GaugeMetricFamily(f"process_{name}", text, value=values[name])
        yield CounterMetricFamily(
            "process_cpu_seconds",
            "Total user and system CPU time spent in seconds.",
            value=time.process_time(),
        )


def _read_memory_bytes() -> dict[str, float]:
    virtual, resident = Path("/proc/self/statm").read_text().split()[:2]
    page_bytes = resource.getpagesize()
    return {
        "virtual_memory_bytes": int(virtual) * page_bytes,
        "resident_memory_bytes": int(resident) * page_bytes,
    }


def count_open_files(folder: str) -> int:
    """Count the open files in a folder of /proc; Linux 6.2 and later have their number as its size."""
    return os.stat(folder).st_size or len(os.listdir(folder))


def _read_start_time_s() -> float:
    """When this process started, in seconds since the epoch: clock ticks after the machine did."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
