"""An engine on a node reported lost counts as running if the router reaches it."""

import pytest

from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Phase
from fulcrum_operator.plan import needs_router_state
from fulcrum_operator.plan.instance_state import mark_reachable_engines_running, ready_instances
from fulcrum_operator.plan.observed import Observed
from tests.unit.operator.builders import NOW_S, D, engine, instance, router, service

LOST = engine("chat-0", EngineState.LOST, message="its node n1 does not respond", node_lost=True)
WORKING = instance("chat-0", role=D, endpoint="127.0.0.1:9000")


def observe(lost: EngineObservation = LOST, router_state: RouterState | None = None) -> Observed:
    return Observed(
        service=service(instances=1),
        now_s=NOW_S,
        instances=(WORKING,),
        engines={"chat-0": lost},
        router=router_state,
    )


def unreachable(router_state: RouterState) -> RouterState:
    return router_state.model_copy(
        update={"instances": tuple(i.model_copy(update={"missed_probes": 3}) for i in router_state.instances)}
    )


def test_engine_that_the_router_reaches_counts_as_running_on_a_lost_node() -> None:
    found = mark_reachable_engines_running(observe(router_state=router(1, {"chat-0": 2})))
    reached = found.engines["chat-0"]
    assert (reached.state, reached.endpoint, found.node_loss_disputed) == (
        EngineState.RUNNING,
        "127.0.0.1:9000",
        True,
    )
    assert ready_instances(found) == {"chat-0"}


@pytest.mark.parametrize(
    ("lost", "router_state"),
    [
        pytest.param(
            LOST, unreachable(router(1, {"chat-0": 0})), id="the router does not reach the engine either"
        ),
        pytest.param(LOST, router(1, {}), id="the router does not know the instance"),
        pytest.param(LOST, None, id="the router does not respond"),
        pytest.param(
            engine("chat-0", EngineState.LOST, message="its pod was deleted"),
            router(1, {"chat-0": 0}),
            id="the pod was deleted, whatever still responds at its address",
        ),
    ],
)
def test_engine_on_a_lost_node_stays_lost_if_the_router_does_not_reach_it(
    lost: EngineObservation, router_state: RouterState | None
) -> None:
    found = mark_reachable_engines_running(observe(lost, router_state))
    assert (found.engines["chat-0"].state, found.node_loss_disputed) == (EngineState.LOST, False)


def test_lost_node_needs_the_router_state() -> None:
    assert needs_router_state(observe())
    assert WORKING.status.phase is Phase.SERVING
