"""Each checker sees what it is there for: a clean world is tampered with, and only that checker complains."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.checkers import LIVENESS, SAFETY, violations
from tests.simulation.history import Event, History
from tests.simulation.plans import steady_load
from tests.simulation.world import Answer, Ended, simulate

Tampering = Callable[[Ended], Ended]


@pytest.fixture(scope="module")
def clean() -> Ended:
    plan = steady_load(1)
    return simulate(replace(plan, load=tuple(plan.load)[:40], ends_s=8.0))


def answer(**changes: Any) -> Tampering:
    def tamper(ended: Ended) -> Ended:
        first: Answer = replace(ended.answers[0], **changes)
        return replace(ended, answers=(first, *ended.answers[1:]))

    return tamper


def event(what: str, **facts: Any) -> Tampering:
    """One more event at the end."""

    def tamper(ended: Ended) -> Ended:
        history = History(ended.history.now_s, [*ended.history.events, Event(99.0, what, facts)])
        return replace(ended, history=history)

    return tamper


def both(first: Tampering, second: Tampering) -> Tampering:
    return lambda ended: second(first(ended))


def flip(since_s: float, **facts: Any) -> Tampering:
    given = {"instance": "chat-0", "to": "Decode", "by": "Autoscaler", "reason": "-", "since_s": since_s}
    return event("flip", **{**given, **facts})


EIGHT = [f"chat-{n}" for n in range(8)]


def roles(decode: int, *, cordoned: bool = False) -> dict[str, tuple[str, bool]]:
    return {n: ("Decode" if i < decode else "Prefill", cordoned and i < decode) for i, n in enumerate(EIGHT)}


@pytest.mark.parametrize(
    ("checker", "tamper"),
    [
        ("every_request_ends_once", answer(ends=0)),
        ("every_request_ends_once", answer(ends=2)),
        ("every_token_comes_once_and_in_order", answer(indices=[0, 1, 1, 2], outcome="broken")),
        ("every_token_comes_once_and_in_order", answer(indices=[0])),
        ("every_token_comes_once_and_in_order", answer(outcome="failed")),
        ("no_wrong_text", answer(wrong=1)),
        ("kv_stays_within_capacity", event("kv", instance="chat-0", usage=1.01)),
        ("roles_keep_their_floors", event("acknowledged", generation=99, roles=roles(0), ready=EIGHT)),
        ("roles_keep_their_floors", event("acknowledged", generation=99, roles=roles(8), ready=EIGHT)),
        (
            "roles_keep_their_floors",
            event("acknowledged", generation=99, roles=roles(4, cordoned=True), ready=EIGHT),
        ),
        ("floors_stay_assigned", event("assignment", generation=99, roles=roles(8))),
        ("every_flip_says_why", flip(50.0, reason="")),
        ("the_cooldown_holds", both(flip(50.0), flip(50.9))),
        ("the_cooldown_holds", both(flip(50.0, by="Person"), flip(50.9))),
        ("epochs_only_grow", event("acknowledged", generation=1, roles=roles(4), ready=EIGHT)),
    ],
)
def test_a_checker_sees(clean: Ended, checker: str, tamper: Tampering) -> None:
    assert violations(clean, *SAFETY, *LIVENESS) == []
    found = {line.partition(":")[0] for line in violations(tamper(clean), *SAFETY, *LIVENESS)}
    assert found == {checker}


def test_a_person_may_flip_within_the_cooldown(clean: Ended) -> None:
    tampered = both(flip(50.0), flip(50.9, by="Person"))(clean)
    assert violations(tampered, *SAFETY) == []


def test_what_is_left_in_the_books_is_seen(clean: Ended) -> None:
    entry = clean.router.instances["chat-3"].ledger.open_decode(tokens=5)
    found = violations(clean, *LIVENESS)
    entry.release()
    assert found == ["the_books_are_empty: the ledger of chat-3 keeps (0.0, 0, 5, 1, 0)"]
