"""The recorder keeps one cell a second for each instance, and flips with their acknowledgement."""

from collections.abc import Callable

import pytest

from fulcrum_cli.play.recorder import RecordedFlip, Recorder
from fulcrum_core.api.meta import ObjectMeta
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstanceStatus
from fulcrum_core.values import Actor, Phase, Role

P, D = Role.PREFILL, Role.DECODE


def assignment(generation: int, *, since: float = 0.0, **roles: Role) -> PDAssignment:
    entries = {
        name: RoleAssignment(role=role, since=since, by=Actor.AUTOSCALER, reason="why")
        for name, role in roles.items()
    }
    metadata = ObjectMeta(name="chat", generation=generation)
    return PDAssignment(metadata=metadata, spec=PDAssignmentSpec(service="chat", roles=entries))


def status(phase: Phase = Phase.SERVING, restarts: int = 0) -> PDInstanceStatus:
    return PDInstanceStatus(phase=phase, restarts=restarts)


def test_the_first_assignment_is_no_flip_and_a_changed_role_is_one() -> None:
    recorder = Recorder()
    assert recorder.record_assignment(assignment(1, a=P, b=D)) == []
    flip = RecordedFlip("a", P, D, 10.0, Actor.AUTOSCALER, "why", 2)
    assert recorder.record_assignment(assignment(2, since=10.0, a=D, b=D)) == [flip]
    assert recorder.flips == [flip]


@pytest.mark.parametrize(
    "router_first", [False, True], ids=["assignment read first", "acknowledgement read first"]
)
def test_an_acknowledgement_is_timed_from_the_decision(router_first: bool) -> None:
    recorder = Recorder()
    recorder.record_assignment(assignment(1, a=P))
    steps: list[Callable[[], object]] = [
        lambda: recorder.record_acknowledgement(2, 10.0123),
        lambda: recorder.record_assignment(assignment(2, since=10.0, a=D)),
    ]
    for step in steps if router_first else steps[::-1]:
        step()
    recorder.record_acknowledgement(3, 99.0)
    assert [flip.ack_ms for flip in recorder.flips] == [12.3]


def test_a_later_generation_acknowledges_all_before_it() -> None:
    recorder = Recorder()
    for generation, role in ((1, P), (2, D), (3, P)):
        recorder.record_assignment(assignment(generation, since=float(generation), a=role))
    recorder.record_acknowledgement(1, 1.5)
    recorder.record_acknowledgement(3, 3.01)
    assert [flip.ack_ms for flip in recorder.flips] == [1010.0, 10.0]


def test_a_role_history_has_one_cell_a_second() -> None:
    recorder = Recorder()
    recorder.record_second({"a": status(Phase.STARTING)})
    recorder.record_assignment(assignment(1, a=P))
    recorder.record_second({"a": status()})
    recorder.record_assignment(assignment(2, a=D))
    recorder.record_second({"a": status()})
    recorder.record_second({"a": status(Phase.FAILED)})
    recorder.record_second({"a": status(restarts=1)})
    recorder.record_second({"a": status(restarts=1), "b": status(Phase.STARTING)})
    assert {name: "".join(role_history) for name, role_history in recorder.role_histories.items()} == {
        "a": ".PDxxD",
        "b": "......",
    }
    assert recorder.flip_marks == {"a": {2}}


def test_a_deleted_instance_is_shown_as_dead() -> None:
    recorder = Recorder()
    recorder.record_assignment(assignment(1, a=P))
    recorder.record_second({"a": status()})
    recorder.record_second({})
    assert "".join(recorder.role_histories["a"]) == "Px"
