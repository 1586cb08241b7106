"""When a hand-off that decode has not answered may have been fetched too late."""

from dataclasses import dataclass

import pytest

from fulcrum_router.fleet.pending_transfers import Awaited


@dataclass(frozen=True)
class Handed:
    sent_s: float = 0.0
    deadline_s: float = 25.0
    lease_s: float = 30.0


def awaited(*handed: Handed) -> Awaited[Handed]:
    made: Awaited[Handed] = Awaited()
    for one in handed:
        made.add(one)
    return made


OLD, YOUNG = Handed(), Handed(sent_s=10.0, deadline_s=35.0)


@pytest.mark.parametrize(
    ("now_s", "expected"),
    [
        pytest.param(25.0, [], id="in time"),
        pytest.param(25.1, [OLD], id="the one whose time is over"),
        pytest.param(35.1, [OLD, YOUNG], id="both"),
    ],
)
def test_what_is_not_answered_by_its_deadline_is_overdue(now_s: float, expected: list[Handed]) -> None:
    found = awaited(OLD, YOUNG)
    assert [sorted(found.overdue(at_s), key=id) for at_s in (now_s, now_s)] == [sorted(expected, key=id)] * 2


def test_what_is_answered_or_given_up_is_not_waited_for() -> None:
    found = awaited(OLD, YOUNG)
    found.discard(OLD)
    found.discard(OLD)
    assert found.overdue(30.0) == []
    assert found.overdue(40.0) == [YOUNG]
    found.clear()
    assert found.overdue(40.0) == []


@pytest.mark.parametrize(
    ("sent_s", "answered_s", "overdue_from_s"),
    [
        pytest.param(1.0, 20.0, 35.0, id="it came later: the lease was prolonged then"),
        pytest.param(1.0, 5.0, 25.0, id="long ago"),
        pytest.param(0.9, 20.0, 25.0, id="it may have overtaken the hand-off"),
    ],
)
def test_an_engine_that_answers_what_came_later_keeps_the_lease(
    sent_s: float, answered_s: float, overdue_from_s: float
) -> None:
    found = awaited(OLD)
    found.answered(sent_s=sent_s, now_s=answered_s)
    assert found.overdue(overdue_from_s) == []
    assert found.overdue(overdue_from_s + 0.1) == [OLD]
    found.answered(sent_s=30.0, now_s=31.0)  # it answers again
    assert found.overdue(45.9) == []


def test_an_answer_to_what_was_sent_before_the_last_one_answered_tells_nothing_new() -> None:
    found = awaited(OLD)
    found.answered(sent_s=5.0, now_s=6.0)
    found.answered(sent_s=2.0, now_s=24.0)
    assert found.overdue(25.1) == [OLD]
