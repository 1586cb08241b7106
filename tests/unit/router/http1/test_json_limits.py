"""Limits on the structure of a client's JSON, and the time that checking them takes."""

import time

import orjson
import pytest

from fulcrum_router.http1 import json_limits
from fulcrum_router.http1.bodies import build_prefill_body, parse_request_body
from fulcrum_router.http1.json_limits import MAX_DEPTH, InvalidBody, parse_limited_object


def nest(levels: int) -> bytes:
    """An object whose arrays make `levels` levels with it."""
    return b'{"prompt":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def test_a_body_of_the_greatest_depth_passes_and_can_be_sent_to_engines() -> None:
    fields = orjson.loads(nest(MAX_DEPTH))
    assert parse_limited_object(nest(MAX_DEPTH)) == fields
    assert (
        orjson.loads(build_prefill_body(parse_request_body(nest(MAX_DEPTH), 0)))["prompt"] == fields["prompt"]
    )


@pytest.mark.parametrize(
    "body",
    [
        nest(MAX_DEPTH + 1),
        nest(1_000),
        nest(100_000),
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b'{"prompt":"x","tools":[' + b'{"a":[' * 200 + b"]}" * 200 + b"]}",
    ],
    ids=["one level too deep", "1,000 levels", "100,000 levels", "objects", "objects and arrays"],
)
def test_a_body_that_is_nested_too_deep_is_rejected_within_a_millisecond(body: bytes) -> None:
    took_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        with pytest.raises(InvalidBody):
            parse_request_body(body, 0)
        took_s.append(time.perf_counter() - began_s)
    assert min(took_s) < 0.001


def test_brackets_within_texts_are_not_counted() -> None:
    body = orjson.dumps({"prompt": "[{" * json_limits.MAX_CONTAINERS})
    assert parse_limited_object(body)["prompt"].startswith("[{[{")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a":[' + b"[]," * json_limits.MAX_CONTAINERS + b"1]}", "arrays and objects"),
        (b'{"a":[' + b"1," * json_limits.MAX_VALUES + b"1]}", "values"),
        (b'{"a":{' + b'"":1,' * json_limits.MAX_NAMES + b'"b":1}}', "names"),
    ],
    ids=["containers", "values", "names"],
)
def test_a_body_with_too_many_parts_is_rejected(body: bytes, message: str) -> None:
    with pytest.raises(InvalidBody, match=message):
        parse_limited_object(body)


def test_the_token_ids_of_a_very_long_prompt_pass() -> None:
    body = orjson.dumps({"prompt": list(range(1_000_000))})
    assert parse_request_body(body, 0).prompt_id_count == 1_000_000
