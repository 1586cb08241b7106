"""Level 3: a namespace on the control plane for each test, and control planes without Fulcrum's CRDs."""

from collections.abc import Iterator

import pytest

from tests.kubernetes.clusters import delete_crds, temporary_namespace
from tests.kubernetes.conftest import StartCluster
from tests.kubernetes.control_plane.operator_process import OperatorProcess, operator_starter, wait_until
from tools.kubernetes.cluster import Cluster


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A fresh namespace on the control plane, deleted after the test."""
    with temporary_namespace(control_plane) as name:
        yield name


@pytest.fixture(scope="session")
def bare_control_plane(start_cluster: StartCluster) -> Cluster:
    """A control plane without CRDs."""
    return start_cluster(0, crds=False)


@pytest.fixture
def bare_cluster(bare_control_plane: Cluster) -> Iterator[Cluster]:
    """A control plane without CRDs; those that a test applies are deleted after it, with their objects."""
    yield bare_control_plane
    delete_crds(bare_control_plane)


@pytest.fixture
def bare_namespace(bare_cluster: Cluster) -> Iterator[str]:
    """A fresh namespace on the control plane without CRDs."""
    with temporary_namespace(bare_cluster) as name:
        yield name


@pytest.fixture(scope="module")
def operator(
    request: pytest.FixtureRequest, control_plane: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """One operator of all namespaces for the tests of a module, since its start takes longer than a test.

    The module has a Lease of its own: the Lease of a killed operator expires only after a while.
    """
    account = request.path.stem.replace("_", "-")
    with operator_starter(control_plane, "", tmp_path_factory.mktemp("operator")) as start:
        process = start("op-a", "--lease-namespace", "default", "--service-account", account)
        wait_until(process.is_leader, "the operator to lead")
        yield process
