"""Bodies of the prefill leg and the decode leg, and the parsing of a prefill response."""

import json
import time
from typing import Any

import orjson
import pytest

from fulcrum_router.http1.bodies import (
    MAX_PROMPTS,
    PrefillProblem,
    PrefillResponse,
    build_decode_body,
    build_prefill_body,
    is_stream_without_usage,
    parse_prefill_response,
    parse_request_body,
)
from fulcrum_router.http1.json_limits import InvalidBody
from fulcrum_router.http1.output_limits import MAX_N, find_output_limit, is_stream

KV_TRANSFER_PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5,
}


def test_the_decode_body_keeps_the_client_bytes() -> None:
    raw = b'{ "prompt" : "a", "temperature": 1.0 }\n'
    spliced = build_decode_body(parse_request_body(raw, 0), b'{"x":1}')
    assert spliced == b'{ "prompt" : "a", "temperature": 1.0 ,"kv_transfer_params":{"x":1}}'
    assert build_decode_body(parse_request_body(raw, 0), None) == raw


def test_a_field_is_appended_to_an_empty_object_without_a_comma() -> None:
    assert build_decode_body(parse_request_body(b"{}", 0), b"{}") == b'{"kv_transfer_params":{}}'
    assert parse_request_body(b"{}", -3).raw == b'{"priority":-3}'


@pytest.mark.parametrize(
    "field",
    ["kv_transfer_params", "ec_transfer_params", "priority", "request_id", "kv\\u005ftransfer_params"],
)
def test_a_client_cannot_set_reserved_fields(field: str) -> None:
    raw = b'{"prompt":"a","%b":{"remote_host":"evil"}}' % field.encode()
    assert json.loads(parse_request_body(raw, -7).raw) == {"prompt": "a", "priority": -7}


@pytest.mark.parametrize(
    "raw",
    [b"", b"no", b"[]", b'"text"', b"null", b'{"a":NaN}', b'{"a":1', b"\xff"],
    ids=repr,
)
def test_a_body_that_is_not_a_json_object_is_rejected(raw: bytes) -> None:
    with pytest.raises(InvalidBody):
        parse_request_body(raw, 0)


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"])
@pytest.mark.parametrize(
    "template",
    [
        b'{"prompt":"a","vllm_xargs":{"mine":1,%b:"x"}}',
        b'{"prompt":"a","vllm_xargs":{%b:1},"vllm_xargs":{"mine":1}}',
        b'{"prompt":"a","vllm_xargs":{"mine":1},"vllm_\\u0078args":{%b:{"x":1},"mine":1}}',
    ],
    ids=["in vllm_xargs", "in the first of two vllm_xargs", "in an escaped vllm_xargs"],
)
def test_a_client_cannot_set_reserved_extra_args(template: bytes, name: str) -> None:
    """vLLM copies them to where its KV connector reads: `"x"` there ends the engine."""
    for spelling in (name, name.replace("_", "\\u005f")):
        raw = parse_request_body(template % b'"%b"' % spelling.encode(), 0).raw
        pairs = json.loads(raw, object_pairs_hook=lambda pairs: pairs)
        assert pairs == [("prompt", "a"), ("vllm_xargs", [("mine", 1)])]


def test_extra_args_of_another_type_are_the_engines_to_reject() -> None:
    raw = b'{"prompt":"a","vllm_xargs":["kv_transfer_params"]}'
    assert parse_request_body(raw, 0).raw == raw


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ('"n":2', "multiple_choices"),
        ('"n":"2"', "multiple_choices"),
        ('"best_of":3', "multiple_choices"),
        ('"use_beam_search":true', "multiple_choices"),
        ('"prompt_embeds":["AA","AA"]', "prompt_embeds"),
        ('"prompt":["a","b"]', "multiple_prompts"),
        ('"n":1', None),
    ],
)
def test_a_request_that_one_kv_transfer_cannot_serve_gets_none(field: str, reason: str | None) -> None:
    body = b'{"prompt":"a",%b}' % field.encode()
    assert parse_request_body(body, 0).local_prefill_reason == reason


@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"prompt_embeds": []},
        {"prompt_embeds": 0},
        {"use_beam_search": True},
        {"truncate_prompt_tokens": -1},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_choices_are_counted_whatever_else_the_request_has(others: dict[str, Any], *, chat: bool) -> None:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    body = parse_request_body(json.dumps({**prompt, **others, "n": 100}).encode(), 0, chat=chat)
    assert (body.choices, body.prompts) == (100, 1)


def test_each_embedded_prompt_has_choices_of_its_own() -> None:
    fields = {"prompt_embeds": ["AA", "AA", "AA"], "n": 2}
    body = parse_request_body(json.dumps(fields).encode(), 0)
    assert (body.local_prefill_reason, body.prompts, body.choices) == ("prompt_embeds", 3, 6)
    chat = parse_request_body(json.dumps({"messages": [], **fields}).encode(), 0, chat=True)
    assert (chat.local_prefill_reason, chat.prompts, chat.choices) == ("multiple_choices", 1, 2), "not read"


