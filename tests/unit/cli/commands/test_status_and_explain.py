"""The lines that `fulcrum explain` and `fulcrum status` print, from objects and decisions of a test."""

import re
import time
from dataclasses import replace

import pytest

from fulcrum_cli.commands.explain import decisions_from_assignment, first_roles, format_decisions
from fulcrum_cli.commands.status import detail_lines, instance_table, service_table, tenant_table, tier_table
from fulcrum_cli.target.snapshot import ServiceSnapshot, attainment_percent
from fulcrum_core.api.meta import ObjectMeta
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance, PDInstanceStatus
from fulcrum_core.api.pdservice import PDService, PDServiceStatus, TierStatus
from fulcrum_core.router_state import RouterState, TenantState, TierState
from fulcrum_core.values import Actor, Phase, Role
from tests.objects import make_object
from tests.unit.core.router_states import router_state

LOAD = {"low": 0.12, "high": 0.12, "instances": 4, "unknown": 0}
FLIP = {
    "at_s": 1_700_000_000.25,
    "action": "flip",
    "trigger": "tick",
    "reason": "decode load 1.04 has reached 0.90, for 2 ticks",
    "instance": "chat-3",
    "to": "Decode",
    "loads": {"prefill": LOAD, "decode": {**LOAD, "low": 0.9, "high": 1.1, "unknown": 1}},
    "consecutive_ticks": 2,
    "split": "5:3",
    "generation": 7,
    "rejected": [{"instance": "chat-1", "reason": "pinned"}],
}


def test_a_decision_is_printed_with_its_loads_and_rejected_instances() -> None:
    clock = time.strftime("%H:%M:%S", time.localtime(1_700_000_000))
    assert format_decisions([FLIP], limit=1) == [
        f"{clock}.2  flip    chat-3 → Decode: decode load 1.04 has reached 0.90, for 2 ticks"
        "  [prefill load 0.12, decode load 0.90 to 1.10, P:D 5:3, 2 ticks in a row, tick]",
        "                          not chat-1: pinned",
    ]


HELD = {
    **FLIP,
    "action": "hold",
    "instance": None,
    "to": None,
    "loads": None,
    "consecutive_ticks": 0,
    "rejected": [],
}


def test_a_held_decision_names_no_instance() -> None:
    assert format_decisions([HELD], limit=1)[0].split("  ", 1)[1] == (
        "hold    decode load 1.04 has reached 0.90, for 2 ticks  [P:D 5:3, tick]"
    )


def test_explain_prints_that_there_is_no_decision_yet() -> None:
    assert format_decisions([], limit=20) == ["no decision yet"]


def test_consecutive_holds_count_as_one_decision() -> None:
    clock = time.strftime("%H:%M:%S", time.localtime(1_700_000_000))
    later = {**HELD, "at_s": 1_700_000_000.75}
    held, flip, _ = format_decisions([HELD, FLIP, HELD, HELD, later], limit=2)
    assert flip == format_decisions([FLIP], limit=1)[0]
    assert held == f"{format_decisions([later], limit=1)[0]}  (3 × since {clock}.2)"


def test_explain_lists_decisions_of_person_operator_and_autoscaler() -> None:
    since = 1_700_000_000.25
    entries = {
        "chat-0": RoleAssignment(role=Role.PREFILL, since=since - 60, by=Actor.OPERATOR, reason="new"),
        "chat-1": RoleAssignment(role=Role.PREFILL, since=since - 60, by=Actor.OPERATOR, reason="new"),
        "chat-2": RoleAssignment(role=Role.DECODE, since=since + 60, by=Actor.PERSON, reason="by command"),
        "chat-3": RoleAssignment(role=Role.DECODE, since=since, by=Actor.AUTOSCALER, reason="in the history"),
    }
    spec = PDAssignmentSpec(service="chat", roles=entries)
    given = decisions_from_assignment(PDAssignment(metadata=ObjectMeta(name="chat"), spec=spec), [FLIP])
    lines = format_decisions(sorted([FLIP, *given], key=lambda decision: decision["at_s"]), limit=20)
    assert [line.split("  ", 1)[1] for line in lines if "not chat-1" not in line] == [
        "flip    chat-2 → Decode: by command  [by Person]",
        format_decisions([FLIP], limit=1)[0].split("  ", 1)[1],
        "assign  chat-0, chat-1 → Prefill: new  [by Operator]",
    ]


def flipped_instance(name: str, created_s: float) -> PDInstance:
    meta = ObjectMeta(name=name, creation_timestamp=created_s)
    return instance(phase="Serving").replace(metadata=meta)


