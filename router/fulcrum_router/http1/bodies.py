"""Request bodies of the prefill leg and the decode leg, built from the client's body.

The client's JSON is parsed once. The decode body is the client's own bytes with the KV transfer parameters
appended; it is serialised anew only if the client sent a reserved field or a field has to be replaced.

Engines pass the fields of `vllm_xargs` on to their scheduler, with `kv_transfer_params`: the reserved ones
are removed there, too. A body that names either is serialised anew, so that an engine cannot find in a
repeated name what the router did not see.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import orjson

from fulcrum_router.http1.engine_events import Usage
from fulcrum_router.http1.json_limits import InvalidBody, parse_limited_object
from fulcrum_router.http1.lax_values import parse_lax_bool, parse_lax_int
from fulcrum_router.http1.output_limits import MAX_N, count_choices, count_prompts
from fulcrum_router.http1.prompt_size import measure_prompt
from fulcrum_router.policy.journey import LocalPrefillReason

RESERVED_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "priority", "request_id"})
"""Fields that a client may not set: the first two make an engine connect to any address, or crash."""
EXTRA_ARGS_FIELD = "vllm_xargs"
"""Field whose members vLLM copies into the arguments of its scheduler and its KV connector."""
RESERVED_EXTRA_ARGS = frozenset({"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"})
"""Members of `vllm_xargs` that a client may not set: transfers, and the detail of KV cache events."""

MAX_PROMPTS = 2_048
"""Prompts in one request, as in OpenAI's API."""
_TOO_MANY_PROMPTS = f"the body has more than {MAX_PROMPTS} prompts"

_RESPECIFIED_FIELDS = RESERVED_FIELDS | {EXTRA_ARGS_FIELD}

_SINGLE = (1, None)
_COMPLETION_PROMPTS = frozenset({"prompt", "prompt_embeds"})
_COUNTED_FIELDS = frozenset({"stream", "max_tokens", "max_completion_tokens"})
_REASON_FIELDS = frozenset(
    {
        "prompt_embeds",
        "n",
        "best_of",
        "use_beam_search",
        "prompt_logprobs",
        "echo",
        "truncate_prompt_tokens",
    }
)
"""Fields that may be the reason for a local prefill."""
_OUTPUT_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens")
_INTEGER_FIELDS = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "min_tokens"),
        *("n", "best_of", "stream_interval", "truncate_prompt_tokens"),
    }
)
"""Fields with whole numbers that the router reads."""
_PREFILL_KV_TRANSFER_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}
_REQUIRED_KV_TRANSFER_PARAMS: dict[str, type] = {
    "remote_block_ids": list,
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
}
_SIZES: dict[str, int] = {
    **{"tp_size": 1, "pp_size": 1, "dcp_size": 1, "pcp_size": 1},
    **{"remote_block_size": 1, "remote_num_tokens": 0},
}
"""Numbers that engines of some versions send, with their lowest values; decode engines divide by most."""
_SIZE_MAX = 1_000_000_000
_BLOCK_IDS = re.compile(rb"\[(?:\[[\d,]*\](?:,\[[\d,]*\])*|[\d,]*)\]")
"""Ids of one KV cache group, or a list of them for each group, as compact JSON."""
MAX_PROMPT_TOKENS = 16_777_216
"""A larger count in an engine's usage is not believed."""
MAX_ADDED_TOKENS = 131_072
"""Tokens of a prompt beyond one for each byte of its body, as for images by URL. More is not believed."""


class RequestBody:
    """Body of a client request, parsed."""

    __slots__ = (
        "choices",
        "fields",
        "local_prefill_reason",
        "max_prompt_tokens",
        "prompt_bytes",
        "prompt_id_count",
        "prompts",
        "raw",
    )

    def __init__(
        self,
        raw: bytes,
        fields: dict[str, Any],
        prompt_bytes: int,
        prompt_id_count: int,
        local_prefill_reason: LocalPrefillReason | None,
        prompts: int = 1,
        choices: int = 1,
        max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    ) -> None:
        self.raw = raw
        """JSON object without any reserved field of the client's."""
        self.fields, self.prompts = fields, prompts
        self.prompt_bytes, self.prompt_id_count = prompt_bytes, prompt_id_count
        self.local_prefill_reason = local_prefill_reason
        """Why one KV transfer cannot serve the request; None if it can."""
        self.choices = choices
        """Texts that the engine generates: `n` for each prompt."""
        self.max_prompt_tokens = max_prompt_tokens
        """An engine's count of the prompt above it is not believed."""

    def with_fields(self, fields: dict[str, Any]) -> "RequestBody":
        """The same request with other fields."""
        return RequestBody(
            orjson.dumps(fields),
            fields,
            self.prompt_bytes,
            self.prompt_id_count,
            self.local_prefill_reason,
            self.prompts,
            self.choices,
            self.max_prompt_tokens,
        )

    def find_counts(self, usage: Usage | None) -> tuple[int | None, int | None]:
        """Return the prompt and output tokens of an engine's usage; None for a count that is not believed."""
        if usage is None:
            return None, None
        is_credible = 0 < usage.prompt_tokens <= self.max_prompt_tokens
        return usage.prompt_tokens if is_credible else None, usage.completion_tokens or None

    def forget_prompt(self) -> None:
        """Free the memory of all but the options of the output: no leg needs the body again."""
        fields = self.fields
        self.raw = b""
        self.fields = {
            n: fields[n] for n in _COUNTED_FIELDS if n in fields and type(fields[n]) in (bool, int)
        }


