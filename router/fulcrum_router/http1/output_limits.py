"""How many output tokens a client's request allows, from its parsed body; as vLLM reads the fields."""

from collections.abc import Mapping
from typing import Any

_DEFAULT_COMPLETION_TOKENS = 16
"""Output tokens of a completion that sets no limit; a chat may use the rest of the context."""
MAX_N = 16_384
"""Largest number of answers to a prompt, as in vLLM (`VLLM_MAX_N_SEQUENCES`)."""


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


def count_prompts(fields: Mapping[str, Any]) -> int:
    """Return how many prompts the request has."""
    prompt = fields.get("prompt")
    several = type(prompt) is list and bool(prompt) and type(prompt[0]) is not int
    return len(prompt) if several and prompt is not None else 1


def count_choices(fields: Mapping[str, Any]) -> int:
    """Return how many texts the engine generates for the request: `n` for each prompt."""
    n = fields.get("n")
    return count_prompts(fields) * (n if type(n) is int and n > 0 else 1)
