"""API server down for 30 s: requests succeed; afterwards all components converge."""

import contextlib
import signal
import time

import pytest

from fulcrum_core.router_state import RouterState
from tests.conftest import RecordMeasurement
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.pods import signal_pod
from tests.kubernetes.nodes.router_state import open_state_port
from tests.kubernetes.nodes.service import INSTANCES, DeployedService
from tools.kubernetes.cluster import API_SERVER, Cluster
from tools.kubernetes.waiting import wait_for

OUTAGE_S = 30.0
CONVERGENCE_MAX_S = 10.0


@pytest.mark.timeout(480)
def test_api_server_outage_of_30_s_fails_no_request_and_a_killed_engine_recovers_meanwhile(
    cluster: Cluster, service: DeployedService, load: Load, record_measurement: RecordMeasurement
) -> None:
    victim = service.engines()[0]
    with open_state_port(cluster, service.address()) as state, contextlib.ExitStack() as outage:
        with load.window("API server down") as away:
            cluster.kill_component(API_SERVER)
            outage.callback(cluster.start_component, API_SERVER)
            stopped_at_s = time.monotonic()
            wait_for(lambda: time.monotonic() > stopped_at_s + OUTAGE_S / 2, "the time to pass")
        with load.window("engine killed without API server") as killed:
            signal_pod(cluster, victim, signal.SIGKILL)
            # An engine without requests may be back before so many probes are missed that it is ejected.
            wait_for(lambda: not _responds(state.read(), victim.name), "the router to miss the engine")
            recovered_after_s = wait_for(
                lambda: _responds(state.read(), victim.name), "the router to reach the engine again"
            )
            wait_for(lambda: time.monotonic() > stopped_at_s + OUTAGE_S, "the time to pass")
        with load.window("API server restarted") as back:
            outage.close()
            started_at_s = time.monotonic()
            patch = {"spec": {"roles": {victim.name: {"reason": "after the outage"}}}}
            generation = service.patch("pdassignments", patch)["metadata"]["generation"]
            wait_for(
                lambda: state.read(min_generation=generation).generation >= generation,
                "the router to apply the write",
            )
            wait_for(lambda: service.phases() == {"Serving": INSTANCES}, "all to serve", timeout_s=60)
            converged_s = time.monotonic() - started_at_s
            ready_s = service.wait_until_ready(timeout_s=120)  # kubelets report readiness late
    record_measurement(
        f"an engine killed meanwhile served again after {recovered_after_s:.1f} s; "
        f"all converged {converged_s:.1f} s after the API server's restart, "
        f"and {ready_s:.1f} s later every pod was Ready"
    )
    assert (away.all_succeeded(), back.all_succeeded()) == (True, True)
    assert (killed.failed, killed.wrong, killed.broken_silently) == (0, 0, 0)
    assert converged_s <= CONVERGENCE_MAX_S


def _responds(state: RouterState, instance: str) -> bool:
    """Whether the instance serves, and has answered the router's last probe."""
    return any(seen.name == instance and seen.serving and not seen.missed_probes for seen in state.instances)
