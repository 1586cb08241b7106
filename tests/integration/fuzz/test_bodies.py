"""Whatever a client or an engine writes as JSON or as events: legs get what they may, and nothing fails."""

import json
from collections.abc import Iterator
from typing import Any

from fulcrum_router.fleet.engine_metrics import sum_samples
from fulcrum_router.http1.bodies import (
    EXTRA_ARGS_FIELD,
    RESERVED_EXTRA_ARGS,
    RESERVED_FIELDS,
    build_decode_body,
    build_prefill_body,
    is_stream_without_usage,
    parse_prefill_response,
    parse_request_body,
)
from fulcrum_router.http1.engine_events import EMPTY_CHOICES, has_no_token, parse_usage, strip_usage_events
from fulcrum_router.http1.framing import ChunkScanner, FramingError, dechunk, find_chunks
from fulcrum_router.http1.json_limits import InvalidBody
from tests.integration.fuzz.conftest import RunFuzzer
from tests.integration.fuzz.fuzzing import limit_turn
from tests.integration.fuzz.test_engine_responses import SSE, STREAM
from tests.integration.fuzz.test_engine_responses import TOKENS as EVENT_TOKENS

PARAMS = b'{"do_remote_prefill":true,"remote_block_ids":[[1]]}'
CLIENT_BODIES = [
    b'{"model":"m","prompt":"hello","max_tokens":3}',
    b'{"messages":[{"role":"user","content":[{"type":"text","text":"hi \\u00e9"}]}],"stream":true}',
    b'{"prompt":[1,2,3],"stream":true,"stream_options":{"include_usage":false}}',
    b'{"prompt":"a","stream":true,"stream_options":"a"}',  # asks for no usage, and gets the engine's 400
    b'{"prompt":["a","b"],"n":2}',
    b'{"prompt":"a","vllm_xargs":{"kv_transfer_params":"x","mine":1}}',
    b'{"prompt":"a","kv_transfer_params":{"remote_host":"evil"},"request_id":"x","priority":9}',
    b'{ "prompt" : "}" }\n\t ',
    b"{}",
]
JSON_TOKENS = [
    b'"prompt":', b'"messages":', b'"vllm_xargs":', b'"kv_transfer_params":', b'"kv\\u005ftransfer_params":',
    b'"ec_transfer_params":', b'"stream_options":', b'"include_usage":', b'"n":', b'"request_id":', b"[",
    b'"cache_salt":"x"', b"null", b"true", b"1e999", b"-0", b"12345678901234567890123", b'"\\ud800"', b"\xff",
    b'"vllm\\u005fxargs":{', b"[" * 300, b"]" * 300, b" ", b"\n", b'"', b"\\", b":", b"1,", b"{", b"}", b",",
    b'"prompt_embeds":', b"]",
]  # fmt: skip


def parse_as_vllm(body: bytes) -> list[tuple[str, Any]]:
    """All members of a body, repeated ones too; JSON objects as lists of pairs."""
    parsed: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    return parsed


def list_extra_args(members: list[tuple[str, Any]]) -> Iterator[str]:
    for name, value in members:
        if name == EXTRA_ARGS_FIELD and isinstance(value, list):
            yield from (pair[0] for pair in value if isinstance(pair, tuple))


def without_reserved(body: bytes) -> dict[str, Any]:
    """What the client asked for, as Python's parser reads it."""
    fields: dict[str, Any] = {k: v for k, v in json.loads(body).items() if k not in RESERVED_FIELDS}
    extra = fields.get(EXTRA_ARGS_FIELD)
    if isinstance(extra, dict):
        fields[EXTRA_ARGS_FIELD] = {k: v for k, v in extra.items() if k not in RESERVED_EXTRA_ARGS}
    return fields