def test_a_null_as_the_limit_of_a_completion_is_removed() -> None:
    """It is 16 tokens in vLLM 0.32, and was the rest of the context before: without it, all read the same."""
    body = parse_request_body(b'{"prompt":"a","max_tokens":null,"seed":null,"n":"1"}', 0)
    assert json.loads(body.raw) == body.fields == {"prompt": "a", "seed": None, "n": 1}
    assert find_output_limit(body.fields, chat=False) == 16


@pytest.mark.parametrize(("chat", "passed"), [(True, False), (False, True)], ids=["chat", "passed through"])
def test_a_null_as_the_limit_of_other_requests_stays(*, chat: bool, passed: bool) -> None:
    raw = b'{"messages":[],"max_tokens":null}'
    assert parse_request_body(raw, 0, chat=chat, passed=passed).raw == raw


def test_the_prompt_of_a_request_that_is_passed_through_is_not_measured() -> None:
    raw = b'{"messages":[{"role":"user","content":"abc"}]}'
    assert parse_request_body(raw, 0).prompt_bytes == 3
    assert parse_request_body(raw, 0, passed=True).prompt_bytes == 0


def test_more_prompts_than_the_limit_are_rejected() -> None:
    parse_request_body(json.dumps({"prompt": ["a"] * MAX_PROMPTS}).encode(), 0)
    with pytest.raises(InvalidBody, match="more than 2048 prompts"):
        parse_request_body(json.dumps({"prompt": ["a"] * (MAX_PROMPTS + 1)}).encode(), 0)
    with pytest.raises(InvalidBody, match="more than 2048 prompts"):
        parse_request_body(json.dumps({"prompt_embeds": ["AA"] * (MAX_PROMPTS + 1)}).encode(), 0)


@pytest.mark.parametrize("name", ["n", "best_of"])
def test_the_number_of_answers_is_limited_as_in_vllm(name: str) -> None:
    parse_request_body(json.dumps({"prompt": "a", name: MAX_N}).encode(), 0)
    for value in (MAX_N + 1, 10**12, str(10**12), 1e12):
        with pytest.raises(InvalidBody, match=rf"^{name} \(\d+\) is greater than 16384$"):
            parse_request_body(json.dumps({"prompt": "a", name: value}).encode(), 0)


def test_the_prefill_body_requests_one_token_and_no_stream() -> None:
    raw = b'{"prompt":"a","max_tokens":50,"min_tokens":9,"stream":true,"stream_options":{},"seed":1}'
    assert json.loads(build_prefill_body(parse_request_body(raw, -2))) == {
        "prompt": "a",
        "seed": 1,
        "priority": -2,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


def build_response(params: object, **more: Any) -> bytes:
    return json.dumps({"usage": {"prompt_tokens": 9}, "kv_transfer_params": params, **more}).encode()


VALID_PARAMS = json.dumps(KV_TRANSFER_PARAMS, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp_size", 0),
        ("pp_size", "2"),
        ("dcp_size", None),
        ("pcp_size", True),
        ("remote_block_size", 16.0),
        ("remote_num_tokens", -1),
    ],
)
def test_sizes_that_would_end_a_decode_engine_are_not_sent_to_it(name: str, value: object) -> None:
    response = parse_prefill_response(build_response({**KV_TRANSFER_PARAMS, name: value}), "10.0.0.1")
    assert response.problem is PrefillProblem.INCOMPLETE_KV_TRANSFER_PARAMS


