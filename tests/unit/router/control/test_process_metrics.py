"""The metrics of the process are those of prometheus_client, and cost the same with many open files."""

import os
import resource
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from fulcrum_router.control.process_metrics import ProcessMetrics, count_open_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def read(registry: CollectorRegistry) -> dict[str, tuple[str, str, float]]:
    return {
        sample.name: (family.type, family.documentation, sample.value)
        for family in registry.collect()
        for sample in family.samples
    }


def test_they_have_the_names_types_and_values_of_prometheus_client() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    ours.register(ProcessMetrics())
    ProcessCollector(registry=theirs)

    mine, expected = read(ours), read(theirs)

    assert {name: each[:2] for name, each in mine.items()} == {
        name: each[:2] for name, each in expected.items()
    }
    for name, (*_, value) in expected.items():
        # Memory and time go on between the two; a listed folder is itself an open file.
        assert mine[name][2] == pytest.approx(value, rel=0.1, abs=1.0), name


def test_open_files_are_counted_without_listing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.stat("/proc/self/fd").st_size:
        pytest.skip("Linux before 6.2 does not tell the number of open files")
    before = count_open_files("/proc/self/fd")
    monkeypatch.delattr(os, "listdir")
    with open(os.devnull, "rb"):
        assert count_open_files("/proc/self/fd") == before + 1


def test_an_older_linux_has_them_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / str(number)).touch()
    sizeless = os.stat_result((0,) * 10)
    monkeypatch.setattr(os, "stat", lambda _folder: sizeless)

    assert count_open_files(str(tmp_path)) == 3


def test_a_process_without_files_to_open_still_has_the_other_metrics() -> None:
    registry = CollectorRegistry()
    registry.register(ProcessMetrics())
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        names = read(registry).keys()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert {"process_cpu_seconds_total", "process_max_fds", "process_start_time_seconds"} <= names
