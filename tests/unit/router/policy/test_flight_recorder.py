"""The flight recorder: bounded, in order, an hour at most."""

import math
from typing import Any

import pytest

from fulcrum_router.policy.flight_recorder import KEPT_S, RECORD_BYTES, FlightRecorder, RequestRecord

NOW_S = 1_800_000_000.0


def record(recorder: FlightRecorder, number: int, **changes: Any) -> None:
    """Record a request with `number` prompt tokens."""
    values: dict[str, Any] = {
        "arrival_s": NOW_S,
        "prompt_tokens": number,
        "output_tokens": 7,
        "ttft_s": 0.5,
        "duration_s": 2.0,
        "tier": "premium",
        "outcome": 3,
        "tenant": "acme",
    }
    recorder.add(**values | changes)


def read(recorder: FlightRecorder, slice_records: int = 100) -> list[RequestRecord]:
    return [record for records in recorder.read(NOW_S, slice_records=slice_records) for record in records]


def prompts(recorder: FlightRecorder) -> list[int]:
    return [each.prompt_tokens for each in read(recorder)]


def test_a_request_is_read_as_it_was_recorded() -> None:
    recorder = FlightRecorder()
    record(recorder, 100)
    (found,) = read(recorder)
    tenant = hash("acme") & 0xFFFF
    assert (found, recorder.tiers) == (RequestRecord(NOW_S, 100, 7, 0.5, 2.0, 0, 3, tenant), ["premium"])


def test_a_record_takes_at_most_64_bytes() -> None:
    assert RECORD_BYTES <= 64


def test_the_oldest_requests_are_overwritten() -> None:
    recorder = FlightRecorder(capacity=3)
    for number in range(5):
        record(recorder, number)
    assert prompts(recorder) == [2, 3, 4]


def test_requests_of_more_than_an_hour_ago_are_left_out() -> None:
    recorder = FlightRecorder()
    record(recorder, 1, arrival_s=NOW_S - KEPT_S - 1)
    record(recorder, 2, arrival_s=NOW_S - KEPT_S)
    assert prompts(recorder) == [2]


def test_requests_without_a_first_byte_have_no_ttft() -> None:
    recorder = FlightRecorder()
    record(recorder, 2**40, ttft_s=None)
    (found,) = read(recorder)
    assert (found.ttft_s, found.prompt_tokens) == (None, 2**32 - 1)


@pytest.mark.parametrize(
    ("tokens", "recorded"),
    [(-1, 0), (1.5, 1), (math.nan, 0), (math.inf, 2**32 - 1), (2**64, 2**32 - 1)],
)
def test_counts_that_no_request_can_have_do_not_stop_the_recording(tokens: float, recorded: int) -> None:
    recorder = FlightRecorder()
    record(recorder, 1, prompt_tokens=tokens, output_tokens=tokens)  # an engine's usage may say anything
    (found,) = read(recorder)
    assert (found.prompt_tokens, found.output_tokens) == (recorded, recorded)


@pytest.mark.parametrize(("tier", "number"), [("tier-0", 0), ("tier-254", 254), ("tier-255", 254)])
def test_more_than_255_tiers_share_a_number(tier: str, number: int) -> None:
    recorder = FlightRecorder(capacity=300)
    for each in range(256):
        record(recorder, each, tier=f"tier-{each}")
    record(recorder, 999, tier=tier)
    assert read(recorder)[-1].tier == number
    assert len(recorder.tiers) == 255


def test_old_records_are_skipped_in_slices() -> None:
    recorder = FlightRecorder(capacity=300)
    for number in range(300):
        record(recorder, number, arrival_s=NOW_S - KEPT_S - 1 if number < 250 else NOW_S)
    slices = list(recorder.read(NOW_S, slice_records=100))
    assert [len(records) for records in slices] == [0, 0, 50]
