"""KVTransferVerified follows from the router's pair states and is rarely written."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api import PDInstance, PDService, Resource
from fulcrum_core.router_state import PairState
from fulcrum_core.values import Role
from fulcrum_operator.controller.events import Reported, derive_events
from fulcrum_operator.plan import Observed, Plan, plan_service
from tests.unit.operator.builders import NOW_S, router, settled

P, D = Role.PREFILL, Role.DECODE
FOUR = {"chat-0": P, "chat-1": P, "chat-2": D, "chat-3": D}


def objects_of_kind(plan: Plan, kind: type[Resource]) -> dict[str, Any]:
    return {obj.metadata.name: obj for obj in plan.objects if isinstance(obj, kind)}


def pair(prefill: str, decode: str, reason: str = "Verified", **counts: int) -> PairState:
    figures = {"verified": 1, "recomputed": 0, "unknown": 0, **counts}
    return PairState(
        prefill=prefill,
        decode=decode,
        verified_age_s=1.0,
        handshake_s=0.2,
        transfer_s_per_1k_tokens=None,
        last_reason=reason,
        **figures,
    )


def with_pairs(*pairs: PairState, **fields: Any) -> Observed:
    observed = settled(FOUR, **fields)
    return replace(observed, router=router().model_copy(update={"pairs": pairs}))


def verdict(observed: Observed) -> tuple[str, str, str]:
    conditions = objects_of_kind(plan_service(observed), PDService)["chat"].status.conditions
    found = next(c for c in conditions if c.type == "KVTransferVerified")
    return found.status, found.reason, found.message


VERIFIED_PAIR = pair("chat-0", "chat-2")


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        pytest.param(
            settled({"chat-0": D}),
            ("Unknown", "NotApplicable", "one instance transfers no KV"),
            id="a single instance",
        ),
        pytest.param(
            with_pairs(), ("Unknown", "NoTrafficYet", "no KV transfer was observed yet"), id="no pair yet"
        ),
        pytest.param(
            with_pairs(pair("chat-0", "chat-2", "NoTrafficYet")),
            ("Unknown", "NoTrafficYet", "no KV transfer was observed yet"),
            id="a pair without a result",
        ),
        pytest.param(
            with_pairs(pair("chat-0", "chat-2", "NotReported")),
            (
                "Unknown",
                "NotReported",
                "chat-0 → chat-2: the decode engine does not report computed prompt tokens: "
                "start it with --enable-prompt-tokens-details",
            ),
            id="engines that do not report computed tokens",
        ),
        pytest.param(
            with_pairs(VERIFIED_PAIR, pair("chat-1", "chat-3", "NoTrafficYet")),
            ("True", "Verified", "KV transfer verified: chat-0 → chat-2"),
            id="one pair verified",
        ),
        pytest.param(
            with_pairs(VERIFIED_PAIR, pair("chat-1", "chat-9", "HandshakeFailed")),
            ("True", "Verified", "KV transfer verified: chat-0 → chat-2"),
            id="pairs with a deleted instance do not count",
        ),
        *(
            pytest.param(
                with_pairs(VERIFIED_PAIR, pair("chat-1", "chat-2", reason)),
                ("False", reason, f"chat-1 → chat-2: {reason}"),
                id=reason,
            )
            for reason in ("HandshakeFailed", "Incompatible", "LeaseExpired", "Recomputed", "SlowTransport")
        ),
        pytest.param(
            with_pairs(*(pair(p, d, "Recomputed") for p in FOUR for d in FOUR if p != d)),
            (
                "False",
                "Recomputed",
                "chat-0 → chat-1: Recomputed, chat-0 → chat-2: Recomputed, chat-0 → chat-3: Recomputed "
                "and 9 more",
            ),
            id="many pairs",
        ),
        pytest.param(
            with_pairs(pair("chat-3", "chat-2", "Recomputed"), pair("chat-1", "chat-2", "HandshakeFailed")),
            (
                "False",
                "HandshakeFailed",
                "chat-1 → chat-2: HandshakeFailed, chat-3 → chat-2: Recomputed",
            ),
            id="the worst names the condition",
        ),
    ],
)
def test_pair_states_become_one_condition(observed: Observed, expected: tuple[str, str, str]) -> None:
    assert verdict(observed) == expected


def test_incompatible_engines_are_named_with_the_reason() -> None:
    observed = settled({"chat-0": P, "chat-1": D})
    sizes = {"chat-0": 16, "chat-1": 32}
    facts = {
        name: replace(known, identity=known.identity.model_copy(update={"block_size": sizes[name]}))
        for name, known in observed.engine_facts.items()
    }
    apart = tuple(
        i.replace(status=i.status.model_copy(update={"identity": facts[i.metadata.name].identity}))
        for i in observed.instances
    )
    assert verdict(replace(observed, instances=apart, engine_facts=facts)) == (
        "False",
        "Incompatible",
        "chat-0 → chat-1: block size differs: prefill has 16, decode has 32, "
        "chat-1 → chat-0: block size differs: prefill has 32, decode has 16",
    )


def test_condition_is_kept_while_the_router_reports_nothing_new() -> None:
    before = with_pairs(VERIFIED_PAIR)
    status = objects_of_kind(plan_service(before), PDService)["chat"].status
    kept = before.service.replace(status=status)
    assert verdict(replace(before, service=kept, router=None)) == verdict(before)
    fresh_router = router()  # a standby took over and has seen nothing
    assert verdict(replace(before, service=kept, router=fresh_router)) == verdict(before)


def test_new_counts_do_not_change_the_message() -> None:
    assert verdict(with_pairs(VERIFIED_PAIR)) == verdict(
        with_pairs(pair("chat-0", "chat-2", verified=10**6, recomputed=5))
    )


def test_instance_is_verified_once_for_each_start_of_its_engine() -> None:
    def times(observed: Observed) -> dict[str, float | None]:
        return {
            name: i.status.kv_verified_at
            for name, i in objects_of_kind(plan_service(observed), PDInstance).items()
        }

    first = with_pairs(VERIFIED_PAIR, now_s=NOW_S + 0.7)
    at_s = {"chat-0": NOW_S, "chat-1": None, "chat-2": NOW_S, "chat-3": None}
    assert times(first) == at_s
    later = replace(
        first, now_s=NOW_S + 3600, instances=tuple(objects_of_kind(plan_service(first), PDInstance).values())
    )
    assert times(later) == at_s
    assert times(replace(later, router=None)) == at_s
    engine = later.engines["chat-0"]
    again = replace(later, engines={**later.engines, "chat-0": replace(engine, restarts=engine.restarts + 1)})
    assert times(replace(again, router=None)) == at_s | {"chat-0": None}


def test_event_names_the_pair_when_kv_transfers_fail() -> None:
    with_failing_pair = with_pairs(VERIFIED_PAIR, pair("chat-1", "chat-2", "HandshakeFailed"))
    plan = plan_service(with_failing_pair)
    events = [e for e in derive_events(with_failing_pair, plan, Reported()) if e.reason.startswith("KV")]
    assert [(e.reason, e.type, e.message) for e in events] == [
        ("KVTransferNotVerified", "Warning", "chat-1 → chat-2: HandshakeFailed")
    ]
    after = replace(with_failing_pair, service=objects_of_kind(plan, PDService)["chat"])
    assert [
        e for e in derive_events(after, plan_service(after), Reported()) if e.reason.startswith("KV")
    ] == []
