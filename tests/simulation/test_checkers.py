"""Each checker detects its own violation and no other: the result of a clean run is tampered with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.checkers import LIVENESS, SAFETY, violations
from tests.simulation.control_loop import RequestRecord, SimulationResult, simulate
from tests.simulation.history import Event, History
from tests.simulation.scenarios import steady_scenario

Tampering = Callable[[SimulationResult], SimulationResult]


@pytest.fixture(scope="module")
def clean() -> SimulationResult:
    scenario = steady_scenario(1)
    return simulate(replace(scenario, load=tuple(scenario.load)[:40], end_s=8.0))


def change_first_request(**changes: Any) -> Tampering:
    def tamper(result: SimulationResult) -> SimulationResult:
        first: RequestRecord = replace(result.requests[0], **changes)
        return replace(result, requests=(first, *result.requests[1:]))

    return tamper


def add_event(kind: str, **fields: Any) -> Tampering:
    """Append one event to the history."""

    def tamper(result: SimulationResult) -> SimulationResult:
        history = History(result.history.now_s, [*result.history.events, Event(99.0, kind, fields)])
        return replace(result, history=history)

    return tamper


def tamper_twice(first: Tampering, second: Tampering) -> Tampering:
    return lambda result: second(first(result))


def add_flip(since_s: float, **fields: Any) -> Tampering:
    given = {"instance": "chat-0", "to": "Decode", "by": "Autoscaler", "reason": "-", "since_s": since_s}
    return add_event("flip", **{**given, **fields})


EIGHT = [f"chat-{n}" for n in range(8)]


def roles(decode: int, *, cordoned: bool = False) -> dict[str, tuple[str, bool]]:
    return {n: ("Decode" if i < decode else "Prefill", cordoned and i < decode) for i, n in enumerate(EIGHT)}


@pytest.mark.parametrize(
    ("checker", "tamper"),
    [
        ("every_request_ends_once", change_first_request(ends=0)),
        ("every_request_ends_once", change_first_request(ends=2)),
        (
            "every_token_comes_once_and_in_order",
            change_first_request(token_indices=[0, 1, 1, 2], outcome="broken"),
        ),
        ("every_token_comes_once_and_in_order", change_first_request(token_indices=[0])),
        ("every_token_comes_once_and_in_order", change_first_request(outcome="failed")),
        ("no_wrong_text", change_first_request(wrong_tokens=1)),
        ("kv_stays_within_capacity", add_event("kv", instance="chat-0", usage=1.01)),
        ("roles_keep_their_floors", add_event("acknowledged", generation=99, roles=roles(0), serving=EIGHT)),
        ("roles_keep_their_floors", add_event("acknowledged", generation=99, roles=roles(8), serving=EIGHT)),
        (
            "roles_keep_their_floors",
            add_event("acknowledged", generation=99, roles=roles(4, cordoned=True), serving=EIGHT),
        ),
        ("floors_stay_assigned", add_event("assignment", generation=99, roles=roles(8))),
        ("every_flip_has_a_reason", add_flip(50.0, reason="")),
        ("no_flip_breaks_the_cooldown", tamper_twice(add_flip(50.0), add_flip(50.9))),
        ("no_flip_breaks_the_cooldown", tamper_twice(add_flip(50.0, by="Person"), add_flip(50.9))),
        ("generations_only_grow", add_event("acknowledged", generation=1, roles=roles(4), serving=EIGHT)),
    ],
)
def test_each_checker_reports_its_own_violation_alone(
    clean: SimulationResult, checker: str, tamper: Tampering
) -> None:
    assert violations(clean, *SAFETY, *LIVENESS) == []
    found = {line.partition(":")[0] for line in violations(tamper(clean), *SAFETY, *LIVENESS)}
    assert found == {checker}


def test_a_person_may_flip_within_the_cooldown(clean: SimulationResult) -> None:
    tampered = tamper_twice(add_flip(50.0), add_flip(50.9, by="Person"))(clean)
    assert violations(tampered, *SAFETY) == []


def test_an_entry_left_in_a_ledger_is_reported(clean: SimulationResult) -> None:
    entry = clean.router.instances["chat-3"].ledger.add_decode(tokens=5)
    found = violations(clean, *LIVENESS)
    entry.release()
    assert found == ["ledgers_and_caches_are_empty: the ledger of chat-3 still has (0.0, 0, 5, 1, 0)"]
