"""The bodies of both legs, made from the client's bytes.

The prompt is parsed once. The decode leg gets the client's own bytes with the hand-off spliced in
before the last brace; only where the client sent a field that is the router's is the body written anew.
"""

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson

from fulcrum_router.policy.estimate import prompt_size

ROUTERS_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "priority", "request_id"})
"""Fields that a client may not set: the first two make an engine dial any address, or kill it."""

_ONE = (1, None)
_PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
_HANDOFF_FIELDS = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class BadBody(ValueError):
    """The client's body is not a JSON object."""


@dataclass(slots=True)  # quicker to make than a frozen one, and to read than a tuple
class Request:
    """What the client asks for."""

    raw: bytes
    """A JSON object without any of the router's fields."""
    fields: dict[str, Any]
    prompt_bytes: int
    prompt_ids: int
    several: str | None
    """Why one hand-off cannot serve it: several prompts, or several answers to one."""


def parse_request(raw: bytes, priority: int) -> Request:
    """The request in `raw`, with the router's own fields dropped and `priority` (0: none) put in.

    Raises:
        BadBody: if `raw` is no JSON object.
    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    if type(fields) is not dict:
        raise BadBody("the body is not a JSON object")
    if not ROUTERS_FIELDS.isdisjoint(fields):
        for name in ROUTERS_FIELDS:
            fields.pop(name, None)
        raw = orjson.dumps(fields)
    if priority:
        fields["priority"] = priority
        raw = _splice(raw, b'"priority":%d' % priority, empty=len(fields) == 1)
    size, ids = prompt_size(fields)
    return Request(raw, fields, size, ids, _several(fields))


def _several(fields: dict[str, Any]) -> str | None:
    prompt = fields.get("prompt")
    if type(prompt) is list and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several_prompts"
    if fields.get("n", 1) not in _ONE or fields.get("best_of", 1) not in _ONE:
        return "several_answers"
    return None


def prefill_body(request: Request, *, salt: str = "") -> bytes:
    """The prefill leg: the same prompt, one token, no stream, KV kept for a decode elsewhere."""
    fields = {
        **request.fields,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": _PREFILL_PARAMS,
    }
    fields.pop("stream_options", None)
    fields.pop("min_tokens", None)
    if salt:
        fields["cache_salt"] = _salted(request, salt)
    return orjson.dumps(fields)


@dataclass(slots=True)
class PrefillAnswer:
    """What a prefill instance said: the hand-off as JSON (None: none that is sound); the prompt's tokens."""

    handoff: bytes | None
    problem: str | None
    prompt_tokens: int | None


def read_prefill_answer(body: bytes, host: str) -> PrefillAnswer:
    """The hand-off in a 200 answer of a prefill instance at `host`.

    The object is passed on as it came but for one key, without which the decode instance's `usage` tells
    what it did not have to compute. A hand-off that is incomplete, or would make the decode instance dial
    somebody else, is none.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return PrefillAnswer(None, "not_json", None)
    if type(answer) is not dict:
        return PrefillAnswer(None, "not_json", None)
    usage = answer.get("usage")
    tokens = usage.get("prompt_tokens") if type(usage) is dict else None
    tokens = tokens if type(tokens) is int and tokens > 0 else None
    params = answer.get("kv_transfer_params")
    if type(params) is not dict:
        return PrefillAnswer(None, "aborted" if _aborted(answer) else "no_handoff", tokens)
    if None in map(params.get, _HANDOFF_FIELDS) or params.get("do_remote_prefill") is not True:
        return PrefillAnswer(None, "incomplete_handoff", tokens)
    if params["remote_host"] != host:
        return PrefillAnswer(None, "foreign_host", tokens)
    params.pop("remote_prefill_cached_tokens", None)
    return PrefillAnswer(orjson.dumps(params), None, tokens)


def _aborted(answer: dict[str, Any]) -> bool:
    choices = answer.get("choices")
    return bool(choices) and type(choices) is list and choices[0].get("finish_reason") == "abort"


def decode_body(request: Request, handoff: bytes | None, *, ask_usage: bool = False, salt: str = "") -> bytes:
    """The decode leg: the client's bytes, and the hand-off if there is one, with the usage that proves it.

    With `salt` the engine finds nothing in its prefix cache that it was sent with another one.
    """
    if salt:
        fields = {**request.fields, "cache_salt": _salted(request, salt)}
        request = replace(request, raw=orjson.dumps(fields), fields=fields)
    if handoff is None:
        return request.raw
    raw = _asking_usage(request) if ask_usage else request.raw
    return _splice(raw, b'"kv_transfer_params":' + handoff, empty=not request.fields)


def _salted(request: Request, salt: str) -> str:
    own = request.fields.get("cache_salt")
    return f"{salt}/{own}" if own else salt


def lacks_usage(request: Request) -> bool:
    """Whether it is a stream whose client did not ask for the usage at its end."""
    if request.fields.get("stream") is not True:
        return False
    options = request.fields.get("stream_options")
    return options is None or (type(options) is dict and options.get("include_usage") in (None, False))


def _asking_usage(request: Request) -> bytes:
    """The client's body with the usage asked for; its own options stay."""
    if "stream_options" not in request.fields:
        return _splice(request.raw, b'"stream_options":{"include_usage":true}', empty=False)
    options = dict(request.fields["stream_options"] or ())
    options.pop("continuous_usage_stats", None)  # means nothing, and does nothing, without the usage
    return orjson.dumps({**request.fields, "stream_options": {**options, "include_usage": True}})


class Usage(NamedTuple):
    """An engine's count of a prompt's tokens, and of those it did not compute (None: not said)."""

    prompt_tokens: int
    cached_tokens: int | None


_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_USAGE_BYTES = 1024


def read_usage(content: bytes) -> Usage | None:
    """The usage in an answer or an event. What a model wrote is not taken for it, being escaped."""
    start = max(content.rfind(b'"usage":{'), content.rfind(b'"usage": {'))
    if start < 0:
        return None
    usage = content[start : start + _USAGE_BYTES]
    prompt, cached = _PROMPT_TOKENS.search(usage), _CACHED_TOKENS.search(usage)
    return Usage(int(prompt[1]), int(cached[1]) if cached else None) if prompt else None


def _splice(raw: bytes, member: bytes, *, empty: bool) -> bytes:
    return b"%b%b%b}" % (raw[: raw.rindex(b"}")], b"" if empty else b",", member)
