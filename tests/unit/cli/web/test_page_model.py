"""What was observed of a service becomes the page's state, and its roles become a log in words."""

from typing import Any

from fulcrum_cli.web.decision_log import DecisionLog, LoggedDecision
from fulcrum_cli.web.page_model import FLOWS_MAX, PageObservation, build_page
from fulcrum_cli.web.reading_window import RecentTraffic
from fulcrum_cli.web.router_reading import InstanceLoad, RouterReading
from fulcrum_core.api import PDAssignment, PDInstance, PDService
from fulcrum_core.values import Phase, Role
from tests.objects import make_object

SINCE = "2026-01-01T00:00:00.000000Z"
SINCE_S = 1767225600.0


def make_instance(name: str, *, phase: str = "Serving", pool: str = "flex", message: str = "") -> PDInstance:
    spec = {"service": "chat", "pool": pool, "model": "m", "engine": {"type": "Simulated"}}
    instance = make_object(PDInstance, name, spec)
    status = instance.status.model_copy(update={"phase": Phase(phase), "message": message})
    return instance.model_copy(update={"status": status})


def make_assignment(roles: dict[str, Any], *, since: str = SINCE, by: str = "Operator") -> PDAssignment:
    entries = {
        name: {"role": role, "since": since, "by": by, "reason": "first split"}
        for name, role in roles.items()
    }
    return make_object(PDAssignment, "chat", {"service": "chat", "roles": entries})


def observe(
    instances: dict[str, PDInstance],
    *,
    assignment: PDAssignment | None = None,
    loads: dict[str, InstanceLoad] | None = None,
    traffic: RecentTraffic | None = None,
) -> dict[str, Any]:
    observation = PageObservation(
        service=make_object(PDService, "chat", {"model": "m", "instances": 2}),
        instances=instances,
        assignment=assignment,
        reading=None if loads is None else RouterReading(0.0, instances=loads),
        traffic=traffic or RecentTraffic(),
        decisions=(),
        source="a test",
    )
    return build_page(observation, now_s=SINCE_S + 8)


def test_a_tile_shows_role_load_and_age() -> None:
    load = InstanceLoad(role=Role.DECODE, serving=True, decode_legs=3, decode_tokens=900, kv_usage=0.25)
    page = observe(
        {"c-1": make_instance("c-1")}, assignment=make_assignment({"c-1": "Decode"}), loads={"c-1": load}
    )
    assert page["tiles"] == [
        {
            "name": "c-1", "pool": "flex", "role": Role.DECODE, "assigned": Role.DECODE, "flipping": False,
            "since_s": 8.0, "pinned": False, "cordoned": False, "phase": Phase.SERVING, "problem": "",
            "serving": True, "queued_s": 0.0, "prefills": 0, "decodes": 3, "tokens": 900, "kv": 0.25,
        }
    ]  # fmt: skip
    assert (page["desired"], page["actual"]) == ((0, 1), (0, 1))


def test_a_flip_is_under_way_until_the_router_dispatches_by_the_new_role() -> None:
    load = InstanceLoad(role=Role.DECODE, serving=True)
    page = observe(
        {"c-1": make_instance("c-1")}, assignment=make_assignment({"c-1": "Prefill"}), loads={"c-1": load}
    )
    (tile,) = page["tiles"]
    assert (tile["role"], tile["assigned"], tile["flipping"]) == (Role.DECODE, Role.PREFILL, True)
    assert (page["desired"], page["actual"]) == ((1, 0), (0, 1))


def test_a_single_instance_that_plays_both_roles_is_not_flipping() -> None:
    load = InstanceLoad(role=Role.BOTH, serving=True)
    page = observe(
        {"c-1": make_instance("c-1")}, assignment=make_assignment({"c-1": "Decode"}), loads={"c-1": load}
    )
    assert page["tiles"][0]["flipping"] is False


