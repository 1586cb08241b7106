"""KVTransferVerified: what the router's findings come to, and how seldom that is written."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import PDInstance, PDService, Resource
from fulcrum_core.state import PairState
from fulcrum_core.values import Role
from fulcrum_operator.controller.events import events_of
from fulcrum_operator.plan import Observed, Plan, plan_service
from tests.unit.operator.builders import NOW_S, router, settled

P, D = Role.PREFILL, Role.DECODE
FOUR = {"chat-0": P, "chat-1": P, "chat-2": D, "chat-3": D}


def of(plan: Plan, kind: type[Resource]) -> dict[str, Any]:
    return {obj.metadata.name: obj for obj in plan.objects if isinstance(obj, kind)}


def pair(prefill: str, decode: str, reason: str = "Proven", **counts: int) -> PairState:
    figures = {"proven": 1, "recomputed": 0, "unknown": 0, **counts}
    return PairState(
        prefill=prefill,
        decode=decode,
        last_proven_s=1.0,
        handshake_s=0.2,
        seconds_per_1k_tokens=None,
        last_reason=reason,
        **figures,
    )


def told(*pairs: PairState, **fields: Any) -> Observed:
    seen = settled(FOUR, **fields)
    return replace(seen, router=router().model_copy(update={"pairs": pairs}))


def verdict(seen: Observed) -> tuple[str, str, str]:
    conditions = of(plan_service(seen), PDService)["chat"].status.conditions
    found = next(c for c in conditions if c.type == "KVTransferVerified")
    return found.status, found.reason, found.message


GOOD = pair("chat-0", "chat-2")


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(
            settled({"chat-0": D}),
            ("Unknown", "NotApplicable", "a single instance hands nothing over"),
            id="a single instance",
        ),
        pytest.param(told(), ("Unknown", "NoTrafficYet", "no hand-off was seen yet"), id="nothing seen"),
        pytest.param(
            told(pair("chat-0", "chat-2", "NoTrafficYet")),
            ("Unknown", "NoTrafficYet", "no hand-off was seen yet"),
            id="nothing seen of a pair",
        ),
        pytest.param(
            told(pair("chat-0", "chat-2", "CannotTell")),
            (
                "Unknown",
                "CannotTell",
                "chat-0 → chat-2: decode does not say what it computed: "
                "is --enable-prompt-tokens-details given?",
            ),
            id="engines that do not say",
        ),
        pytest.param(
            told(GOOD, pair("chat-1", "chat-3", "NoTrafficYet")),
            ("True", "Verified", "seen to hand KV over: chat-0 → chat-2"),
            id="one pair proven",
        ),
        pytest.param(
            told(GOOD, pair("chat-1", "chat-9", "HandshakeFailed")),
            ("True", "Verified", "seen to hand KV over: chat-0 → chat-2"),
            id="an instance that is gone counts no more",
        ),
        *(
            pytest.param(
                told(GOOD, pair("chat-1", "chat-2", reason)),
                ("False", reason, f"chat-1 → chat-2: {reason}"),
                id=reason,
            )
            for reason in ("HandshakeFailed", "NotCompatible", "LeaseExpired", "Recomputed", "SlowTransport")
        ),
        pytest.param(
            told(*(pair(p, d, "Recomputed") for p in FOUR for d in FOUR if p != d)),
            (
                "False",
                "Recomputed",
                "chat-0 → chat-1: Recomputed, chat-0 → chat-2: Recomputed, chat-0 → chat-3: Recomputed "
                "and 9 more",
            ),
            id="many pairs",
        ),
        pytest.param(
            told(pair("chat-3", "chat-2", "Recomputed"), pair("chat-1", "chat-2", "HandshakeFailed")),
            (
                "False",
                "HandshakeFailed",
                "chat-1 → chat-2: HandshakeFailed, chat-3 → chat-2: Recomputed",
            ),
            id="the worst names the condition",
        ),
    ],
)
def test_the_findings_of_the_router_become_one_condition(
    seen: Observed, expected: tuple[str, str, str]
) -> None:
    assert verdict(seen) == expected


def test_engines_that_cannot_read_one_another_are_named_with_the_reason() -> None:
    seen = settled({"chat-0": P, "chat-1": D})
    sizes = {"chat-0": 16, "chat-1": 32}
    facts = {
        name: replace(known, identity=known.identity.model_copy(update={"block_size": sizes[name]}))
        for name, known in seen.facts.items()
    }
    apart = tuple(
        i.replace(status=i.status.model_copy(update={"identity": facts[i.metadata.name].identity}))
        for i in seen.instances
    )
    assert verdict(replace(seen, instances=apart, facts=facts)) == (
        "False",
        "NotCompatible",
        "chat-0 → chat-1: block size differs: prefill has 16, decode has 32, "
        "chat-1 → chat-0: block size differs: prefill has 32, decode has 16",
    )


def test_what_was_known_stands_while_nobody_says_anything_new() -> None:
    before = told(GOOD)
    status = of(plan_service(before), PDService)["chat"].status
    kept = before.service.replace(status=status)
    assert verdict(replace(before, service=kept, router=None)) == verdict(before)
    fresh_router = router()  # a standby took over and has seen nothing
    assert verdict(replace(before, service=kept, router=fresh_router)) == verdict(before)


def test_counts_alone_change_no_word() -> None:
    assert verdict(told(GOOD)) == verdict(told(pair("chat-0", "chat-2", proven=10**6, recomputed=5)))


def test_an_instance_is_verified_once_in_the_life_of_its_engine() -> None:
    def times(seen: Observed) -> dict[str, float | None]:
        return {name: i.status.kv_verified_at for name, i in of(plan_service(seen), PDInstance).items()}

    first = told(GOOD, now_s=NOW_S + 0.7)
    at_s = {"chat-0": NOW_S, "chat-1": None, "chat-2": NOW_S, "chat-3": None}
    assert times(first) == at_s
    later = replace(first, now_s=NOW_S + 3600, instances=tuple(of(plan_service(first), PDInstance).values()))
    assert times(later) == at_s
    assert times(replace(later, router=None)) == at_s
    engine = later.engines["chat-0"]
    again = replace(later, engines={**later.engines, "chat-0": replace(engine, restarts=engine.restarts + 1)})
    assert times(replace(again, router=None)) == at_s | {"chat-0": None}


def test_an_event_names_the_pair_when_hand_offs_turn_bad() -> None:
    bad = told(GOOD, pair("chat-1", "chat-2", "HandshakeFailed"))
    plan = plan_service(bad)
    events = [e for e in events_of(bad, plan, {}) if e.reason.startswith("KV")]
    assert [(e.reason, e.type, e.message) for e in events] == [
        ("KVTransferNotVerified", "Warning", "chat-1 → chat-2: HandshakeFailed")
    ]
    after = replace(bad, service=of(plan, PDService)["chat"])
    assert [e for e in events_of(after, plan_service(after), {}) if e.reason.startswith("KV")] == []
