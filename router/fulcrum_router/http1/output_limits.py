"""How many output tokens a client's request allows, from its parsed body; as vLLM reads the fields.

The legs take time limits and expected tokens from it; `bodies.limit_output` is what changes a request.
"""

from collections.abc import Mapping
from typing import Any

_DEFAULT_COMPLETION_TOKENS = 16
"""Output tokens of a completion that sets no limit; a chat may use the rest of the context."""
MAX_N = 16_384
"""Largest number of answers to a prompt, as in vLLM (`VLLM_MAX_N_SEQUENCES`)."""
_PASSED_LIMITS = {b"/v1/responses": "max_output_tokens", b"/v1/messages": "max_tokens"}


def is_stream(fields: Mapping[str, Any]) -> bool:
    """Whether the client requested a stream."""
    return bool(fields.get("stream"))


def find_output_limit(fields: Mapping[str, Any], *, chat: bool) -> int | None:
    """Return the largest number of output tokens of one choice; None: the rest of the engine's context."""
    limit = fields.get("max_completion_tokens") if chat else None
    limit = fields.get("max_tokens") if limit is None else limit
    if type(limit) is int and limit > 0:
        return limit
    return None if chat else _DEFAULT_COMPLETION_TOKENS


def find_passed_limit(fields: Mapping[str, Any], *, path: bytes) -> int | None:
    """Return the largest number of output tokens of a request that is passed through; None: not known."""
    name = _PASSED_LIMITS.get(path)
    limit = None if name is None else fields.get(name)
    return limit if type(limit) is int and limit > 0 else None


def find_tokens_per_event(fields: Mapping[str, Any]) -> int:
    """Return how many output tokens the engine collects for each event of the stream."""
    interval = fields.get("stream_interval")
    return interval if type(interval) is int and interval > 1 else 1


def estimate_streamed_tokens(events: int, *, tokens_per_event: int, most: int) -> int:
    """Estimate the output tokens of the first `events` events of a stream that may have `most` tokens."""
    return max(events, min(events * tokens_per_event, most))


def count_prompts(fields: Mapping[str, Any]) -> int:
    """Return how many prompts the request has, embedded ones included; at least 1."""
    prompt, embedded = fields.get("prompt"), fields.get("prompt_embeds")
    prompts = 0 if prompt is None else 1
    if type(prompt) is list and prompt and type(prompt[0]) is not int:
        prompts = len(prompt)
    if type(embedded) is list:
        prompts += len(embedded)
    elif type(embedded) is str:
        prompts += 1
    return prompts or 1


def count_choices(fields: Mapping[str, Any]) -> int:
    """Return how many texts the engine generates for the request: `n` for each prompt."""
    n = fields.get("n")
    return count_prompts(fields) * (n if type(n) is int and n > 0 else 1)