@pytest.mark.parametrize(
    ("flips", "expected"),
    [
        pytest.param(2, [("chat-3", "Prefill", "first role")], id="all flips are known"),
        pytest.param(3, [], id="an earlier flip is forgotten"),
    ],
)
def test_explain_names_the_first_role_of_a_flipped_instance(
    flips: int, expected: list[tuple[str, str, str]]
) -> None:
    back = {**FLIP, "at_s": 1_700_000_060.0, "to": "Prefill"}
    spec = PDAssignmentSpec(service="chat", roles={}, flips=flips)
    assignment = PDAssignment(metadata=ObjectMeta(name="chat"), spec=spec)
    instances = [flipped_instance("chat-3", 1_600_000_000.0), flipped_instance("chat-4", 1_600_000_000.0)]
    first = first_roles(assignment, instances, [back, FLIP, HELD])
    assert [(found["instance"], found["to"], found["reason"]) for found in first] == expected


def printed(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines]


def service() -> PDService:
    return make_object(PDService, "chat", {"model": "m"})


NOW_S = 1_700_000_045.0


def instance(
    *, phase: str, profile: str = "laptop", engine: str = "Simulated", message: str = "", reason: str = ""
) -> PDInstance:
    """An instance that entered its phase 45 s before `NOW_S`."""
    launched = {"type": engine, "profile": profile}
    spec = {"service": "chat", "pool": "flex", "model": "m", "engine": launched}
    made = make_object(PDInstance, "chat-0", spec)
    status = PDInstanceStatus(phase=Phase(phase), phase_since=NOW_S - 45, message=message, reason=reason)
    return made.model_copy(update={"status": status})


def state(*tiers: TierState) -> RouterState:
    return router_state(tiers=tiers)


def tier(offered: int, met: int, *, in_flight: int = 0, cancelled: int = 0, left_late: int = 0) -> TierState:
    return TierState(
        name="t",
        offered=offered,
        ok=met,
        failed=offered - met - in_flight - cancelled - left_late,
        broken=0,
        cancelled=cancelled,
        left_late=left_late,
        slo_met=met,
    )


def test_status_prints_a_service_with_the_columns_of_kubectl_get_pds() -> None:
    snapshot = ServiceSnapshot(service=service(), instances=(), assignment=None)
    head, line = printed(service_table(snapshot, now_s=0.0))
    assert head == ["NAME", "MODEL", "ENGINE", "READY", "P", "D", "RATIO", "KV", "SLO", "FLIPS", "AGE"]
    assert line == ["chat", "m", "vLLM", "–", "0", "0", "–", "–", "–", "0", "–"]


def test_tiers_are_shown_with_their_refusals_waits_and_reserves() -> None:
    free = tier(30, 18).model_copy(
        update={
            "failed": 0,
            "refused": 12,
            "queued": 3,
            "refusals": {"prefill_full": 12},
            "advised_refusals": {"decode_full": 2},
            "wait_mean_s": 0.25,
            "reserve_lent": 0.15,
        }
    )
    snapshot = ServiceSnapshot(service=service(), instances=(), assignment=None, state=state(free))
    head, line = tier_table(snapshot)
    assert head.split() == [
        "TIER",
        "OFFERED",
        "OK",
        "QUEUED",
        "DEGRADED",
        "REFUSED",
        "SLO",
        "WAIT",
        "RESERVE",
        "REASONS",
    ]
    assert line.split(maxsplit=11) == [
        "t",
        "30",
        "18",
        "3",
        "0",
        "12",
        "60.0",
        "250",
        "ms",
        "15%,",
        "lent",
        "prefill_full 12, decode_full 2 (not enforced)",
    ]


def test_in_a_cluster_tiers_are_shown_by_the_status() -> None:
    status = PDServiceStatus(tiers=(TierStatus(name="free", attainment="93.0"),))
    found = service().replace(status=status)
    snapshot = ServiceSnapshot(service=found, instances=(), assignment=None)
    assert tier_table(snapshot)[1].split() == ["free", *"–––––", "93.0", *"–––"]


def test_the_largest_tenants_and_the_rest_are_shown() -> None:
    tenants = (
        TenantState(name="acme", met=90, missed=1, refused=0, limited=2),
        TenantState(name="(others)", met=5, missed=0, refused=40, limited=0),
    )
    shown = ServiceSnapshot(
        service=service(), instances=(), assignment=None, state=router_state(tenants=tenants)
    )
    assert [line.split() for line in tenant_table(shown)] == [
        [],
        ["TENANT", "MET", "MISSED", "REFUSED", "LIMITED"],
        ["acme", "90", "1", "0", "2"],
        ["(others)", "5", "0", "40", "0"],
    ]
    assert tenant_table(replace(shown, state=state())) == []


