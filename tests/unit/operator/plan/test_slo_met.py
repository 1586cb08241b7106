"""SLOMet and its figures: what a router's counts come to, and how seldom that changes."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.api import PDService, TierStatus
from fulcrum_core.state import RouterState, TierState
from fulcrum_operator.controller.events import events_of
from fulcrum_operator.controller.reconcile import reconcile
from fulcrum_operator.plan import plan_service
from fulcrum_operator.plan.status.slo_met import (
    FEWEST,
    TELL_S,
    Counts,
    Sample,
    Told,
    Window,
    counted,
    seen_again,
    slo_met,
)
from tests.unit.operator.builders import NOW_S, D, P, router, service, settled
from tests.unit.operator.controller.test_reconcile import KEY, World
from tests.unit.operator.controller.test_reconcile import world as world  # a fixture

LOOK_S = 10.0


def tier(name: str, ended: int, met: int, *, in_flight: int = 0, cancelled: int = 0) -> TierState:
    offered = ended + in_flight + cancelled
    counts = {"offered": offered, "ok": met, "failed": ended - met, "broken": 0, "cancelled": cancelled}
    return TierState(name=name, slo_met=met, **counts)


def says(*tiers: TierState, ledger_s: float = 0.0) -> RouterState:
    return router().model_copy(update={"tiers": tiers, "since_s": ledger_s})


def one(ended: int, met: int, *, ledger_s: float = 0.0) -> RouterState:
    return says(tier("default", ended, met), ledger_s=ledger_s)


def looked(
    states: Iterable[RouterState | None], asked: PDService | None = None, *, apart_s: float = LOOK_S
) -> Window:
    """The window after so many looks."""
    asked, window = asked or service(instances=2), Window()
    for number, state in enumerate(states):
        window = seen_again(window, state, asked, now_s=NOW_S + number * apart_s)
    return window


def told(window: Window) -> tuple[str, str, str, str | None] | None:
    found = window.told
    return None if found is None else (found.status, found.reason, found.message, found.attainment)


def known(status: str) -> PDService:
    """A service of which an earlier operator has said that."""
    before = Told(status=status, reason="Attained", message="as it was", attainment="99.9")  # type: ignore[arg-type]
    made = service(instances=2)
    figures = {"attainment": "99.9", "conditions": (slo_met(made, before),)}
    return made.replace(status=made.status.model_copy(update=figures))


MET = ("True", "Attained", "99.0 % of 200 requests in 5m met TTFT and TPOT; 99 % are asked for", "99.0")


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([], None, id="never looked at"),
        pytest.param([None] * 60, None, id="a router that never answers says nothing"),
        pytest.param([one(0, 0)], ("Unknown", "NoTraffic", "no request ended in 5m", None), id="no request"),
        pytest.param(
            [one(5000, 10)],
            ("Unknown", "NoTraffic", "no request ended in 5m", None),
            id="what came before the first look may be of any age",
        ),
        pytest.param(
            [None, one(1, 1), None, None, one(20, 1)],
            (
                "Unknown",
                "TooFew",
                "19 requests ended in 5m, of fewer than 20 nothing is said",
                None,
            ),
            id="too few",
        ),
        pytest.param([None, one(0, 0), None, None, one(200, 198)], MET, id="just enough"),
        pytest.param(
            [None, one(0, 0), None, None, one(10_000, 9_899)],
            (
                "False",
                "Missed",
                "98.9 % of 10000 requests in 5m met TTFT and TPOT; 99 % are asked for",
                "98.9",
            ),
            id="just not enough is not rounded up",
        ),
        pytest.param(
            [None, one(900, 0), None, None, one(1100, 198)],
            MET,
            id="only what was added counts, not what was",
        ),
        pytest.param(
            [one(900, 0), one(10, 0, ledger_s=1.0), None, None, one(210, 198, ledger_s=1.0)],
            MET,
            id="a router that started anew counts from where it was first seen",
        ),
        pytest.param(
            [one(0, 0), one(900, 0, ledger_s=1.0), None, None, one(1100, 198, ledger_s=1.0)],
            MET,
            id="what a router counted before it stepped in is of any age",
        ),
        pytest.param(
            [None, one(900, 900), None, one(0, 0), one(200, 198)], MET, id="counts that fall begin anew"
        ),
        pytest.param(
            [None, says(), None, None, says(tier("t", 200, 198, in_flight=90, cancelled=50))],
            MET,
            id="neither in flight nor cancelled",
        ),
        pytest.param(
            [one(0, 0), one(200, 0), *[one(400, 198)] * 34],
            ("Unknown", "NoTraffic", "no request ended in 5m", None),
            id="the window moves on",
        ),
    ],
)
def test_counts_come_to(
    states: list[RouterState | None], expected: tuple[str, str, str, str | None] | None
) -> None:
    assert told(looked(states)) == expected


def test_each_tier_is_held_against_the_objective_and_the_figure_is_over_all() -> None:
    window = looked(
        [
            *(says(), None, None),
            says(tier("premium", 100, 80), tier("standard", 900, 900), tier("trial", 5, 0)),
        ]
    )
    assert window.told == Told(
        status="False",
        reason="Missed",
        message="tier premium: 80.0 % of 100 requests, tier standard: 100.0 % of 900 requests in 5m met TTFT "
        "and TPOT; 99 % are asked for",
        attainment="97.5",
        tiers=(
            TierStatus(name="premium", attainment="80.0", offered=100),
            TierStatus(name="standard", attainment="100.0", offered=900),
            TierStatus(name="trial", attainment=None, offered=5),
        ),
    )


def test_the_service_says_what_is_asked_for_and_over_which_time() -> None:
    asked = service(instances=2, slo={"attainment": 90, "window": "1m"})
    window = looked([None, one(0, 0), None, None, one(100, 95)], asked)
    message = "95.0 % of 100 requests in 1m met TTFT and TPOT; 90 % are asked for"
    assert told(window) == ("True", "Attained", message, "95.0")


def test_another_objective_is_held_against_at_once() -> None:
    window = looked([None, one(0, 0), None, None, one(100, 95)])
    now_s = NOW_S + 41.0
    after = seen_again(window, None, service(instances=2, slo={"attainment": 90.0}), now_s=now_s)
    assert [window.told and window.told.status, after.told and after.told.status] == ["False", "True"]


def test_while_the_figure_stays_nothing_is_told_anew() -> None:
    first = looked([one(0, 0), one(200, 198)])
    states = [one(200 * number, 198 * number) for number in range(100)]
    assert (looked(states).told, first.told is None) == (looked(states[:5]).told, False)


def test_a_figure_changes_once_in_half_a_minute_at_most() -> None:
    asked, window, at_s = service(instances=2), Window(), list[float]()
    for second in range(600):
        now_s, ended = NOW_S + second, 100 * second
        after = seen_again(window, one(ended, ended * (600 - second) // 600), asked, now_s=now_s)
        if after.told is not window.told and ended:
            at_s.append(now_s)
        window = after
    gaps = [later - earlier for earlier, later in pairwise(at_s)]
    assert (min(gaps) >= TELL_S, len(gaps) > 10) == (True, True)


def test_a_new_operator_does_not_take_back_what_it_has_not_seen() -> None:
    states, before = [one(100, 100)] * 40, known("True")
    seen = [told(looked(states[:count], before)) for count in (1, 30, 31)]
    assert seen == [None, None, ("Unknown", "NoTraffic", "no request ended in 5m", None)]


def test_a_new_operator_tells_what_it_sees_as_soon_as_that_is_enough() -> None:
    found = looked([one(100, 100), one(120, 100)], known("True")).told
    assert found is not None
    assert (found.status, found.attainment) == ("False", "0.0")


def test_a_verdict_does_not_outlive_a_silent_router() -> None:
    assert [told(looked([None] * count, known("False"))) for count in (30, 31)] == [
        None,
        ("Unknown", "RouterSilent", "no word of the router in 5m", None),
    ]


def test_the_status_shows_what_is_told_and_no_event_tells_of_it() -> None:
    verdict = looked([None, one(0, 0), None, None, one(200, 100)]).told
    assert verdict is not None
    seen = settled({"chat-0": P, "chat-1": D}, slo=verdict)
    plan = plan_service(seen)
    (made,) = (obj for obj in plan.objects if isinstance(obj, PDService))
    found = next((c.status, c.reason) for c in made.status.conditions if c.type == "SLOMet")
    status: Any = made.status
    assert (found, status.attainment, status.tiers, list(events_of(seen, plan, {}))) == (
        ("False", "Missed"),
        "50.0",
        (TierStatus(name="default", attainment="50.0", offered=200),),
        [],
    )


COUNTS = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (max(pair), min(pair)))


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("ab"), COUNTS), st.integers(0, 3)), max_size=12))
def test_no_more_is_counted_than_was_added_whatever_starts_anew(
    looks: list[tuple[Mapping[str, tuple[int, int]], int]],
) -> None:
    """Counts of one ledger grow; `met` is never above `ended`."""
    samples, total, ledger = list[Sample](), dict[str, tuple[int, int]](), 0
    added = 0
    for number, (more, restart) in enumerate(looks):
        if restart == 3:
            ledger, total = ledger + 1, {}
        for name, (ended, met) in more.items():
            old = total.get(name, (0, 0))
            total[name] = (old[0] + ended, old[1] + met)
            added += ended
        tiers = {name: Counts(*counts) for name, counts in total.items()}
        samples.append(Sample(float(number), float(ledger), tiers))
    found = counted(samples)
    assert all(0 <= counts.met <= counts.ended for counts in found.values())
    assert sum(counts.ended for counts in found.values()) <= added


async def test_a_steady_load_is_written_once(world: World) -> None:
    await world.up(instances=2)
    versions = set()
    for look in range(1, 361):
        world.clock.at_s += LOOK_S
        world.router.says = one(FEWEST * look, FEWEST * look)
        await reconcile(KEY, world.cluster)
        if look > 1:
            versions.add(await world.version())
    status = (await world.service()).status
    assert (status.attainment, len(versions)) == ("100.0", 1)


async def test_a_load_that_ends_is_told_and_then_nothing_more(world: World) -> None:
    await world.up(instances=2)
    shown = list[tuple[str | None, str]]()
    for counts in (one(0, 0), one(100, 99), *[one(100, 99)] * 360):
        world.clock.at_s += LOOK_S
        world.router.says = counts
        await world.passes()
        status = (await world.service()).status
        now = (status.attainment, next(c.reason for c in status.conditions if c.type == "SLOMet"))
        shown += [now] if now not in shown[-1:] else []
    before = await world.version()
    world.clock.at_s += 3600
    await world.passes()
    assert (shown, await world.version()) == (
        [(None, "NoTraffic"), ("99.0", "Attained"), (None, "NoTraffic")],
        before,
    )
