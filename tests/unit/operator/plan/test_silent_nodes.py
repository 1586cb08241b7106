"""What is said of a node, against what the router sees of its engines."""

import pytest

from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.state import RouterState
from fulcrum_core.values import Phase
from fulcrum_operator.plan import asks_router
from fulcrum_operator.plan.observed import Observed, believed
from tests.unit.operator.builders import NOW_S, D, engine, instance, router, service

LOST = engine("chat-0", EngineState.LOST, message="its node n1 does not answer", node_lost=True)
AT_WORK = instance("chat-0", role=D, endpoint="127.0.0.1:9000")


def seen(lost: EngineObservation = LOST, says: RouterState | None = None) -> Observed:
    return Observed(
        service=service(instances=1), now_s=NOW_S, instances=(AT_WORK,), engines={"chat-0": lost}, router=says
    )


def unreached(says: RouterState) -> RouterState:
    return says.model_copy(
        update={"instances": tuple(i.model_copy(update={"missed_probes": 3}) for i in says.instances)}
    )


def test_an_engine_that_the_router_reaches_runs_whatever_is_said_of_its_node() -> None:
    found = believed(seen(says=router(1, {"chat-0": 2})))
    told = found.engines["chat-0"]
    assert (told.state, told.endpoint, found.doubted) == (EngineState.RUNNING, "127.0.0.1:9000", True)
    assert found.serving == {"chat-0"}


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        pytest.param(LOST, unreached(router(1, {"chat-0": 0})), id="the router does not reach it, either"),
        pytest.param(LOST, router(1, {}), id="the router does not know it"),
        pytest.param(LOST, None, id="the router does not answer"),
        pytest.param(
            engine("chat-0", EngineState.LOST, message="its pod was deleted"),
            router(1, {"chat-0": 0}),
            id="its pod is gone, whoever still answers there",
        ),
    ],
)
def test_what_nobody_contradicts_is_lost(lost: EngineObservation, says: RouterState | None) -> None:
    found = believed(seen(lost, says))
    assert (found.engines["chat-0"].state, found.doubted) == (EngineState.LOST, False)


def test_the_router_is_asked_as_soon_as_a_node_is_said_to_be_lost() -> None:
    assert asks_router(seen())
    assert AT_WORK.status.phase is Phase.SERVING
