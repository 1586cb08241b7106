"""Engines of a measurement get a share of a processor by control groups of version 1 or 2."""

import errno
import os
from pathlib import Path

import pytest

from bench.processor_shares import ProcessorShares
from fulcrum_core.errors import InvalidInput
from tests.waiting import wait_until


def read_group(folder: Path) -> dict[str, str]:
    (group,) = folder.glob("fulcrum-bench-*")
    return {path.name: path.read_text() for path in group.iterdir()}


def test_version_1_limits_time_by_a_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    ProcessorShares(tmp_path).limit("p-0", [7], 0.45)
    assert read_group(tmp_path / "cpu") == {
        "cpu.cfs_period_us": "10000",
        "cpu.cfs_quota_us": "4500",
        "cpu.shares": "335",
        "cgroup.procs": "7",
    }


def test_version_2_limits_time_once_the_root_hands_out_the_processor(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    ProcessorShares(tmp_path).limit("p-0", [7], 0.45)
    found = (tmp_path / "cgroup.subtree_control").read_text(), read_group(tmp_path)
    assert found == ("+cpu", {"cpu.max": "4500 10000", "cpu.weight": "33", "cgroup.procs": "7"})


def test_a_kernel_that_refuses_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file or directory"):
        ProcessorShares(tmp_path).limit("p-0", [7], 0.45)


def test_a_group_that_cannot_be_removed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cpu").mkdir()
    shares = ProcessorShares(tmp_path)
    shares.limit("p-0", [7], 0.45)
    shares.remove()  # a plain folder with files stays
    assert "stays: Directory not empty" in capsys.readouterr().err


def test_a_group_that_is_busy_for_a_moment_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[Path] = []

    def remove_at_the_third_try(group: Path) -> None:
        tries.append(group)
        if len(tries) < 3:
            raise OSError(errno.EBUSY, "Device or resource busy")

    (tmp_path / "cpu").mkdir()
    shares = ProcessorShares(tmp_path)
    shares.limit("p-0", [7], 0.45)
    monkeypatch.setattr(Path, "rmdir", remove_at_the_third_try)
    shares.remove()
    assert (len(tries), capsys.readouterr().err) == (3, "")


async def test_engines_get_less_of_a_processor_that_is_faster_than_the_held_speed(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    shares, processor = ProcessorShares(tmp_path), max(os.sched_getaffinity(0))
    shares.limit("p-0", [], 0.4)
    quota = next((tmp_path / "cpu").glob("*p-0")) / "cpu.cfs_quota_us"
    shares.hold_speed(processor, readings=1)
    try:
        (group,) = (tmp_path / "cpu").glob("*speed")
        process = int((group / "cgroup.procs").read_text())
        assert ((group / "cpu.idle").read_text(), os.sched_getaffinity(process)) == ("1", {processor})
        await wait_until(lambda: 0 < int(quota.read_text() or 4000) < 4000, "a smaller share")
        assert 0 <= shares.take_time_too_slow() <= 1
        assert 0 <= shares.take_time_too_slow() <= 1  # also without a reading in between
    finally:
        shares.remove()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    with pytest.raises(RuntimeError, match="not measured any more"):
        shares.take_time_too_slow()
