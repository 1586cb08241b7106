"""The API server is away for half a minute: what serves goes on, and what was missed is made up for."""

import signal
import time

import pytest

from fulcrum_core.state import RouterState
from tests.conftest import Figure
from tests.kubernetes.nodes.load import Load
from tests.kubernetes.nodes.pods import signal_pod
from tests.kubernetes.nodes.router_state import state_port
from tests.kubernetes.nodes.service import INSTANCES, Service
from tools.kubernetes.cluster import API_SERVER, Cluster
from tools.kubernetes.waiting import wait_for

AWAY_S = 30.0
CONVERGED_S = 10.0


@pytest.mark.timeout(480)
def test_half_a_minute_without_an_api_server_fails_no_request_and_an_engine_comes_back_without_it(
    cluster: Cluster, service: Service, load: Load, figure: Figure
) -> None:
    victim = service.engines()[0]
    with state_port(cluster, service.address()) as state:
        with load.window("API server away") as away:
            cluster.kill_part(API_SERVER)
            gone_s = time.monotonic()
            wait_for(lambda: time.monotonic() > gone_s + AWAY_S / 2, "the time to pass")
        with load.window("engine killed without API server") as killed:
            signal_pod(cluster, victim, signal.SIGKILL)
            wait_for(lambda: not _serves(state.read(), victim.name), "the router to leave it out")
            again_s = wait_for(lambda: _serves(state.read(), victim.name), "the router to take it back")
            wait_for(lambda: time.monotonic() > gone_s + AWAY_S, "the time to pass")
        with load.window("API server back") as back:
            cluster.start_part(API_SERVER)
            back_s = time.monotonic()
            word = {"spec": {"roles": {victim.name: {"reason": "still here"}}}}
            generation = service.patch("pdassignments", word)["metadata"]["generation"]
            wait_for(
                lambda: state.read(min_generation=generation).generation >= generation, "the router to hear"
            )
            wait_for(lambda: service.phases() == {"Serving": INSTANCES}, "all to serve", timeout_s=60)
            converged_s = time.monotonic() - back_s
            whole_s = service.wait_whole(timeout_s=120)  # kubelets take their time to say that pods are ready
    figure(
        f"an engine killed meanwhile served again after {again_s:.1f} s; "
        f"all converged {converged_s:.1f} s after the API server's return, "
        f"and {whole_s:.1f} s later every pod was Ready"
    )
    assert (away.all_right(), back.all_right()) == (True, True)
    assert (killed.failed, killed.wrong, killed.broken_silently) == (0, 0, 0)
    assert converged_s <= CONVERGED_S


def _serves(state: RouterState, instance: str) -> bool:
    return any(seen.name == instance and seen.serving for seen in state.instances)