@pytest.mark.parametrize(
    "sizes", [{"tp_size": 2, "pp_size": 1}, {"remote_block_size": None}, {"remote_num_tokens": 0}]
)
def test_sizes_that_engines_send_are_sent_on(sizes: dict[str, object]) -> None:
    response = parse_prefill_response(build_response({**KV_TRANSFER_PARAMS, **sizes}), "10.0.0.1")
    assert json.loads(response.kv_transfer_params or b"") == {**KV_TRANSFER_PARAMS, **sizes}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(
            build_response(KV_TRANSFER_PARAMS),
            PrefillResponse(VALID_PARAMS, None, 9),
            id="complete parameters are returned",
        ),
        pytest.param(
            build_response({**KV_TRANSFER_PARAMS, "remote_prefill_cached_tokens": 3}),
            PrefillResponse(VALID_PARAMS, None, 9),
            id="remote_prefill_cached_tokens is removed",
        ),
        pytest.param(
            build_response({**KV_TRANSFER_PARAMS, "remote_host": "10.0.0.2"}),
            PrefillResponse(None, PrefillProblem.WRONG_REMOTE_HOST, 9),
            id="another host is rejected",
        ),
        pytest.param(
            build_response({**KV_TRANSFER_PARAMS, "remote_block_ids": None}),
            PrefillResponse(None, PrefillProblem.INCOMPLETE_KV_TRANSFER_PARAMS, 9),
            id="a missing field is rejected",
        ),
        pytest.param(
            build_response({**KV_TRANSFER_PARAMS, "do_remote_prefill": False}),
            PrefillResponse(None, PrefillProblem.INCOMPLETE_KV_TRANSFER_PARAMS, 9),
            id="parameters that are not for a decode leg are rejected",
        ),
        pytest.param(
            build_response(None, choices=[{"finish_reason": "abort"}]),
            PrefillResponse(None, PrefillProblem.ABORTED, 9),
            id="an engine that drains aborts",
        ),
        pytest.param(
            build_response(None),
            PrefillResponse(None, PrefillProblem.NO_KV_TRANSFER_PARAMS, 9),
            id="no parameters",
        ),
        pytest.param(b"<html>", PrefillResponse(None, PrefillProblem.NOT_JSON, None), id="not JSON"),
        pytest.param(b"[]", PrefillResponse(None, PrefillProblem.NOT_JSON, None), id="not a JSON object"),
        pytest.param(
            build_response(KV_TRANSFER_PARAMS, usage={"prompt_tokens": "many"}),
            PrefillResponse(VALID_PARAMS, None, None),
            id="a token count that is not a number is ignored",
        ),
        pytest.param(
            build_response(None, usage={"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}),
            PrefillResponse(None, PrefillProblem.NO_KV_TRANSFER_PARAMS, 9, 8),
            id="tokens from the prefix cache are counted",
        ),
        pytest.param(
            build_response(None, usage={"prompt_tokens": 9, "prompt_tokens_details": None}),
            PrefillResponse(None, PrefillProblem.NO_KV_TRANSFER_PARAMS, 9, 0),
            id="vLLM omits a zero",
        ),
    ],
)
def test_a_prefill_response_gives_kv_transfer_params_or_names_the_problem(
    body: bytes, expected: PrefillResponse
) -> None:
    assert parse_prefill_response(body, "10.0.0.1") == expected


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"choices":[' + b'{"a":{}},' * 900_000 + b"{}]}", id="objects"),
        pytest.param(b'{"a":{' + b'"b":1,' * 1_300_000 + b'"b":1}}', id="names"),
    ],
)
def test_a_prefill_response_that_takes_long_to_parse_is_not_parsed(body: bytes) -> None:
    """It would keep all other requests waiting for a second."""
    began_s = time.thread_time()
    assert parse_prefill_response(body, "10.0.0.1").problem is PrefillProblem.NOT_JSON
    assert time.thread_time() - began_s < 0.1


def test_the_prefill_leg_asks_for_no_token_ids_which_the_client_gets_from_decode() -> None:
    request = parse_request_body(b'{"prompt":"a","return_token_ids":true}', 0)
    assert "return_token_ids" not in orjson.loads(build_prefill_body(request))
    assert orjson.loads(build_decode_body(request, None))["return_token_ids"] is True


@pytest.mark.parametrize("stream", [1, 1.0, "true", "Yes", "on", "T"])
def test_what_an_engine_reads_as_a_stream_is_one(stream: object) -> None:
    raw = orjson.dumps({"prompt": "a", "stream": stream, "stream_options": {"include_usage": "false"}})
    request = parse_request_body(raw, 0)
    assert is_stream_without_usage(request)
    sent = orjson.loads(build_decode_body(request, None, include_usage=True))
    assert sent == {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("stream", [0, 0.0, "false", "NO", None, False])
def test_what_an_engine_reads_as_no_stream_is_none(stream: object) -> None:
    request = parse_request_body(orjson.dumps({"prompt": "a", "stream": stream}), 0)
    assert (is_stream(request.fields), is_stream_without_usage(request)) == (False, False)


@pytest.mark.parametrize("fields", [{"stream": "maybe"}, {"stream": 2}, {"stream": []}])
def test_a_stream_that_is_neither_true_nor_false_is_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidBody, match="stream is neither true nor false"):
        parse_request_body(orjson.dumps({"prompt": "a", **fields}), 0)


def test_a_prompt_in_a_chat_is_not_read() -> None:
    fields = {"messages": [{"role": "user", "content": "four"}], "prompt": ["a", "b"]}
    chat = parse_request_body(orjson.dumps(fields), 0, chat=True)
    assert (chat.prompt_bytes, chat.prompt_id_count, chat.local_prefill_reason) == (4, 0, None)
    completion = parse_request_body(orjson.dumps({**fields, "prompt": "abc"}), 0)
    assert (completion.prompt_bytes, completion.local_prefill_reason) == (3, None)
