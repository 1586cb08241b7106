"""Fixtures of level 4: Fulcrum installed on three nodes, one service, and a constant load on the service.

All scenarios share cluster and service, because starting them takes longer than a scenario. A scenario leaves
the service ready and with its original spec, except for the image.
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

# Scenarios that break parts of the cluster come after those that need all of it; deletion comes last.
MODULE_ORDER = (
    "test_machine",
    "test_install",
    "test_monitoring",
    "test_flips",
    "test_scale",
    "test_tiers",
    "test_rollout",  # for 30 s new routers report no instance as drained: leases of old routers may be open
    "test_model_reader",
    "test_real_engines",
    "test_bad_input",
    "test_kills",
    "test_nodes",
    "test_smallest_service",
    "test_api_server",  # Kubernetes' scheduler may miss a cordon for a minute afterwards
    "test_permissions",  # by then the audit log covers the other scenarios
    "test_deletion",
    "test_restricted_cluster",
    "test_documentation",  # removes the CRDs
)


SCENARIO_TIMEOUT_S = 300
"""Longest time of a scenario, if it has none of its own; the first one starts the cluster, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the scenarios by `MODULE_ORDER` and limit their time; leave other tests in place."""
    here = Path(__file__).parent
    ours = [item for item in items if item.path.parent == here]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SCENARIO_TIMEOUT_S))
    places = {name: place for place, name in enumerate(MODULE_ORDER)}
    ordered = iter(sorted(ours, key=lambda item: places.get(item.path.stem, -1)))
    items[:] = [next(ordered) if item.path.parent == here else item for item in items]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],  # noqa: ARG001
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the last log lines of Fulcrum's pods to the report of a failed scenario, before the pods end."""
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
    """A new namespace of the cluster, deleted after the test."""
    with temporary_namespace(cluster) as name:
        yield name


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Helm:
    """Helm for the cluster."""
    return Helm(cluster)


@pytest.fixture(scope="module")
def chat(cluster: Cluster, helm: Helm) -> DeployedService:
    """The service `chat` with four simulated engines, ready; the chart is installed first if necessary."""
    made = DeployedService(cluster, "default", "chat")
    if not made.exists():
        helm.install(build_values())
        cluster.kubectl("apply", "-f", "-", stdin=MANIFEST)
    made.wait_until_ready(timeout_s=150)
    return made


@pytest.fixture
def service(chat: DeployedService) -> DeployedService:
    """`chat`, ready and with its original spec even if the scenario before failed."""
    chat.restore_spec()
    chat.wait_until_ready(timeout_s=150)
    return chat


@pytest.fixture(scope="module")
def steady_load(
    cluster: Cluster, chat: DeployedService, seed: int, record_measurement: RecordMeasurement
) -> Iterator[Load]:
    """One load for all scenarios of a module, because starting it takes seconds."""
    with run_load(cluster, chat, seed, node="n1", report=record_measurement) as running:
        yield running


@pytest.fixture
def load(service: DeployedService, steady_load: Load) -> Load:  # noqa: ARG001 - the service is ready first
    """Constant load on the service's cluster address, from node n1."""
    return steady_load
