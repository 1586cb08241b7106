"""Parses the bodies of completion, chat and tokenize requests, and rejects them with vLLM's error objects.

Most checks and messages are vLLM's. Rejected by the simulator, but not by vLLM: more than one prompt or
answer, and work that does not fit the role that the engine was started with.

Parsed by hand: a validation library would cost more than the rest of the request. Fields that do not change
what the engine does are ignored, as vLLM ignores unknown fields. `app` calls it for each body; the engine
model itself checks what its memory can hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from fulcrum_simulator.text import BYTES_PER_TOKEN, count_tokens, render_chat

COMPLETION_DEFAULT_TOKENS = 16
"""vLLM's default of `max_tokens` for completions."""


class RequestRejected(Exception):
    """The request is not served: the response is vLLM's error object with this status, type and parameter."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A validated request. `kv_transfer_params` is kept as the client sent it."""

    chat: bool
    model: str
    prompt: bytes
    prompt_tokens: int
    max_tokens: int
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str
    kv_transfer_params: Mapping[str, Any] | None


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        RequestRejected: with 400, if `raw` is anything else.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRejected(f"body (line {error.lineno}, column {error.colno}) is not JSON") from None
    if not isinstance(body, dict):
        raise RequestRejected("body must be a JSON object")
    return body


def parse_generate_request(
    body: Mapping[str, Any], *, chat: bool, model: str, max_model_tokens: int
) -> GenerateRequest:
    """Parse and validate a request for an engine that serves `model`.

    Raises:
        RequestRejected: with 404 for another model; with 400 for an invalid field or a prompt that leaves no
            room for one output token.
    """
    _check_model(body.get("model"), model)
    prompt = _render_chat_prompt(body) if chat else _encode_prompt(body.get("prompt"))
    prompt = _truncate(prompt, _read_int(body, "truncate_prompt_tokens", 0))
    prompt_tokens = count_tokens(prompt)
    return GenerateRequest(
        chat=chat,
        model=model,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=_max_tokens(body, prompt_tokens=prompt_tokens, chat=chat, limit=max_model_tokens),
        stream=_read_bool(body, "stream"),
        include_usage=_include_usage(body),
        priority=_read_int(body, "priority", 0),
        cache_salt=_read_text(body, "cache_salt"),
        kv_transfer_params=_read_object(body, "kv_transfer_params"),
    )


def parse_prompt(body: Mapping[str, Any]) -> bytes:
    """Return the prompt of a `/tokenize` body: `prompt`, or `messages` as in a chat."""
    return _render_chat_prompt(body) if "messages" in body else _encode_prompt(body.get("prompt"))


def check_role(parsed: GenerateRequest, role: str | None) -> None:
    """Check that an engine started for one role serves the request. None serves both roles.

    Raises:
        RequestRejected: with 400, if the request belongs to the other role.
    """
    is_prefill = bool(parsed.kv_transfer_params and parsed.kv_transfer_params.get("do_remote_decode"))
    if role is not None and is_prefill != (role == "prefill"):
        raise RequestRejected(
            f"This engine was started with --role {role} and serves no other requests.",
            param="kv_transfer_params",
        )


def _check_model(requested: object, served: str) -> None:
    if requested is not None and requested != served:
        raise RequestRejected(
            f"The model `{requested}` does not exist.", status=404, kind="NotFoundError", param="model"
        )


def _render_chat_prompt(body: Mapping[str, Any]) -> bytes:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise RequestRejected("messages must be a list of at least one message object", param="messages")
    read = [{**message, "content": _read_content(message)} for message in messages]
    continue_final = _read_bool(body, "continue_final_message")
    if continue_final and body.get("add_generation_prompt", True):
        raise RequestRejected(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )
    return render_chat(read, continue_final=continue_final)


def _read_content(message: Mapping[str, Any]) -> str:
    """Return the text of one message; of a list of parts, the text parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if content is None or isinstance(content, str):
        return content or ""
    raise RequestRejected("messages.content must be a string or a list of parts", param="messages")


def _encode_prompt(prompt: object) -> bytes:
    """Encode text as UTF-8 and token ids as four bytes each, so that both have the right token count."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt.encode(errors="surrogatepass")
    if (
        isinstance(prompt, list)
        and prompt
        and all(type(item) is int and 0 <= item < 2**32 for item in prompt)
    ):
        return b"".join(item.to_bytes(BYTES_PER_TOKEN, "little") for item in prompt)
    raise RequestRejected("prompt must be one non-empty text or list of token ids", param="prompt")


def _truncate(prompt: bytes, tokens: int) -> bytes:
    """Return the last `tokens` of a prompt; 0: all of it."""
    return prompt[-tokens * BYTES_PER_TOKEN :] if tokens > 0 else prompt


def _max_tokens(body: Mapping[str, Any], *, prompt_tokens: int, chat: bool, limit: int) -> int:
    room = limit - prompt_tokens
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    name = next((name for name in names if body.get(name) is not None), names[-1])
    tokens = _read_int(body, name, room if chat else min(room, COMPLETION_DEFAULT_TOKENS))
    if room < 1 or tokens > room:
        raise RequestRejected(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{max(tokens, 1)} output tokens and your prompt contains {prompt_tokens} input tokens, for a "
            f"total of {max(tokens, 1) + prompt_tokens} tokens. Please reduce the length of the input prompt "
            "or the number of requested output tokens.",
            param="input_tokens",
        )
    if tokens < 1:
        raise RequestRejected(f"{name} must be at least 1, got {tokens}.", param=name)
    _check_min_tokens(body, tokens)
    _check_n(body)
    return tokens


def _check_min_tokens(body: Mapping[str, Any], max_tokens: int) -> None:
    min_tokens = _read_int(body, "min_tokens", 0)
    if not 0 <= min_tokens <= max_tokens:
        raise RequestRejected(
            f"min_tokens must be between 0 and max_tokens={max_tokens}, got {min_tokens}.", param="min_tokens"
        )


def _check_n(body: Mapping[str, Any]) -> None:
    n = _read_int(body, "n", 1)
    if n != 1:
        raise RequestRejected(f"n must be 1 on a simulated engine, got {n}.", param="n")


def _include_usage(body: Mapping[str, Any]) -> bool:
    options = _read_object(body, "stream_options")
    if options is not None and not body.get("stream"):
        raise RequestRejected(
            "Stream options can only be defined when `stream=True`.", param="stream_options"
        )
    return bool(options and options.get("include_usage"))


def _read_bool(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestRejected(f"{name} must be true or false", param=name)
    return bool(value)


def _read_int(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise RequestRejected(f"{name} must be a whole number", param=name)
    return value


def _read_text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestRejected(f"{name} must be a string", param=name)
    return value or ""


def _read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise RequestRejected(f"{name} must be an object", param=name)
    return value