def parse_request_body(raw: bytes, priority: int, *, chat: bool = False, passed: bool = False) -> RequestBody:
    """Parse a client's body and read it: see `json_limits.parse_limited_object` and `read_request_body`.

    Raises:
        InvalidBody: if `raw` is not a JSON object, or exceeds a limit of `json_limits`.
    """
    return read_request_body(raw, parse_limited_object(raw), priority, chat=chat, passed=passed)


def read_request_body(
    raw: bytes, fields: dict[str, Any], priority: int, *, chat: bool = False, passed: bool = False
) -> RequestBody:
    """Drop the reserved fields of a body, set `priority` (0: none) and measure the prompt.

    Args:
        raw: The client's body.
        fields: What was parsed from it.
        priority: Priority of the request for the engine.
        chat: Whether its prompt are messages.
        passed: Whether it is for another API than completions and chats: its prompt is not measured here.

    Raises:
        InvalidBody: if there are too many prompts or answers, or an option cannot be read.
    """
    has_changed = _normalise_bools(fields) | _normalise_ints(fields)
    if not chat and not passed:
        has_changed |= _drop_null_limit(fields)
    if has_changed:
        raw = orjson.dumps(fields)
    if not _RESPECIFIED_FIELDS.isdisjoint(fields):
        _drop_reserved_fields(fields)
        raw = orjson.dumps(fields)
    if priority:
        fields["priority"] = priority
        raw = _append_field(raw, b'"priority":%d' % priority, is_empty=len(fields) == 1)
    read = _drop_unread_prompt(fields, chat=chat)
    prompt = read.get("prompt")
    if type(prompt) is list and len(prompt) > MAX_PROMPTS and type(prompt[0]) is not int:
        raise InvalidBody(_TOO_MANY_PROMPTS)
    size, ids = (0, 0) if passed else measure_prompt(read)
    reason = _find_local_prefill_reason(read)
    if reason is None:
        return RequestBody(raw, fields, size, ids, None, 1, 1, len(raw) + MAX_ADDED_TOKENS)
    _limit_answers(fields)
    prompts, choices = count_prompts(read), count_choices(read)
    if prompts > MAX_PROMPTS:
        raise InvalidBody(_TOO_MANY_PROMPTS)
    return RequestBody(raw, fields, size, ids, reason, prompts, choices, len(raw) + MAX_ADDED_TOKENS)


def _limit_answers(fields: dict[str, Any]) -> None:
    for name in ("n", "best_of"):
        value = fields.get(name)
        if type(value) is int and value > MAX_N:
            raise InvalidBody(f"{name} ({value}) is greater than {MAX_N}")


