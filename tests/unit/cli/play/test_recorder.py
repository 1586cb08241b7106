"""The history of a run: bands of one cell a second, and flips with their acknowledgement."""

from collections.abc import Callable

import pytest

from fulcrum_cli.play.recorder import Flip, Recorder
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
    assert recorder.assigned(assignment(1, a=P, b=D)) == []
    flip = Flip("a", P, D, 10.0, Actor.AUTOSCALER, "why", 2)
    assert recorder.assigned(assignment(2, since=10.0, a=D, b=D)) == [flip]
    assert recorder.flips == [flip]


@pytest.mark.parametrize(
    "router_first", [False, True], ids=["the store tells first", "the router tells first"]
)
def test_an_acknowledgement_is_timed_from_the_decision(router_first: bool) -> None:
    recorder = Recorder()
    recorder.assigned(assignment(1, a=P))
    steps: list[Callable[[], object]] = [
        lambda: recorder.acknowledged(2, 10.0123),
        lambda: recorder.assigned(assignment(2, since=10.0, a=D)),
    ]
    for step in steps if router_first else steps[::-1]:
        step()
    recorder.acknowledged(3, 99.0)
    assert [flip.ack_ms for flip in recorder.flips] == [12.3]


def test_a_later_generation_acknowledges_all_before_it() -> None:
    recorder = Recorder()
    for generation, role in ((1, P), (2, D), (3, P)):
        recorder.assigned(assignment(generation, since=float(generation), a=role))
    recorder.acknowledged(1, 1.5)
    recorder.acknowledged(3, 3.01)
    assert [flip.ack_ms for flip in recorder.flips] == [1010.0, 10.0]


def test_a_band_has_one_cell_a_second_and_shows_starts_flips_and_deaths() -> None:
    recorder = Recorder()
    recorder.second({"a": status(Phase.STARTING)})
    recorder.assigned(assignment(1, a=P))
    recorder.second({"a": status()})
    recorder.assigned(assignment(2, a=D))
    recorder.second({"a": status()})
    recorder.second({"a": status(Phase.FAILED)})
    recorder.second({"a": status(restarts=1)})
    recorder.second({"a": status(restarts=1), "b": status(Phase.STARTING)})
    assert {name: "".join(band) for name, band in recorder.bands.items()} == {"a": ".PDxxD", "b": "......"}
    assert recorder.marks == {"a": {2}}


def test_an_instance_that_is_gone_goes_on_as_dead() -> None:
    recorder = Recorder()
    recorder.assigned(assignment(1, a=P))
    recorder.second({"a": status()})
    recorder.second({})
    assert "".join(recorder.bands["a"]) == "Px"
