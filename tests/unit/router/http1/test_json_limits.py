"""Limits on the structure of a client's JSON, and the time that checking them takes."""

import gc
import re
import time

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_router.http1 import json_limits
from fulcrum_router.http1.bodies import build_prefill_body, parse_request_body
from fulcrum_router.http1.json_limits import (
    MAX_DEPTH,
    InvalidBody,
    count_bytes_outside_texts,
    parse_limited_object,
)


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


def test_brackets_within_very_many_texts_are_not_counted() -> None:
    body = orjson.dumps({"a": ["[{"] * (json_limits.MAX_CONTAINERS + 1)})
    assert parse_limited_object(body) == orjson.loads(body)


def test_a_body_with_too_many_arrays_is_rejected_before_it_is_parsed() -> None:
    with pytest.raises(InvalidBody, match="more than 32768 arrays"):
        json_limits.limit_unparsed(b'{"a":["x",' + b"[]," * (json_limits.MAX_CONTAINERS + 9) + b"1]}")


def test_a_body_with_many_arrays_starts_no_collection_of_garbage() -> None:
    body, collected = b'{"a":[' + b"[]," * 30_000 + b"1]}", list[str]()

    def on_collection(phase: str, _info: dict[str, int]) -> None:
        collected.append(phase)

    gc.callbacks.append(on_collection)
    try:
        parsed = json_limits.parse_object(body)
        during = len(collected)
    finally:
        gc.callbacks.remove(on_collection)
    assert (during, len(parsed["a"]), gc.isenabled()) == (0, 30_001, True)


@pytest.mark.parametrize("body", [b"{" + b" " * 20_000, b"[" + b" " * 20_000 + b"]"])
def test_garbage_is_collected_after_a_body_that_is_no_object(body: bytes) -> None:
    with pytest.raises(InvalidBody):
        json_limits.parse_object(body)
    assert gc.isenabled()


def test_a_body_with_too_many_arrays_is_rejected() -> None:
    with pytest.raises(InvalidBody, match="arrays and objects"):
        parse_limited_object(b'{"a":[' + b"[]," * json_limits.MAX_CONTAINERS + b"1]}")


@pytest.mark.parametrize(
    "body",
    [
        orjson.dumps({"prompt": list(range(1_000_000))}),
        orjson.dumps({"prompt": [f"word{n}" for n in range(500_000)]}),
        orjson.dumps({"prompt": "x", "logit_bias": {str(n): 1 for n in range(200_000)}}),
        b'{"a":[' + b'{"a":1},' * 100_000 + b"1]}",
        orjson.dumps({"prompt": '"' * 4_000_000}),
        b'{"a":[' + b"9007199254740993.%b1," % (b"0" * 780) * 10_000 + b"1]}",
        b'{"a":[' + b"9007199254740993.%b1," % (b"0" * 25) * 180_000 + b"1]}",
    ],
    ids=[
        "token ids",
        "texts",
        "names",
        "objects",
        "escaped characters",
        "decimals of 800 digits",
        "decimals of 40 digits",
    ],
)
def test_a_body_whose_parsing_would_stop_the_router_is_rejected_before(body: bytes) -> None:
    with pytest.raises(InvalidBody, match=r"too many (values|long numbers)|escaped characters"):
        parse_limited_object(body)


@pytest.mark.parametrize(
    "prompt",
    [
        list(range(200_000)),
        "x" * 8_000_000,
        "a few words, and more: of them. " * 90_000,
        "12,345,ab\n" * 200_000,
        'if x == "abc":\n    return {"a": [1, 2]}\n' * 40_000,
        '"3.14159 \\" is what he said.\n' * 5_000 + "0123456789" * 700_000,
    ],
    ids=[
        "200,000 token ids",
        "8 MB of text",
        "3 MB of prose",
        "2 MB of numbers",
        "2 MB of code",
        "7 MB of digits",
    ],
)
def test_a_long_prompt_passes(prompt: str | list[int]) -> None:
    assert parse_limited_object(orjson.dumps({"prompt": prompt})) == {"prompt": prompt}


JSON = st.recursive(
    st.none() | st.integers(-(2**60), 2**60) | st.text(st.sampled_from('ab"\\[{,é'), max_size=6),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\')), inner),
)


@given(JSON)
def test_bytes_outside_texts_are_those_left_when_each_text_is_one_quote(value: object) -> None:
    raw = orjson.dumps(value)
    emptied = re.sub(rb'"(?:[^"\\]|\\.)*"', b'"', raw)
    assert count_bytes_outside_texts(raw) == len(emptied)
