"""The time of a request is divided over its parts, and the part by which it missed is named."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.values import Slo
from fulcrum_router.policy.predictions.latency_parts import (
    PARTS,
    LatencyPart,
    RequestTimes,
    WaitCauses,
    find_cause_of_miss,
)

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
ARRIVAL_S = 100.0


def name_parts(parts: tuple[float, ...]) -> dict[str, float]:
    return {part: round(seconds, 6) for part, seconds in zip(PARTS, parts, strict=True) if seconds}


def disaggregated() -> RequestTimes:
    times = RequestTimes(ARRIVAL_S)
    times.send_prefill(100.5)
    times.end_prefill(101.5, responded=True, compute_s=0.25)
    times.send_decode(101.5, transfer_s=0.125, local_compute_s=None)
    return times


def test_a_stream_with_a_kv_transfer_is_divided_over_all_its_parts() -> None:
    parts = disaggregated().divide(105.0, first_byte_s=102.0, unread_s=1.0)
    assert name_parts(parts) == {
        "waiting": 0.5,
        "prefill_queue": 0.75,
        "prefill": 0.25,
        "transfer": 0.125,
        "decode_queue": 0.375,
        "decode": 2.0,
        "slow_client": 1.0,
    }


def test_while_decode_fetches_kv_the_rest_of_the_leg_is_transfer() -> None:
    times = disaggregated()
    times.fetching_share = 0.75
    parts = name_parts(times.divide(105.0, first_byte_s=102.0))
    assert (parts["transfer"], parts["decode_queue"]) == (0.125 + 0.75 * 0.375, 0.25 * 0.375)


def test_a_refused_request_spends_its_time_in_admission() -> None:
    parts = RequestTimes(ARRIVAL_S).divide(101.0, first_byte_s=None, refused=True)
    assert name_parts(parts) == {"admission": 1.0}


def test_the_causes_of_waiting_are_forgotten_within_seconds() -> None:
    causes, shares = WaitCauses(), list[float]()
    for fetching, queued in [(0, 0), (3, 1), (0, 0), (0, 3), (0, 0), *[(0, 0)] * 8]:
        causes.record(fetching=fetching, queued=queued)
        shares.append(round(causes.fetching_share, 2))
    assert shares[:5] == [0.0, 0.75, 0.75, 0.19, 0.19]
    assert shares[-1] == 0.0


def test_in_a_whole_response_the_rest_of_the_decode_leg_is_decode() -> None:
    parts = disaggregated().divide(105.0, first_byte_s=105.0, streamed=False)
    assert name_parts(parts) == {
        "waiting": 0.5,
        "prefill_queue": 0.75,
        "prefill": 0.25,
        "transfer": 0.125,
        "decode": 3.375,
    }


def test_a_prompt_that_decode_computes_is_prefill() -> None:
    times = RequestTimes(ARRIVAL_S)
    times.send_decode(100.25, transfer_s=0.0, local_compute_s=0.5)
    parts = times.divide(102.0, first_byte_s=101.0)
    assert name_parts(parts) == {"waiting": 0.25, "prefill_queue": 0.25, "prefill": 0.5, "decode": 1.0}


def test_legs_that_failed_are_retries() -> None:
    times = RequestTimes(ARRIVAL_S)
    times.send_prefill(100.25)
    times.end_prefill(101.0, responded=False, compute_s=0.75)
    times.send_prefill(101.25)
    times.end_prefill(101.5, responded=True, compute_s=None)
    times.send_decode(101.5, transfer_s=0.0, local_compute_s=None)
    times.send_decode(102.0, transfer_s=0.0, local_compute_s=None)
    parts = times.divide(103.0, first_byte_s=102.5)
    assert name_parts(parts) == {
        "waiting": 0.25,
        "retries": 1.5,
        "prefill": 0.25,
        "decode_queue": 0.5,
        "decode": 0.5,
    }


@pytest.mark.parametrize(
    ("sent_s", "expected"),
    [
        pytest.param(None, {"waiting": 3.0}, id="in the waiting room"),
        pytest.param(101.0, {"waiting": 1.0, "prefill": 2.0}, id="during the prefill leg"),
    ],
)
def test_a_request_that_ends_early_is_divided_up_to_there(
    sent_s: float | None, expected: dict[str, float]
) -> None:
    times = RequestTimes(ARRIVAL_S)
    if sent_s is not None:
        times.send_prefill(sent_s)
    assert name_parts(times.divide(103.0, first_byte_s=None)) == expected


# Events: a prefill leg that gets its response, fails, or is in flight; a decode leg; a local prefill.
seconds = st.floats(min_value=0.0, max_value=1e4)


@given(
    st.lists(st.tuples(st.sampled_from("pfrdl"), seconds, st.none() | seconds), max_size=8),
    seconds,
    st.none() | seconds,
    seconds,
    st.booleans(),
)
def test_parts_are_never_negative_and_sum_to_the_whole(
    events: list[tuple[str, float, float | None]],
    tail_s: float,
    after_first_byte_s: float | None,
    unread_s: float,
    streamed: bool,
) -> None:
    times, now_s, first_byte_s = RequestTimes(ARRIVAL_S), ARRIVAL_S, None
    for event, gap_s, some_s in events:
        now_s += gap_s
        if event in "fr":
            times.send_prefill(now_s)
            now_s += gap_s
            times.end_prefill(now_s, responded=event == "r", compute_s=some_s)
        elif event == "p":
            times.send_prefill(now_s)
        else:
            times.send_decode(
                now_s, transfer_s=some_s or 0.0, local_compute_s=None if event == "d" else gap_s
            )
    now_s += tail_s
    if after_first_byte_s is not None:
        first_byte_s, now_s = now_s, now_s + after_first_byte_s
    parts = times.divide(now_s, first_byte_s=first_byte_s, unread_s=unread_s, streamed=streamed)
    whole_s = now_s - ARRIVAL_S
    assert (min(parts) >= 0.0, math.isclose(sum(parts), whole_s, abs_tol=1e-6)) == (True, True)


@pytest.mark.parametrize(
    ("parts", "tokens", "cause"),
    [
        pytest.param(
            {"waiting": 0.9, "prefill": 0.8}, 11, LatencyPart.WAITING, id="late before its first token"
        ),
        pytest.param(
            {"prefill_queue": 2.0, "decode": 1.5}, 11, LatencyPart.PREFILL_QUEUE, id="later at first"
        ),
        pytest.param(
            {"prefill_queue": 2.0, "decode": 5.0}, 11, LatencyPart.DECODE, id="slower still in decode"
        ),
        pytest.param({"transfer": 0.5, "decode": 1.5}, 11, LatencyPart.DECODE, id="late in decode alone"),
        pytest.param({"retries": 3.0}, None, LatencyPart.RETRIES, id="failed"),
        pytest.param({"prefill": 0.1, "decode": 3.0}, None, LatencyPart.DECODE, id="broke in its stream"),
    ],
)
def test_the_part_that_exceeds_its_objective_most_caused_the_miss(
    parts: dict[str, float], tokens: int | None, cause: LatencyPart
) -> None:
    all_parts = tuple(parts.get(part, 0.0) for part in PARTS)
    assert find_cause_of_miss(all_parts, SLO, tokens=tokens) is cause
