"""Formats vLLM's JSON responses and server-sent events, byte for byte where a parser could depend on it.

A token's event is a constant head, the token and a constant tail. The head is built once per request, and the
tokens of `fulcrum_simulator.text` need no escaping. `app` and `token_sinks` send them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from fulcrum_core.openai_errors import build_error_object

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
"""vLLM's message of an EngineDeadError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Token counts of a response. `cached_tokens` are prompt tokens that this engine did not compute."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Return the `usage` object, with `prompt_tokens_details` as under
        `--enable-prompt-tokens-details`.
        """
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ResponseTemplate:
    """The constant parts of one request's response: id, model, time, completion or chat."""

    def __init__(self, *, response_id: str, model: str, created_s: int, chat: bool) -> None:
        self._common = {"id": response_id, "created": created_s, "model": model}
        self._chat = chat
        if chat:
            self._head = self._chunk_head("chat.completion.chunk") + b'{"index":0,"delta":{"content":"'
            self._tail = b'"},"logprobs":null,"finish_reason":null}]}\n\n'
        else:
            self._head = self._chunk_head("text_completion") + b'{"index":0,"text":"'
            self._tail = b'","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'

    def _chunk_head(self, kind: str) -> bytes:
        head = orjson.dumps({"id": self._common["id"], "object": kind, **self._common})
        return b"data: " + head[:-1] + b',"choices":['

    def format_opening(self) -> bytes:
        """Format the chat event with the assistant's role; empty for a completion."""
        if not self._chat:
            return b""
        delta = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return self._chunk_head("chat.completion.chunk") + delta + b"]}\n\n"

    def format_token(self, text: str) -> bytes:
        """Format the event of a token that is not the last."""
        return self._head + text.encode() + self._tail

    def format_last_token(self, text: str, finish_reason: str) -> bytes:
        """Format the event with the finish reason and the last token, which may be empty."""
        reason = finish_reason.encode()
        if self._chat:
            tail = b'"},"logprobs":null,"finish_reason":"' + reason + b'","stop_reason":null}]}\n\n'
        else:
            tail = (
                b'","logprobs":null,"finish_reason":"' + reason + b'","stop_reason":null}],"usage":null}\n\n'
            )
        return self._head + text.encode() + tail

    def format_usage(self, usage: TokenUsage) -> bytes:
        """Format the event without choices that `stream_options.include_usage` adds."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._chunk_head(kind) + b'],"usage":' + orjson.dumps(usage.as_dict()) + b"}\n\n"

    def format_response(
        self,
        text: str,
        *,
        finish_reason: str,
        usage: TokenUsage,
        kv_transfer_params: Mapping[str, Any] | None,
    ) -> bytes:
        """Format the JSON response of a request that does not stream."""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        return orjson.dumps(
            {
                "id": self._common["id"],
                "object": "chat.completion" if self._chat else "text_completion",
                **self._common,
                "choices": [choice],
                "system_fingerprint": None,
                "usage": usage.as_dict(),
                "kv_transfer_params": kv_transfer_params,
            }
        )


def error_object(message: str, *, kind: str, status: int, param: str | None = None) -> bytes:
    """Format vLLM's error body."""
    return orjson.dumps(build_error_object(message, error_type=kind, status=status, param=param))


def build_vllm_error_event(message: str, *, kind: str, status: int) -> bytes:
    """Imitate the event that vLLM sends when a stream fails: an error of the engine, with vLLM's fields.

    The router's own event (`build_broken_stream_event`) reports that the connection to an engine broke.
    """
    return b"data: " + error_object(message, kind=kind, status=status) + b"\n\n"
