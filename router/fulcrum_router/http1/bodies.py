"""The bodies of both legs, made from the client's bytes.

The prompt is parsed once. The decode leg gets the client's own bytes with the hand-off spliced in
before the last brace; only where the client sent a field that is the router's is the body written anew.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson

from fulcrum_router.policy.estimate import measure_prompt

RESERVED_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "priority", "request_id"})
"""Fields that a client may not set: the first two make an engine dial any address, or kill it."""

_SINGLE = (1, None)
_PREFILL_KV_TRANSFER_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
_REQUIRED_KV_TRANSFER_PARAMS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
)


class InvalidBody(ValueError):
    """The client's body is not a JSON object."""


@dataclass(slots=True)  # quicker to make than a frozen one, and to read than a tuple
class RequestBody:
    """What the client asks for."""

    raw: bytes
    """A JSON object without any of the router's fields."""
    fields: dict[str, Any]
    prompt_bytes: int
    prompt_id_count: int
    local_prefill_reason: str | None
    """Why one hand-off cannot serve it: several prompts, or several answers to one."""


def parse_request_body(raw: bytes, priority: int) -> RequestBody:
    """The request in `raw`, with the router's own fields dropped and `priority` (0: none) put in.

    Raises:
        InvalidBody: if `raw` is no JSON object.
    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidBody(f"the body is not JSON: {error}") from None
    if type(fields) is not dict:
        raise InvalidBody("the body is not a JSON object")
    if not RESERVED_FIELDS.isdisjoint(fields):
        for name in RESERVED_FIELDS:
            fields.pop(name, None)
        raw = orjson.dumps(fields)
    if priority:
        fields["priority"] = priority
        raw = _append_field(raw, b'"priority":%d' % priority, is_empty=len(fields) == 1)
    size, ids = measure_prompt(fields)
    return RequestBody(raw, fields, size, ids, _find_local_prefill_reason(fields))


def _find_local_prefill_reason(fields: dict[str, Any]) -> str | None:
    prompt = fields.get("prompt")
    if type(prompt) is list and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "multiple_prompts"
    if fields.get("n", 1) not in _SINGLE or fields.get("best_of", 1) not in _SINGLE:
        return "multiple_choices"
    return None


def build_prefill_body(request: RequestBody, *, cache_salt: str = "") -> bytes:
    """The prefill leg: the same prompt, one token, no stream, KV kept for a decode elsewhere."""
    fields = {
        **request.fields,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": _PREFILL_KV_TRANSFER_PARAMS,
    }
    fields.pop("stream_options", None)
    fields.pop("min_tokens", None)
    if cache_salt:
        fields["cache_salt"] = _combine_salts(request, cache_salt)
    return orjson.dumps(fields)


@dataclass(slots=True)
class PrefillResponse:
    """What a prefill instance said: the hand-off as JSON (None: none that is sound); the prompt's tokens."""

    kv_transfer_params: bytes | None
    problem: str | None
    prompt_tokens: int | None


def parse_prefill_response(body: bytes, host: str) -> PrefillResponse:
    """The hand-off in a 200 response of a prefill instance at `host`.

    The object is passed on as it came but for one key, without which the decode instance's `usage` tells
    what it did not have to compute. A hand-off that is incomplete, or would make the decode instance dial
    somebody else, is none.
    """
    try:
        response = orjson.loads(body)
    except orjson.JSONDecodeError:
        return PrefillResponse(None, "not_json", None)
    if type(response) is not dict:
        return PrefillResponse(None, "not_json", None)
    usage = response.get("usage")
    tokens = usage.get("prompt_tokens") if type(usage) is dict else None
    tokens = tokens if type(tokens) is int and tokens > 0 else None
    params = response.get("kv_transfer_params")
    if type(params) is not dict:
        return PrefillResponse(None, "aborted" if _is_aborted(response) else "no_kv_transfer_params", tokens)
    if None in map(params.get, _REQUIRED_KV_TRANSFER_PARAMS) or params.get("do_remote_prefill") is not True:
        return PrefillResponse(None, "incomplete_kv_transfer_params", tokens)
    if params["remote_host"] != host:
        return PrefillResponse(None, "wrong_remote_host", tokens)
    params.pop("remote_prefill_cached_tokens", None)
    return PrefillResponse(orjson.dumps(params), None, tokens)


def _is_aborted(response: dict[str, Any]) -> bool:
    choices = response.get("choices")
    return bool(choices) and type(choices) is list and choices[0].get("finish_reason") == "abort"


def build_decode_body(
    request: RequestBody,
    kv_transfer_params: bytes | None,
    *,
    include_usage: bool = False,
    cache_salt: str = "",
) -> bytes:
    """The decode leg: the client's bytes, and the hand-off if there is one, with the usage that proves it.

    With `cache_salt` the engine finds nothing in its prefix cache that it was sent with another one.
    """
    if cache_salt:
        fields = {**request.fields, "cache_salt": _combine_salts(request, cache_salt)}
        request = replace(request, raw=orjson.dumps(fields), fields=fields)
    if kv_transfer_params is None:
        return request.raw
    raw = _request_usage(request) if include_usage else request.raw
    return _append_field(raw, b'"kv_transfer_params":' + kv_transfer_params, is_empty=not request.fields)


def _combine_salts(request: RequestBody, cache_salt: str) -> str:
    own = request.fields.get("cache_salt")
    return f"{cache_salt}/{own}" if own else cache_salt


def is_stream_without_usage(request: RequestBody) -> bool:
    """Whether it is a stream whose client did not ask for the usage at its end."""
    if request.fields.get("stream") is not True:
        return False
    options = request.fields.get("stream_options")
    return options is None or (type(options) is dict and options.get("include_usage") in (None, False))


def _request_usage(request: RequestBody) -> bytes:
    """The client's body with the usage asked for; its own options stay."""
    if "stream_options" not in request.fields:
        return _append_field(request.raw, b'"stream_options":{"include_usage":true}', is_empty=False)
    options = dict(request.fields["stream_options"] or ())
    options.pop("continuous_usage_stats", None)  # means nothing, and does nothing, without the usage
    return orjson.dumps({**request.fields, "stream_options": {**options, "include_usage": True}})


class PromptUsage(NamedTuple):
    """An engine's count of a prompt's tokens, and of those it did not compute (None: not said)."""

    prompt_tokens: int
    cached_tokens: int | None


_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_MAX_USAGE_BYTES = 1024


def parse_usage(content: bytes) -> PromptUsage | None:
    """The usage in a response or an event. What a model wrote is not taken for it, being escaped."""
    start = max(content.rfind(b'"usage":{'), content.rfind(b'"usage": {'))
    if start < 0:
        return None
    usage = content[start : start + _MAX_USAGE_BYTES]
    prompt, cached = _PROMPT_TOKENS.search(usage), _CACHED_TOKENS.search(usage)
    return PromptUsage(int(prompt[1]), int(cached[1]) if cached else None) if prompt else None


def _append_field(raw: bytes, member: bytes, *, is_empty: bool) -> bytes:
    return b"%b%b%b}" % (raw[: raw.rindex(b"}")], b"" if is_empty else b",", member)
