"""Concurrent writers of one PDAssignment on the store of a local run, in random interleavings."""

from pathlib import Path

import pytest

from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.store_server import serve_store
from tests.concurrent_writers import check_concurrent_writers
from tests.conftest import RecordMeasurement

INTERLEAVINGS = 250


@pytest.mark.timeout(600)
async def test_concurrent_writers_break_no_floor_and_lose_no_write(
    tmp_path: Path, record_measurement: RecordMeasurement, seed: int
) -> None:
    path = tmp_path / "s.sock"
    async with serve_store(MemoryStore(SystemClock()), path):
        record_measurement(
            await check_concurrent_writers(f"unix:{path}", "default", interleavings=INTERLEAVINGS, seed=seed)
        )
