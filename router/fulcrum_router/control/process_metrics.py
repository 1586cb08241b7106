"""The metrics `process_*` of the router, which cost the same however many files are open.

The collector of prometheus_client lists all open files of the process at each rendering: 25 ms with 19,000
connections, for which all requests wait.
"""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_OPEN_FILES = "/proc/self/fd"


class ProcessMetrics(Collector):
    """Processor time, memory and open files of this process, under the names of prometheus_client.

    There are none where /proc is missing, as on macOS.
    """

    def __init__(self) -> None:
        self._started_at_s = _read_start_time_s() if os.path.isdir(_OPEN_FILES) else None

    def collect(self) -> Iterator[Metric]:
        """Read all values now."""
        if self._started_at_s is None:
            return
        virtual_pages, resident_pages = map(int, Path("/proc/self/statm").read_text().split()[:2])
        page_bytes = resource.getpagesize()
        for name, text, value in (
            ("virtual_memory_bytes", "Virtual memory size in bytes.", virtual_pages * page_bytes),
            ("resident_memory_bytes", "Resident memory size in bytes.", resident_pages * page_bytes),
            (
                "start_time_seconds",
                "Start time of the process since unix epoch in seconds.",
                self._started_at_s,
            ),
            ("open_fds", "Number of open file descriptors.", count_open_files(_OPEN_FILES)),
            (
                "max_fds",
                "Maximum number of open file descriptors.",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            ),
        ):
            yield GaugeMetricFamily(f"process_{name}", text, value=value)
        yield CounterMetricFamily(
            "process_cpu_seconds",
            "Total user and system CPU time spent in seconds.",
            value=time.process_time(),
        )


def count_open_files(folder: str) -> int:
    """Count the open files in a folder of /proc; Linux 6.2 and later have their number as its size."""
    return os.stat(folder).st_size or len(os.listdir(folder))


def _read_start_time_s() -> float:
    """When this process started, in seconds since the epoch: clock ticks after the machine did."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
