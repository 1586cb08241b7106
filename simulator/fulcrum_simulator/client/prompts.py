"""Writes the HTTP requests of a workload: prompts of exact length, unique for each seed and index.

Prompts differ from their first byte on, so that prefix caches save no work; those of a workload with block
ids begin alike as far as their first ids are the same, if the sender knows how long a block is. They consist
of letters and digits, so that they need no escaping and their length in bytes is their length in the JSON
body. For a real model, which has a tokeniser of its own, they are token ids. `generator` calls it when a
request is due.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from fulcrum_simulator.text import BYTES_PER_TOKEN, count_tokens, prompt_digest, render_chat
from fulcrum_simulator.workload import WorkloadRequest

_CHAT_FRAME_BYTES = len(render_chat([{"role": "user", "content": ""}]))
CHAT_TOKENS_MIN = count_tokens(b"." * _CHAT_FRAME_BYTES) + 1
"""Shortest prompt, in tokens, that can be sent as a chat."""
_FIRST_TOKEN_ID = 32
"""Above the ids that vocabularies reserve; the 255 that follow exist in every vocabulary."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """An HTTP request ready to be sent, and the response that it must get."""

    path: str
    body: bytes
    digest: bytes | None
    """Digest of the prompt, which decides the text of the response; None if that text is not known."""
    input_tokens: int
    output_tokens: int
    tier: str = ""
    head_lines: str = ""
    """Header lines that say who asks, each with its line end."""


def prepare_request(
    request: WorkloadRequest, *, model: str, seed: int, index: int, chat: bool = False, block_tokens: int = 0
) -> PreparedRequest:
    """Write the `index`-th request of the run with this seed: 4 bytes of prompt for each input token.

    A prompt shorter than the chat template itself is sent as a plain completion. A request of a tier names
    its tier and tenant in headers. `block_tokens`: tokens of a block of `prefix_hash_ids`; 0: these are
    ignored, and the prompt begins as no other.
    """
    chat = chat and request.input_tokens >= CHAT_TOKENS_MIN
    size = request.input_tokens * BYTES_PER_TOKEN - (_CHAT_FRAME_BYTES if chat else 0)
    if block_tokens and request.prefix_hash_ids:
        text = _write_blocks(seed, request.prefix_hash_ids, block_tokens * BYTES_PER_TOKEN)[:size]
    else:
        text = _write_text(f"{seed}/{index}", size)
    prompt = render_chat([{"role": "user", "content": text}]) if chat else text.encode()
    prompt_field = f'"messages":[{{"role":"user","content":"{text}"}}]' if chat else f'"prompt":"{text}"'
    streaming = '"stream":true,"stream_options":{"include_usage":true}'
    tokens = request.output_tokens
    body = f'{{"model":"{model}",{prompt_field},"max_tokens":{tokens},"temperature":0,{streaming}}}'
    return PreparedRequest(
        path="/v1/chat/completions" if chat else "/v1/completions",
        body=body.encode(),
        digest=prompt_digest(prompt),
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        tier=request.tier,
        head_lines=_write_caller_lines(request),
    )


def prepare_token_request(request: WorkloadRequest, *, model: str, seed: int, index: int) -> PreparedRequest:
    """Write the `index`-th request of the run with this seed for a real model: a prompt of token ids.

    The response must have all its tokens, whatever they are (`ignore_eos`, an extension of vLLM).
    """
    pattern = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=64).digest()
    ids = [_FIRST_TOKEN_ID + byte for byte in pattern]
    prompt = (ids * (request.input_tokens // len(ids) + 1))[: request.input_tokens]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return PreparedRequest(
        path="/v1/completions",
        body=orjson.dumps(body),
        digest=None,
        input_tokens=request.input_tokens,
        output_tokens=request.output_tokens,
        tier=request.tier,
        head_lines=_write_caller_lines(request),
    )


def _write_caller_lines(request: WorkloadRequest) -> str:
    if not request.tier:
        return ""
    tenant = f"x-tenant-id: {request.tenant}\r\n" if request.tenant else ""
    return f"x-customer-tier: {request.tier}\r\n{tenant}"


def _write_blocks(seed: int, ids: Iterable[int], size: int) -> str:
    """Text of blocks with these ids, each of `size` bytes."""
    return "".join(_write_text(f"{seed}/block {number}", size) for number in ids)


def _write_text(name: str, size: int) -> str:
    """Text of `size` bytes that only this name has."""
    pattern = hashlib.blake2b(name.encode(), digest_size=32).hexdigest()
    return (pattern * (size // len(pattern) + 1))[:size]
