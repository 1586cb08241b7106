"""How long drains took, by the phases before and after a reconcile."""

from typing import Any

import pytest

from fulcrum_core.api import PDInstance
from fulcrum_core.api.pdinstance import DRAINED
from fulcrum_core.values import Phase
from fulcrum_operator.plan import Plan
from fulcrum_operator.plan.drains import list_drain_times
from tests.unit.operator.builders import NOW_S, D, P, instance, settled

DRAINING = instance("chat-0", Phase.DRAINING, phase_since=NOW_S - 42)
IDLE = instance("chat-0", Phase.DRAINING, phase_since=NOW_S - 42, reason=DRAINED)


@pytest.mark.parametrize(
    ("before", "after", "times_s"),
    [
        pytest.param(DRAINING, instance("chat-0", Phase.TERMINATING), [42.0], id="removed"),
        pytest.param(DRAINING, instance("chat-0", Phase.SWITCHING), [42.0], id="restarted to flip"),
        pytest.param(DRAINING, IDLE, [42.0], id="cordoned, and now idle"),
        pytest.param(DRAINING, DRAINING, [], id="still has requests"),
        pytest.param(DRAINING, instance("chat-0"), [], id="drain cancelled"),
        pytest.param(DRAINING, instance("chat-0", Phase.FAILED), [], id="engine failed"),
        pytest.param(IDLE, instance("chat-0", Phase.TERMINATING), [], id="counted when it became idle"),
        pytest.param(instance("chat-0"), instance("chat-0", Phase.TERMINATING), [], id="was not draining"),
    ],
)
def test_a_drain_is_timed_once_when_it_ends(before: PDInstance, after: PDInstance, times_s: Any) -> None:
    observed = settled({"chat-0": P, "chat-1": D}, instances=(before, instance("chat-1")))
    assert list(list_drain_times(observed, Plan(objects=(after, instance("chat-1"))))) == times_s


def test_the_clock_of_an_earlier_leader_may_be_ahead() -> None:
    before = instance("chat-0", Phase.DRAINING, phase_since=NOW_S + 5)
    observed = settled({"chat-0": P}, instances=(before,))
    after = instance("chat-0", Phase.TERMINATING)
    assert list(list_drain_times(observed, Plan(objects=(after,)))) == [0.0]