def test_tiles_are_sorted_by_pool_and_by_the_number_in_the_name() -> None:
    instances = {
        name: make_instance(name, pool=pool)
        for name, pool in [("c-10", "b"), ("c-2", "b"), ("c-1", "b"), ("c-3", "a")]
    }
    assert [tile["name"] for tile in observe(instances)["tiles"]] == ["c-3", "c-1", "c-2", "c-10"]


def test_a_failed_or_silent_instance_says_what_is_wrong() -> None:
    instances = {
        "c-1": make_instance("c-1", phase="Failed", message="exit code 1"),
        "c-2": make_instance("c-2"),
        "c-3": make_instance("c-3"),
        "c-4": make_instance("c-4", phase="Starting"),
        "c-5": make_instance("c-5", phase="Failed", message="m" * 10_240),
    }
    loads = {"c-2": InstanceLoad(missed_probes=3), "c-3": InstanceLoad(ejected=True)}
    assert [tile["problem"] for tile in observe(instances, loads=loads)["tiles"]] == [
        "exit code 1", "not responding, 3 probes missed", "ejected after failures", "", "m" * 299 + "…",
    ]  # fmt: skip


def test_a_service_of_which_nothing_is_known_yet_has_an_empty_page() -> None:
    page = observe({})
    assert (page["tiles"], page["flows"], page["ttft"], page["attained"], page["waiting"]) == (
        [], [], {"p50_s": None, "p99_s": None}, None, 0,
    )  # fmt: skip


def test_flows_are_the_busiest_pairs_of_known_instances() -> None:
    instances = {f"c-{number}": make_instance(f"c-{number}") for number in range(40)}
    rates = {(f"c-{p}", f"c-{d}"): 1.0 + p for p in range(20) for d in range(20, 40)}
    page = observe(instances, traffic=RecentTraffic(transfer_rps={**rates, ("gone", "c-1"): 0.5}))
    assert len(page["flows"]) == FLOWS_MAX
    assert page["flows"][0] == (19, 20, 20.0)
    assert page["rates"]["transfers"] == sum(rates.values()) + 0.5


def test_roles_that_were_assigned_together_are_one_decision() -> None:
    log = DecisionLog()
    log.record_assignment(make_assignment({f"c-{number}": "Decode" for number in range(5)}))
    log.record_assignment(make_assignment({f"c-{number}": "Decode" for number in range(5)}))
    assert log.list() == [
        LoggedDecision(
            at_s=SINCE_S,
            headline="5 instances → Decode by the operator",
            reason="first split",
            to=Role.DECODE,
        )
    ]


def test_a_flip_is_added_to_the_log_and_refusals_stay_apart() -> None:
    log = DecisionLog()
    log.record_assignment(make_assignment({"c-1": "Decode"}))
    log.record_assignment(
        make_assignment({"c-1": "Prefill"}, since="2026-01-01T00:00:09.000000Z", by="Person")
    )
    log.record_autoscaler(
        [
            {"action": "hold", "at_s": 1.0, "reason": "nothing to do"},
            {"action": "refuse", "to": "Decode", "at_s": 2.0, "reason": "floor"},
            {"action": "refuse", "to": "Decode", "at_s": 3.0, "reason": "cooldown"},
        ]
    )
    assert [(decision.headline, decision.reason) for decision in log.list()] == [
        ("Flip refused", "cooldown"),
        ("c-1 → Decode by the operator", "first split"),
        ("c-1 → Prefill by a person", "first split"),
    ]


def test_the_log_is_bounded() -> None:
    log = DecisionLog()
    for second in range(500):
        role = "Decode" if second % 2 else "Prefill"
        since = f"2026-01-01T00:{second // 60:02}:{second % 60:02}.000000Z"
        log.record_assignment(make_assignment({"c-1": role}, since=since))
    assert len(log.list()) == 60
    assert log.list()[-1].at_s == SINCE_S + 499