def _drop_unread_prompt(fields: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """Return the fields without the prompts of a completion, which no engine reads in a chat."""
    if not chat or _COMPLETION_PROMPTS.isdisjoint(fields):
        return fields
    return {name: value for name, value in fields.items() if name not in _COMPLETION_PROMPTS}


def _normalise_bools(fields: dict[str, Any]) -> bool:
    """Replace values that vLLM reads as booleans by these; return whether there are any.

    Raises:
        InvalidBody: for a value that is none.
    """
    options = fields.get("stream_options")
    has_changed = "stream" in fields and _normalise_bool(fields, "stream")
    if type(options) is dict and "include_usage" in options:
        has_changed |= _normalise_bool(options, "include_usage")
    return has_changed


def _normalise_ints(fields: dict[str, Any]) -> bool:
    """Replace values that vLLM reads as whole numbers by these; return whether there are any.

    Raises:
        InvalidBody: for a text that is none.
    """
    has_changed = False
    for name in fields.keys() & _INTEGER_FIELDS:
        value = fields[name]
        if type(value) is not int and (parsed := parse_lax_int(value)) is not None:
            fields[name], has_changed = parsed, True
        elif type(value) is str:
            raise InvalidBody(f"{name} is not a whole number")
    return has_changed


def _drop_null_limit(fields: dict[str, Any]) -> bool:
    """Remove the limit of a completion if it is null; return whether it was.

    vLLM 0.32 reads null as no field, which is 16 tokens. Older ones generate up to the end of the context.
    """
    if fields.get("max_tokens", 0) is not None:
        return False
    del fields["max_tokens"]
    return True


def _normalise_bool(fields: dict[str, Any], name: str) -> bool:
    value = fields[name]
    if value is None or type(value) is bool:
        return False
    fields[name] = parsed = parse_lax_bool(value)
    if parsed is None:
        raise InvalidBody(f"{name} is neither true nor false")
    return True


def _drop_reserved_fields(fields: dict[str, Any]) -> None:
    for name in RESERVED_FIELDS:
        fields.pop(name, None)
    extra_args = fields.get(EXTRA_ARGS_FIELD)
    if type(extra_args) is dict:
        for name in RESERVED_EXTRA_ARGS:
            extra_args.pop(name, None)


def _find_local_prefill_reason(fields: dict[str, Any]) -> LocalPrefillReason | None:
    prompt = fields.get("prompt")
    if type(prompt) is list and len(prompt) > 1 and not isinstance(prompt[0], int):
        return LocalPrefillReason.MULTIPLE_PROMPTS
    if _REASON_FIELDS.isdisjoint(fields):  # the usual case
        return None
    if fields.get("prompt_embeds") is not None:
        return LocalPrefillReason.PROMPT_EMBEDS
    if fields.get("n", 1) not in _SINGLE or fields.get("best_of", 1) not in _SINGLE:
        return LocalPrefillReason.MULTIPLE_CHOICES
    if fields.get("use_beam_search"):
        return LocalPrefillReason.MULTIPLE_CHOICES
    if _truncates_to_the_rest(fields):
        return LocalPrefillReason.TRUNCATED_PROMPT
    return LocalPrefillReason.PROMPT_LOGPROBS if _requests_prompt_logprobs(fields) else None


def _truncates_to_the_rest(fields: dict[str, Any]) -> bool:
    """Whether the engine truncates the prompt to the context less `max_tokens`; a prefill leg sets that to 1.

    Decode would fetch the KV of another prompt, and cache it under the hash of its own, for all clients.
    """
    limit = fields.get("truncate_prompt_tokens")
    return limit is not None and not (type(limit) is int and limit >= 0)


def _requests_prompt_logprobs(fields: dict[str, Any]) -> bool:
    """Whether the engine returns log-probabilities of the prompt: `echo` adds the prompt to those requested.

    A chat always has a number of log-probabilities, 0 by default.
    """
    if fields.get("prompt_logprobs") is not None:
        return True
    return bool(fields.get("echo")) and ("messages" in fields or fields.get("logprobs") is not None)


def build_prefill_body(request: RequestBody, *, cache_salt: str = "") -> bytes:
    """Body of the prefill leg: the same prompt, one token, no stream; the engine keeps the KV."""
    fields = {
        **request.fields,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": _PREFILL_KV_TRANSFER_PARAMS,
    }
    fields.pop("stream_options", None)
    fields.pop("min_tokens", None)
    fields.pop("return_token_ids", None)  # those of a long prompt would take long to parse
    if cache_salt:
        fields["cache_salt"] = _combine_salts(request, cache_salt)
    return orjson.dumps(fields)


class PrefillProblem(StrEnum):
    """Why a prefill response has no usable KV transfer parameters."""

    ABORTED = "aborted"
    NOT_JSON = "not_json"
    NO_KV_TRANSFER_PARAMS = "no_kv_transfer_params"
    INCOMPLETE_KV_TRANSFER_PARAMS = "incomplete_kv_transfer_params"
    WRONG_REMOTE_HOST = "wrong_remote_host"


@dataclass(slots=True)
class PrefillResponse:
    """A prefill engine's response, parsed."""

    kv_transfer_params: bytes | None
    """JSON object for the decode leg; None if it is missing or unusable, see `problem`."""
    problem: PrefillProblem | None
    prompt_tokens: int | None
    """The engine's count; None if it reported none."""
    cached_tokens: int = 0
    """Prompt tokens that the engine had in its prefix cache. vLLM omits a zero."""


def parse_prefill_response(body: bytes, host: str) -> PrefillResponse:
    """Parse the 200 response of a prefill instance at `host`.

    `remote_prefill_cached_tokens` is removed from the parameters, so that the decode engine's usage counts
    fetched tokens as cached. Incomplete parameters (they would crash the decode engine) and parameters that
    name another host are rejected. So is a response that would take as long to parse as no client's body may.
    """
    try:
        response = parse_limited_object(body)
    except InvalidBody:
        return PrefillResponse(None, PrefillProblem.NOT_JSON, None)
    usage = response.get("usage")
    tokens = usage.get("prompt_tokens") if type(usage) is dict else None
    tokens = tokens if type(tokens) is int and 0 < tokens <= MAX_PROMPT_TOKENS else None
    cached = _read_cached_tokens(usage)
    params = response.get("kv_transfer_params")
    if type(params) is not dict:
        aborted = _is_aborted(response)
        problem = PrefillProblem.ABORTED if aborted else PrefillProblem.NO_KV_TRANSFER_PARAMS
        return PrefillResponse(None, problem, tokens, cached)
    dumped = _dump_params(params)
    if dumped is None:
        return PrefillResponse(None, PrefillProblem.INCOMPLETE_KV_TRANSFER_PARAMS, tokens, cached)
    if params["remote_host"] != host:
        return PrefillResponse(None, PrefillProblem.WRONG_REMOTE_HOST, tokens, cached)
    return PrefillResponse(dumped, None, tokens, cached)


def _dump_params(params: dict[str, Any]) -> bytes | None:
    """The parameters for the decode leg; None if a decode engine cannot use them: they would end it."""
    if params.get("do_remote_prefill") is not True:
        return None
    for name, kind in _REQUIRED_KV_TRANSFER_PARAMS.items():
        if type(params.get(name)) is not kind:
            return None
    if not 0 < params["remote_port"] < 65_536 or not _are_sizes_usable(params):
        return None
    params.pop("remote_prefill_cached_tokens", None)
    try:
        if _BLOCK_IDS.fullmatch(orjson.dumps(params["remote_block_ids"])) is None:
            return None
        return orjson.dumps(params)
    except TypeError:  # nested too deep
        return None


def _are_sizes_usable(params: dict[str, Any]) -> bool:
    for name in _SIZES.keys() & params.keys():
        size = params[name]
        is_usable = type(size) is int and _SIZES[name] <= size <= _SIZE_MAX
        if not is_usable and not (size is None and name == "remote_block_size"):  # the same as decode's own
            return False
    return True


def _read_cached_tokens(usage: object) -> int:
    details = usage.get("prompt_tokens_details") if type(usage) is dict else None
    cached = details.get("cached_tokens") if type(details) is dict else None
    return cached if type(cached) is int and 0 < cached <= MAX_PROMPT_TOKENS else 0


def _is_aborted(response: dict[str, Any]) -> bool:
    choices = response.get("choices")
    if type(choices) is not list or not choices or type(choices[0]) is not dict:
        return False
    return bool(choices[0].get("finish_reason") == "abort")


def build_decode_body(
    request: RequestBody,
    kv_transfer_params: bytes | None,
    *,
    include_usage: bool = False,
    cache_salt: str = "",
) -> bytes:
    """Body of the decode leg: the client's bytes and, if given, the KV transfer parameters.

    `include_usage` requests the usage at the end of the stream. With
    `cache_salt` the engine reuses no prefix-cache entry of requests with another salt.
    """
    if cache_salt:
        fields = {**request.fields, "cache_salt": _combine_salts(request, cache_salt)}
        request = request.with_fields(fields)
    raw = _request_usage(request) if include_usage else request.raw
    if kv_transfer_params is None:
        return raw
    return _append_field(raw, b'"kv_transfer_params":' + kv_transfer_params, is_empty=not request.fields)


def _combine_salts(request: RequestBody, cache_salt: str) -> str:
    own = request.fields.get("cache_salt")
    return f"{cache_salt}/{own}" if own else cache_salt


def limit_output(request: RequestBody, limit: int, *, chat: bool) -> RequestBody:
    """The same request with at most `limit` output tokens for each choice."""
    fields = dict(request.fields)
    named = [name for name in _OUTPUT_LIMIT_FIELDS if fields.get(name) is not None] if chat else []
    for name in named or ["max_tokens"]:
        asked = fields.get(name)
        fields[name] = min(asked, limit) if type(asked) is int and asked > 0 else limit
    least = fields.get("min_tokens")
    if type(least) is int and least > limit:
        fields["min_tokens"] = limit
    return request.with_fields(fields)


def is_stream_without_usage(request: RequestBody) -> bool:
    """Whether the client requested a stream without the usage at its end."""
    if request.fields.get("stream") is not True:
        return False
    options = request.fields.get("stream_options")
    return options is None or (type(options) is dict and options.get("include_usage") in (None, False))


def _request_usage(request: RequestBody) -> bytes:
    """The client's body with `include_usage` set; other stream options stay."""
    if "stream_options" not in request.fields:
        return _append_field(request.raw, b'"stream_options":{"include_usage":true}', is_empty=False)
    options = dict(request.fields["stream_options"] or ())
    # vLLM ignores this option without include_usage, which the client did not set.
    options.pop("continuous_usage_stats", None)
    return orjson.dumps({**request.fields, "stream_options": {**options, "include_usage": True}})


def _append_field(raw: bytes, member: bytes, *, is_empty: bool) -> bytes:
    return b"%b%b%b}" % (raw[: raw.rindex(b"}")], b"" if is_empty else b",", member)
