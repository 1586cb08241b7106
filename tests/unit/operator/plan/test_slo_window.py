"""The SLO window turns the router's counters into a report, and the report rarely changes."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.api import PDService, TierStatus
from fulcrum_core.router_state import RouterState, TierState
from fulcrum_operator.controller.events import Reported, derive_events
from fulcrum_operator.controller.reconcile import reconcile
from fulcrum_operator.plan import plan_service
from fulcrum_operator.plan.slo_window import (
    MIN_REQUESTS,
    REPORT_INTERVAL_S,
    SloCounts,
    SloReport,
    SloSample,
    SloWindow,
    count_added,
    update_window,
)
from fulcrum_operator.plan.status.slo_met import slo_met_condition
from tests.unit.operator.builders import NOW_S, D, P, router, service, settled
from tests.unit.operator.controller.test_reconcile import KEY, ServiceUnderTest
from tests.unit.operator.controller.test_reconcile import under_test as under_test  # a fixture

POLL_S = 10.0


def tier(
    name: str, ended: int, met: int, *, in_flight: int = 0, cancelled: int = 0, left_late: int = 0
) -> TierState:
    offered = ended + in_flight + cancelled
    counts = {"offered": offered, "ok": met, "failed": ended - met - left_late, "broken": 0}
    return TierState(name=name, slo_met=met, cancelled=cancelled, left_late=left_late, **counts)


def router_counts(*tiers: TierState, router_since_s: float = 0.0) -> RouterState:
    return router().model_copy(update={"tiers": tiers, "ledger_since_s": router_since_s})


def default_tier_counts(ended: int, met: int, *, router_since_s: float = 0.0) -> RouterState:
    return router_counts(tier("default", ended, met), router_since_s=router_since_s)


def window_after(
    states: Iterable[RouterState | None], chat: PDService | None = None, *, interval_s: float = POLL_S
) -> SloWindow:
    """The window after one reconcile for each of these router states."""
    chat, window = chat or service(instances=2), SloWindow()
    for number, state in enumerate(states):
        window = update_window(window, state, chat, now_s=NOW_S + number * interval_s)
    return window


def report_values(window: SloWindow) -> tuple[str, str, str, str | None] | None:
    found = window.report
    return None if found is None else (found.status, found.reason, found.message, found.attainment)


def service_with_verdict(status: str) -> PDService:
    """A service whose status has the verdict of an earlier operator process."""
    before = SloReport(status=status, reason="Attained", message="as it was", attainment="99.9")  # type: ignore[arg-type]
    made = service(instances=2)
    figures = {"attainment": "99.9", "conditions": (slo_met_condition(made, before),)}
    return made.replace(status=made.status.model_copy(update=figures))


MET = ("True", "Attained", "99.0 % of 200 requests in 5m met TTFT and TPOT; 99 % are required", "99.0")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([], None, id="no router was queried"),
        pytest.param([None] * 60, None, id="a router that never responds gives no report"),
        pytest.param(
            [default_tier_counts(0, 0)],
            ("Unknown", "NoTraffic", "no request ended in 5m", None),
            id="no request",
        ),
        pytest.param(
            [default_tier_counts(5000, 10)],
            ("Unknown", "NoTraffic", "no request ended in 5m", None),
            id="requests before the first sample are of unknown age",
        ),
        pytest.param(
            [None, default_tier_counts(1, 1), None, None, default_tier_counts(20, 1)],
            (
                "Unknown",
                "TooFewRequests",
                "19 requests ended in 5m, too few for a figure: at least 20 are needed",
                None,
            ),
            id="too few",
        ),
        pytest.param(
            [None, default_tier_counts(0, 0), None, None, default_tier_counts(200, 198)],
            MET,
            id="just enough",
        ),
        pytest.param(
            [None, default_tier_counts(0, 0), None, None, default_tier_counts(10_000, 9_899)],
            (
                "False",
                "Missed",
                "98.9 % of 10000 requests in 5m met TTFT and TPOT; 99 % are required",
                "98.9",
            ),
            id="just not enough is not rounded up",
        ),
        pytest.param(
            [None, default_tier_counts(900, 0), None, None, default_tier_counts(1100, 198)],
            MET,
            id="only requests since the first sample count",
        ),
        pytest.param(
            [
                default_tier_counts(900, 0),
                default_tier_counts(10, 0, router_since_s=1.0),
                None,
                None,
                default_tier_counts(210, 198, router_since_s=1.0),
            ],
            MET,
            id="a restarted router counts from its first sample",
        ),
        pytest.param(
            [
                default_tier_counts(0, 0),
                default_tier_counts(900, 0, router_since_s=1.0),
                None,
                None,
                default_tier_counts(1100, 198, router_since_s=1.0),
            ],
            MET,
            id="requests before the first sample of a new active router are of unknown age",
        ),
        pytest.param(
            [
                None,
                default_tier_counts(900, 900),
                None,
                default_tier_counts(0, 0),
                default_tier_counts(200, 198),
            ],
            MET,
            id="an interval in which counts decrease is skipped",
        ),
        pytest.param(
            [
                None,
                router_counts(),
                None,
                None,
                router_counts(tier("t", 200, 198, in_flight=90, cancelled=50)),
            ],
            MET,
            id="requests in flight and cancelled ones do not count",
        ),
        pytest.param(
            [None, router_counts(), None, None, router_counts(tier("t", 200, 198, left_late=2))],
            MET,
            id="requests whose clients left late have missed",
        ),
        pytest.param(
            [default_tier_counts(0, 0), default_tier_counts(200, 0), *[default_tier_counts(400, 198)] * 34],
            ("Unknown", "NoTraffic", "no request ended in 5m", None),
            id="the window moves on",
        ),
    ],
)
def test_router_counts_become_the_slo_report(
    states: list[RouterState | None], expected: tuple[str, str, str, str | None] | None
) -> None:
    assert report_values(window_after(states)) == expected


def test_each_tier_is_compared_with_the_objective_and_attainment_is_over_all() -> None:
    window = window_after(
        [
            *(router_counts(), None, None),
            router_counts(tier("premium", 100, 80), tier("standard", 900, 900), tier("trial", 5, 0)),
        ]
    )
    assert window.report == SloReport(
        status="False",
        reason="Missed",
        message="tier premium: 80.0 % of 100 requests, tier standard: 100.0 % of 900 requests in 5m met TTFT "
        "and TPOT; 99 % are required",
        attainment="97.5",
        tiers=(
            TierStatus(name="premium", attainment="80.0", ended=100),
            TierStatus(name="standard", attainment="100.0", ended=900),
            TierStatus(name="trial", attainment=None, ended=5),
        ),
    )


def test_objective_and_window_come_from_the_service() -> None:
    chat = service(instances=2, slo={"attainment": 90, "window": "1m"})
    window = window_after([None, default_tier_counts(0, 0), None, None, default_tier_counts(100, 95)], chat)
    message = "95.0 % of 100 requests in 1m met TTFT and TPOT; 90 % are required"
    assert report_values(window) == ("True", "Attained", message, "95.0")


def test_changed_objective_is_evaluated_at_once() -> None:
    window = window_after([None, default_tier_counts(0, 0), None, None, default_tier_counts(100, 95)])
    now_s = NOW_S + 41.0
    after = update_window(window, None, service(instances=2, slo={"attainment": 90.0}), now_s=now_s)
    assert [window.report and window.report.status, after.report and after.report.status] == ["False", "True"]


def test_report_is_unchanged_while_the_attainment_is() -> None:
    first = window_after([default_tier_counts(0, 0), default_tier_counts(200, 198)])
    states = [default_tier_counts(200 * number, 198 * number) for number in range(100)]
    assert (window_after(states).report, first.report is None) == (window_after(states[:5]).report, False)


def test_figures_change_at_most_every_thirty_seconds() -> None:
    chat, window, at_s = service(instances=2), SloWindow(), list[float]()
    for second in range(600):
        now_s, ended = NOW_S + second, 100 * second
        after = update_window(
            window, default_tier_counts(ended, ended * (600 - second) // 600), chat, now_s=now_s
        )
        same_reason = after.report and window.report and after.report.reason == window.report.reason
        if after.report is not window.report and same_reason:
            at_s.append(now_s)
        window = after
    gaps = [later - earlier for earlier, later in pairwise(at_s)]
    assert (min(gaps) >= REPORT_INTERVAL_S, len(gaps) > 10) == (True, True)


def test_restarted_operator_keeps_the_earlier_verdict_until_its_window_is_full() -> None:
    states, before = [default_tier_counts(100, 100)] * 40, service_with_verdict("True")
    observed = [report_values(window_after(states[:count], before)) for count in (1, 30, 31)]
    assert observed == [None, None, ("Unknown", "NoTraffic", "no request ended in 5m", None)]


def test_restarted_operator_reports_as_soon_as_it_has_enough_requests() -> None:
    found = window_after(
        [default_tier_counts(100, 100), default_tier_counts(120, 100)], service_with_verdict("True")
    ).report
    assert found is not None
    assert (found.status, found.attainment) == ("False", "0.0")


def test_verdict_becomes_unknown_after_a_window_without_the_router() -> None:
    assert [
        report_values(window_after([None] * count, service_with_verdict("False"))) for count in (30, 31)
    ] == [
        None,
        ("Unknown", "RouterNotReporting", "the router has not reported for 5m", None),
    ]


def test_status_shows_the_slo_report_and_no_event_is_written() -> None:
    verdict = window_after(
        [None, default_tier_counts(0, 0), None, None, default_tier_counts(200, 100)]
    ).report
    assert verdict is not None
    observed = settled({"chat-0": P, "chat-1": D}, slo_report=verdict)
    plan = plan_service(observed)
    (made,) = (obj for obj in plan.objects if isinstance(obj, PDService))
    found = next((c.status, c.reason) for c in made.status.conditions if c.type == "SLOMet")
    status: Any = made.status
    assert (found, status.attainment, status.tiers, list(derive_events(observed, plan, Reported()))) == (
        ("False", "Missed"),
        "50.0",
        (TierStatus(name="default", attainment="50.0", ended=200),),
        [],
    )


COUNTS = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (max(pair), min(pair)))


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("ab"), COUNTS), st.integers(0, 3)), max_size=12))
def test_counted_requests_never_exceed_those_added(
    polls: list[tuple[Mapping[str, tuple[int, int]], int]],
) -> None:
    """Counts of one router process grow; `met` is never above `ended`."""
    samples, total, router_since_s = list[SloSample](), dict[str, tuple[int, int]](), 0
    added = 0
    for number, (more, restart) in enumerate(polls):
        if restart == 3:
            router_since_s, total = router_since_s + 1, {}
        for name, (ended, met) in more.items():
            old = total.get(name, (0, 0))
            total[name] = (old[0] + ended, old[1] + met)
            added += ended
        tiers = {name: SloCounts(*counts) for name, counts in total.items()}
        samples.append(SloSample(float(number), float(router_since_s), tiers))
    found = count_added(samples)
    assert all(0 <= counts.met <= counts.ended for counts in found.values())
    assert sum(counts.ended for counts in found.values()) <= added


async def test_a_steady_load_is_written_once(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=2)
    versions = set()
    for poll in range(1, 91):  # three times slo.window
        under_test.clock.at_s += POLL_S
        under_test.router.state = default_tier_counts(MIN_REQUESTS * poll, MIN_REQUESTS * poll)
        await reconcile(KEY, under_test.context)
        if poll > 1:
            versions.add(await under_test.version())
    status = (await under_test.service()).status
    assert (status.attainment, len(versions)) == ("100.0", 1)


async def test_end_of_load_is_written_once(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=2)
    shown = list[tuple[str | None, str]]()
    for counts in (
        default_tier_counts(0, 0),
        default_tier_counts(100, 99),
        *[default_tier_counts(100, 99)] * 90,
    ):
        under_test.clock.at_s += POLL_S
        under_test.router.state = counts
        await under_test.reconcile_until_stable()
        status = (await under_test.service()).status
        now = (status.attainment, next(c.reason for c in status.conditions if c.type == "SLOMet"))
        shown += [now] if now not in shown[-1:] else []
    before = await under_test.version()
    under_test.clock.at_s += 3600
    await under_test.reconcile_until_stable()
    assert (shown, await under_test.version()) == (
        [(None, "NoTraffic"), ("99.0", "Attained"), (None, "NoTraffic")],
        before,
    )


def test_the_report_names_the_part_by_which_most_requests_missed() -> None:
    def counts(ended: int, **misses: int) -> RouterState:
        missed = tier("default", ended, ended - sum(misses.values()))
        return router_counts(missed.model_copy(update={"misses": misses}))

    window = window_after([counts(100, decode=50), counts(300, decode=60, prefill_queue=30)])
    assert report_values(window) == (
        "False",
        "MissedByPrefillQueue",
        "80.0 % of 200 requests in 5m met TTFT and TPOT; 99 % are required; "
        "30 of 40 recent misses are caused by prefill queue",
        "80.0",
    )


def judge_misses(misses: Iterable[Mapping[str, int]]) -> list[str]:
    """The reason at each sample, five seconds apart, with these misses of 100 requests before it."""
    chat, window, ended, reasons = service(instances=2), SloWindow(), 0, list[str]()
    total = dict.fromkeys(("decode", "transfer"), 0)
    for number, added in enumerate([{}, *misses]):
        ended += 100
        total = {part: count + added.get(part, 0) for part, count in total.items()}
        counts = tier("default", ended, ended - sum(total.values())).model_copy(update={"misses": total})
        window = update_window(window, router_counts(counts), chat, now_s=NOW_S + 5.0 * number)
        reasons.append(window.report.reason if window.report else "")
    return reasons[1:]


def test_another_part_is_named_within_fifteen_seconds() -> None:
    reasons = judge_misses([{"decode": 90}] * 40 + [{"transfer": 90}] * 4)
    assert (reasons[39], reasons[42]) == ("MissedByDecode", "MissedByTransfer")


def test_two_parts_with_as_many_misses_do_not_alternate() -> None:
    reasons = judge_misses([{"decode": 40, "transfer": 50}, {"decode": 50, "transfer": 40}] * 20)
    assert set(reasons[2:]) in ({"MissedByDecode"}, {"MissedByTransfer"})
