"""Hash the beginning of a request's prompt in blocks, for the index of prefix caches.

Hashed is the prompt as JSON, images and tools included, without knowing its tokens. Each hash includes all
blocks before it, the model (or adapter), the client's cache salt and a secret of this process: a client
cannot find two prompts with one hash. No text is kept.

Blocks end at the same places of all prompts. They become longer with their distance from the beginning, so
that even the longest prompt has few. `data_path.request` calls it only if `dispatch.prefixAware` is set; the
index is `policy.prefix_index`.
"""

import os
from typing import Any, Final

import orjson

from fulcrum_router.http1.bodies import RequestBody
from fulcrum_router.policy.prefix_index import NO_PREFIX, PromptPrefix


def _list_ends() -> tuple[int, ...]:
    """512 bytes, then 1 KiB up to 16 KiB, then an eighth of the last power of 2."""
    ends, step = [512], 1024
    while ends[-1] < 1 << 26:
        end = 1024 if ends[-1] == 512 else ends[-1] + step
        ends.append(end)
        if end >= 1 << 14 and end & (end - 1) == 0:
            step = end >> 3
    return tuple(ends)


BLOCK_ENDS: Final = _list_ends()
"""Where blocks end, in bytes. A mean token has 4 bytes, a block of an engine 16 tokens."""
_LEAST_IDS = 128
"""Fewest token ids of a prompt with a block."""
_CONTEXT_FIELDS = frozenset(
    {
        *("tools", "documents", "functions", "tool_choice", "response_format"),
        *("chat_template", "chat_template_kwargs", "mm_processor_kwargs"),
    }
)
"""Fields that templates write into the prompt, or that change what they write."""
_LEFT_OUT = frozenset({"prompt_embeds", "truncate_prompt_tokens"})
"""Fields with which a prompt does not begin with its text."""
_SECRET: Final = os.urandom(16)


def build_prefix(body: RequestBody, *, tokens: int, chat: bool) -> PromptPrefix:
    """Divide the prompt of a request into blocks.

    Args:
        body: The request.
        tokens: Its prompt tokens, as estimated.
        chat: Whether its prompt are messages.
    """
    fields = body.fields
    if body.prompt_bytes < BLOCK_ENDS[0] and body.prompt_id_count < _LEAST_IDS:
        return NO_PREFIX
    if body.prompts > 1 or not _LEFT_OUT.isdisjoint(fields):
        return NO_PREFIX
    try:
        data = orjson.dumps(fields.get("messages" if chat else "prompt"))
        seed = _hash_context(fields)
    except orjson.JSONEncodeError:  # nested too deeply
        return NO_PREFIX
    size = len(data)
    hashes: list[int] = []
    start, key = 0, seed
    for end in BLOCK_ENDS:
        if end > size:
            break
        key = hash((key, data[start:end]))
        hashes.append(key)
        start = end
    return PromptPrefix(hashes, BLOCK_ENDS, tokens / size)


def _hash_context(fields: dict[str, Any]) -> int:
    """Hash what a cached block depends on besides the prompt before it."""
    names = orjson.dumps((fields.get("model"), fields.get("cache_salt")))  # may be any JSON, of any length
    if _CONTEXT_FIELDS.isdisjoint(fields):
        return hash((_SECRET, names))
    return hash((_SECRET, names, *(orjson.dumps((n, fields.get(n))) for n in sorted(_CONTEXT_FIELDS))))
