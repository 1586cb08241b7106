"""Concurrent writers of one PDAssignment on a real API server, in random interleavings."""

import pytest

from tests.concurrent_writers import check_concurrent_writers
from tests.conftest import RecordMeasurement
from tools.kubernetes.cluster import Cluster


@pytest.mark.timeout(900)
async def test_concurrent_writers_break_no_floor_and_lose_no_write(
    control_plane: Cluster,
    namespace: str,
    record_measurement: RecordMeasurement,
    seed: int,
    request: pytest.FixtureRequest,
) -> None:
    record_measurement(
        await check_concurrent_writers(
            f"kubeconfig:{control_plane.kubeconfig}",
            namespace,
            interleavings=request.config.getoption("--interleavings"),
            seed=seed,
        )
    )
