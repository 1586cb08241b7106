"""Levels 3 and 4: real clusters, one of each for the whole run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kubernetes.clusters import started
from tools.kubernetes.cluster import Cluster

StartCluster = Callable[..., Cluster]


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """Starts a cluster of a test's own: `start_cluster(nodes, archives=…, api_server={flag: value})`.

    All are stopped at the end of the run, and may be stopped before. Their folders, with logs, are kept.
    """
    running: list[Cluster] = []

    def start(nodes: int = 0, **options: Any) -> Cluster:
        cluster = started(tmp_path_factory.mktemp("kubernetes"), nodes, **options)
        running.append(cluster)
        return cluster

    try:
        yield start
    finally:
        for cluster in running:
            cluster.stop()


@pytest.fixture(scope="session")
def control_plane(start_cluster: StartCluster) -> Cluster:
    """Level 3: etcd, API server, controller-manager and scheduler with our kinds, and no nodes."""
    return start_cluster(0)