def test_in_a_cluster_attainment_comes_from_the_status() -> None:
    status = PDServiceStatus(attainment="98.7")
    snapshot = ServiceSnapshot(service=service().replace(status=status), instances=(), assignment=None)
    _, line = printed(service_table(snapshot, now_s=0.0))
    assert (line[8], snapshot.dump()["attainment"]) == ("98.7", 98.7)


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        pytest.param(None, None, id="no router"),
        pytest.param(state(), None, id="no tier"),
        pytest.param(state(tier(0, 0)), None, id="no request yet"),
        pytest.param(state(tier(30, 30), tier(10, 9)), 97.5, id="over all tiers"),
        pytest.param(state(tier(5, 0, in_flight=5)), None, id="none has ended"),
        pytest.param(state(tier(30, 18, in_flight=8, cancelled=2)), 90.0, id="some are in flight"),
        pytest.param(state(tier(20, 18, left_late=1)), 90.0, id="a client that left late is a miss"),
        pytest.param(state(tier(1, 0)), None, id="one request is too few"),
        pytest.param(state(tier(19, 19)), None, id="19 requests are too few"),
    ],
)
def test_attainment_counts_ended_requests_only(router: RouterState | None, expected: float | None) -> None:
    assert attainment_percent(router) == expected


def test_instances_without_a_router_are_still_listed() -> None:
    lines = instance_table([instance(phase="Serving")], None, None, now_s=NOW_S)
    assert [line.split() for line in lines] == [
        ["INSTANCE", "PHASE", "ROLE", "PREFILL", "DECODE", "TOKENS", "ITL", "KV", "RESTARTS", "BY"],
        ["chat-0", "Serving", *["–"] * 6, "0", "–"],
    ]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        pytest.param({"profile": "l70-h100-tp4"}, "Starting 45 of 180 s", id="expected time by the profile"),
        pytest.param({"profile": "elsewhere/e.yaml"}, "Starting 45 s", id="a profile in another folder"),
        pytest.param({"engine": "vLLM"}, "Starting 45 s", id="a real engine"),
        pytest.param(
            {"message": "its engine is starting"}, "Starting 45 s", id="a profile without start-up time"
        ),
        pytest.param(
            {"reason": "ImagePullFailed"}, "Starting 45 s: ImagePullFailed", id="the image cannot be pulled"
        ),
        pytest.param({"reason": "Unschedulable"}, "Starting 45 s: Unschedulable", id="no node fits"),
    ],
)
def test_a_starting_instance_shows_elapsed_time_or_start_failure(given: dict[str, str], shown: str) -> None:
    line = instance_table([instance(phase="Starting", **given)], None, None, now_s=NOW_S)[1]
    assert re.split(r" {3,}", line)[1] == shown


def test_a_drained_instance_is_shown_as_drained() -> None:
    lines = instance_table([instance(phase="Draining", reason="Drained")], None, None, now_s=NOW_S)
    assert re.split(r" {3,}", lines[1])[1] == "Drained"


@pytest.mark.parametrize(
    ("generation", "observed", "expected"),
    [
        pytest.param(
            1, 0, ["no operator has reconciled this service yet; fulcrum doctor shows why"], id="never"
        ),
        pytest.param(
            3, 2, ["the status is of generation 2, the spec of generation 3"], id="not since the last change"
        ),
        pytest.param(3, 3, [], id="current"),
    ],
)
def test_an_outdated_status_is_pointed_out(generation: int, observed: int, expected: list[str]) -> None:
    made = service()
    meta = made.metadata.model_copy(update={"generation": generation})
    status = made.status.model_copy(update={"observed_generation": observed})
    snapshot = ServiceSnapshot(
        service=made.replace(metadata=meta, status=status), instances=(), assignment=None
    )
    assert detail_lines(snapshot, now_s=NOW_S) == expected


@pytest.mark.parametrize(
    ("until_s", "by"),
    [
        pytest.param(NOW_S + 90, "Person, pinned for 1m30s", id="still pinned"),
        pytest.param(NOW_S - 1, "Person", id="pinned until a moment ago"),
        pytest.param(None, "Person", id="never pinned"),
    ],
)
def test_an_expired_pin_is_not_shown(until_s: float | None, by: str) -> None:
    entry = RoleAssignment(role=Role.PREFILL, since=NOW_S - 60, by=Actor.PERSON, pinned_until=until_s)
    meta = ObjectMeta(name="chat")
    assignment = PDAssignment(metadata=meta, spec=PDAssignmentSpec(service="chat", roles={"chat-0": entry}))
    line = instance_table([instance(phase="Serving")], assignment, None, now_s=NOW_S)[1]
    assert re.split(r" {3,}", line)[-1] == by
