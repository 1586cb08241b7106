"""What each leg is sent."""

import json
from typing import Any

import pytest

from fulcrum_router.http1.bodies import (
    BadBody,
    PrefillAnswer,
    decode_body,
    parse_request,
    prefill_body,
    read_prefill_answer,
)

HANDOFF: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5,
}


def test_the_client_s_bytes_reach_decode_as_they_came() -> None:
    raw = b'{ "prompt" : "a", "temperature": 1.0 }\n'
    spliced = decode_body(parse_request(raw, 0), b'{"x":1}')
    assert spliced == b'{ "prompt" : "a", "temperature": 1.0 ,"kv_transfer_params":{"x":1}}'
    assert decode_body(parse_request(raw, 0), None) == raw


def test_an_empty_object_takes_a_hand_off_without_a_comma() -> None:
    assert decode_body(parse_request(b"{}", 0), b"{}") == b'{"kv_transfer_params":{}}'
    assert parse_request(b"{}", -3).raw == b'{"priority":-3}'


@pytest.mark.parametrize(
    "field",
    ["kv_transfer_params", "ec_transfer_params", "priority", "request_id", "kv\\u005ftransfer_params"],
)
def test_a_client_cannot_set_the_router_s_fields(field: str) -> None:
    raw = b'{"prompt":"a","%b":{"remote_host":"evil"}}' % field.encode()
    assert json.loads(parse_request(raw, -7).raw) == {"prompt": "a", "priority": -7}


@pytest.mark.parametrize(
    "raw",
    [b"", b"no", b"[]", b'"text"', b"null", b'{"a":NaN}', b'{"a":1', b"\xff"],
    ids=repr,
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadBody):
        parse_request(raw, 0)


def test_prefill_makes_one_token_and_no_stream() -> None:
    raw = b'{"prompt":"a","max_tokens":50,"min_tokens":9,"stream":true,"stream_options":{},"seed":1}'
    assert json.loads(prefill_body(parse_request(raw, -2))) == {
        "prompt": "a",
        "seed": 1,
        "priority": -2,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


def answer(params: object, **more: Any) -> bytes:
    return json.dumps({"usage": {"prompt_tokens": 9}, "kv_transfer_params": params, **more}).encode()


SOUND = json.dumps(HANDOFF, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(answer(HANDOFF), PrefillAnswer(SOUND, None, 9), id="a sound one is passed on"),
        pytest.param(
            answer({**HANDOFF, "remote_prefill_cached_tokens": 3}),
            PrefillAnswer(SOUND, None, 9),
            id="but for the key that hides what decode computed",
        ),
        pytest.param(
            answer({**HANDOFF, "remote_host": "10.0.0.2"}),
            PrefillAnswer(None, "foreign_host", 9),
            id="another host is not dialled",
        ),
        pytest.param(
            answer({**HANDOFF, "remote_block_ids": None}),
            PrefillAnswer(None, "incomplete_handoff", 9),
            id="a missing field would kill the engine",
        ),
        pytest.param(
            answer({**HANDOFF, "do_remote_prefill": False}),
            PrefillAnswer(None, "incomplete_handoff", 9),
            id="it must be one for decode",
        ),
        pytest.param(
            answer(None, choices=[{"finish_reason": "abort"}]),
            PrefillAnswer(None, "aborted", 9),
            id="an engine that drains",
        ),
        pytest.param(answer(None), PrefillAnswer(None, "no_handoff", 9), id="an engine that gives none"),
        pytest.param(b"<html>", PrefillAnswer(None, "not_json", None), id="something else"),
        pytest.param(b"[]", PrefillAnswer(None, "not_json", None), id="something else in JSON"),
        pytest.param(
            answer(HANDOFF, usage={"prompt_tokens": "many"}),
            PrefillAnswer(SOUND, None, None),
            id="a count that is none",
        ),
    ],
)
def test_hand_offs(body: bytes, expected: PrefillAnswer) -> None:
    assert read_prefill_answer(body, "10.0.0.1") == expected