def has_large_integers(value: Any) -> bool:
    """Whether orjson reads a number as an approximation, as it does beyond 64 bits."""
    if isinstance(value, dict):
        return any(map(has_large_integers, value.values()))
    if isinstance(value, list):
        return any(map(has_large_integers, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def test_both_legs_get_the_client_s_request_and_the_router_s_parameters(run_fuzzer: RunFuzzer) -> None:
    def run(data: bytes) -> tuple[object, ...]:
        try:
            with limit_turn():
                request = parse_request_body(data, 0)
                plain, body = build_decode_body(request, None), build_decode_body(request, PARAMS)
        except InvalidBody as error:
            return (str(error)[:24],)
        allowed = without_reserved(data)
        members = parse_as_vllm(body)
        names = [name for name, _ in members]
        assert names[-1] == "kv_transfer_params"
        assert RESERVED_FIELDS.isdisjoint(names[:-1])
        assert RESERVED_EXTRA_ARGS.isdisjoint(list_extra_args(members))
        assert json.loads(body)["kv_transfer_params"] == json.loads(PARAMS)
        prefill = json.loads(build_prefill_body(request))
        assert (prefill["max_tokens"], prefill["stream"]) == (1, False)
        assert prefill["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
        with_usage = build_decode_body(request, PARAMS, include_usage=is_stream_without_usage(request))
        assert RESERVED_EXTRA_ARGS.isdisjoint(list_extra_args(parse_as_vllm(with_usage)))
        if not has_large_integers(allowed):
            assert json.loads(plain) == allowed
        return request.local_prefill_reason, tuple(sorted(allowed))[:3], plain == data

    run_fuzzer(run, CLIENT_BODIES, JSON_TOKENS)


ENGINE_BODIES = [
    b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":3}},'
    b'"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"e",'
    b'"remote_request_id":"r","remote_host":"h","remote_port":5,"remote_prefill_cached_tokens":1}}',
    b'{"choices":[{"finish_reason":"abort"}]}',
    b'{"usage": {"prompt_tokens": 5, "completion_tokens": 7}}',
    b'# HELP vllm:x y\nvllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running 1\n',
]
ENGINE_TOKENS = [
    *JSON_TOKENS,
    b'"usage":{', b'"prompt_tokens":', b'"cached_tokens":', b'"completion_tokens":', b"9" * 5_000, b"1e5",
    b"+Inf", b'"choices":', b"vllm:num_requests_running", b'{engine="', b"} ", b'"remote_port":', b"NaN",
    b'"remote_host":"h"',
]  # fmt: skip


def test_what_an_engine_reports_is_read_or_ignored(run_fuzzer: RunFuzzer) -> None:
    def run(data: bytes) -> tuple[object, ...]:
        with limit_turn():
            response, usage = parse_prefill_response(data, "h"), parse_usage(data)
            sum_samples(data, b"vllm:num_requests_running")
        if response.kv_transfer_params is not None:
            params = json.loads(response.kv_transfer_params)
            assert (params["remote_host"], type(params["remote_block_ids"])) == ("h", list)
            assert "remote_prefill_cached_tokens" not in params
        for count in (response.prompt_tokens, usage and usage.prompt_tokens, usage and usage.cached_tokens):
            assert count is None or 0 <= count <= 10**9
        return response.problem, response.prompt_tokens is None, usage is None, len(data) > 100

    run_fuzzer(run, ENGINE_BODIES, ENGINE_TOKENS)


MORE_BLANK_LINES = (
    b'23\r\ndata: {"choices":[{"text":"a"}]}\n\n\n\r\n'
    b'48\r\ndata: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n\r\n'
    b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)


def test_stripping_the_usage_keeps_all_other_events(run_fuzzer: RunFuzzer) -> None:
    def run(data: bytes) -> tuple[object, ...]:
        scanner = ChunkScanner()
        try:
            with limit_turn():
                end = scanner.feed(data)
                has_no_token(data[:end])
                stripped = strip_usage_events(data[:end])
        except FramingError as error:
            return (str(error)[:16],)
        if not scanner.done:
            return len(stripped) == end, end > 0
        after = ChunkScanner()
        assert (after.feed(stripped), after.done) == (len(stripped), True)
        before = dechunk(data[:end])
        if all(data[start:stop].endswith(b"\n\n") for start, stop, _ in find_chunks(data[:end])):
            assert _without_usage(dechunk(stripped)) == _without_usage(before)
        return stripped == data[:end], before.count(b"data:")

    run_fuzzer(run, [STREAM.removeprefix(SSE), MORE_BLANK_LINES], EVENT_TOKENS)


def _without_usage(content: bytes) -> list[bytes]:
    """All other events. More blank lines between events mean nothing, and may stay when one is left out."""
    events = (event.strip(b"\n") for event in content.split(b"\n\n"))
    return [event for event in events if event and EMPTY_CHOICES not in event]
