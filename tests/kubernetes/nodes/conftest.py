"""Level 4: the product installed on three nodes, one service on it, and a steady load on that service.

All scenarios share cluster and service: to start them anew for each would take longer than the scenarios.
A scenario leaves the service as it found it: whole, with the spec it was installed with but for the image.
"""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.conftest import RecordMeasurement
from tests.kubernetes.clusters import temporary_namespace
from tests.kubernetes.nodes.installation import NAMESPACE, Helm, build_values
from tests.kubernetes.nodes.load import Load, run_load
from tests.kubernetes.nodes.service import MANIFEST, DeployedService
from tools.kubernetes.cluster import Cluster

# Scenarios that take parts of the cluster away come after those that need all of it, and deletion is the end.
MODULE_ORDER = (
    "test_machine",
    "test_install",
    "test_flips",
    "test_scale",
    "test_rollout",  # for half a minute new routers hold nobody for drained: their predecessors' leases run
    "test_model_reader",
    "test_real_engines",
    "test_bad_input",
    "test_kills",
    "test_nodes",
    "test_api_server",  # Kubernetes' own parts may watch in vain for a minute afterwards, and see no cordon
    "test_permissions",  # by then the log tells of all that a service lives through
    "test_deletion",
    "test_one_namespace",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Scenarios run in the order of `MODULE_ORDER`; the rest stays where it is."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.parent == here]
    places = {name: place for place, name in enumerate(MODULE_ORDER)}
    ordered = iter(sorted(ours, key=lambda item: places.get(item.path.stem, -1)))
    items[:] = [next(ordered) if item.path.parent == here else item for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],  # noqa: ARG001
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A scenario that fails shows what our programs in the cluster said last: soon it is gone."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        report.sections += [
            (f"pods of {where}", _read_last_log_lines(cluster, where)) for where in ("default", NAMESPACE)
        ]
    return report


def _read_last_log_lines(cluster: Cluster, namespace: str) -> str:
    programs = "app.kubernetes.io/part-of=fulcrum,app.kubernetes.io/name!=fulcrum-engine"
    try:
        return cluster.kubectl("logs", f"-n={namespace}", f"-l={programs}", "--tail=40", "--prefix")
    except RuntimeError as error:
        return str(error)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace on the three nodes, deleted after the test."""
    with temporary_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Helm:
    """Helm on the three nodes."""
    return Helm(cluster)


@pytest.fixture(scope="module")
def chat(cluster: Cluster, helm: Helm) -> DeployedService:
    """The manifest applied where the chart is installed: `chat` with four simulated engines, whole."""
    made = DeployedService(cluster, "default", "chat")
    if not made.exists():
        helm.install(build_values())
        cluster.kubectl("apply", "-f", "-", stdin=MANIFEST)
    made.wait_until_ready(timeout_s=150)
    return made


@pytest.fixture
def service(chat: DeployedService) -> DeployedService:
    """`chat`, mended of what a scenario before left when it failed."""
    chat.restore_spec()
    chat.wait_until_ready(timeout_s=150)
    return chat


@pytest.fixture(scope="module")
def steady_load(
    cluster: Cluster, chat: DeployedService, seed: int, record_measurement: RecordMeasurement
) -> Iterator[Load]:
    """One load for all scenarios of a module: to start it takes seconds."""
    with run_load(cluster, chat, seed, node="n1", report=record_measurement) as running:
        yield running


@pytest.fixture
def load(service: DeployedService, steady_load: Load) -> Load:  # noqa: ARG001 - the service is whole first
    """A steady load on the service through its address, from node n1."""
    return steady_load
