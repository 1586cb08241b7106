"""Fixtures of levels 3 and 4: one control plane and one cluster with nodes for the whole run."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.clusters import require_kubernetes, start_test_cluster
from tools.image.build import build_image
from tools.kubernetes.cluster import Cluster

StartCluster = Callable[..., Cluster]
PROTECTED_OWNERS = {"enable-admission-plugins": "NodeRestriction,OwnerReferencesPermissionEnforcement"}
IMPATIENT_HPA = {  # 15 s, 30 s and 5 min by default
    "horizontal-pod-autoscaler-sync-period": "1s",
    "horizontal-pod-autoscaler-initial-readiness-delay": "0s",
    "horizontal-pod-autoscaler-downscale-stabilization": "0s",
}


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """`start_cluster(nodes, archives=…, api_server={flag: value})` starts another cluster for one test.

    A test may stop its cluster; the end of the run stops all of them. Their folders, with logs, are kept.
    """
    require_kubernetes()
    running: list[Cluster] = []

    def start(nodes: int = 0, **options: Any) -> Cluster:
        cluster = start_test_cluster(tmp_path_factory.mktemp("kubernetes"), nodes, **options)
        running.append(cluster)
        return cluster

    try:
        yield start
    finally:
        for cluster in running:
            cluster.stop()


@pytest.fixture(scope="session")
def control_plane(start_cluster: StartCluster) -> Cluster:
    """Level 3: etcd, API server, controller manager and scheduler with the CRDs, without nodes.

    It protects owners of objects as OpenShift does, and its HPA controller acts each second.
    """
    return start_cluster(0, api_server=PROTECTED_OWNERS, controller_manager=IMPATIENT_HPA)


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Fulcrum's image under two tags: one to install, one to upgrade to."""
    require_kubernetes()
    folder = tmp_path_factory.mktemp("images")
    return tuple(build_image(folder / f"fulcrum-{tag}.tar", f"localhost/fulcrum:{tag}") for tag in (1, 2))


@pytest.fixture(scope="session")
def cluster(start_cluster: StartCluster, archives: tuple[Path, ...]) -> Cluster:
    """Level 4: nodes n1, n2 and n3 with Fulcrum's images; the chart installs the CRDs.

    To work on a scenario, name the folder of a running cluster in KUBERNETES_TESTS_CLUSTER: it stays up.
    """
    if folder := os.environ.get("KUBERNETES_TESTS_CLUSTER"):
        return Cluster(Path(folder))
    return start_cluster(3, archives=archives, crds=False)
