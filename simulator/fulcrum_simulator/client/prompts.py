"""Writes the HTTP requests of a workload: prompts of exact length, unique for each seed and index.

Prompts differ from their first byte on, so that prefix caches save no work. They consist of letters and
digits, so that they need no escaping and their length in bytes is their length in the JSON body. `generator`
calls it when a request is due.
"""

import hashlib
from dataclasses import dataclass

from fulcrum_simulator.text import BYTES_PER_TOKEN, count_tokens, prompt_digest, render_chat
from fulcrum_simulator.workload import WorkloadRequest

_CHAT_FRAME_BYTES = len(render_chat([{"role": "user", "content": ""}]))
CHAT_TOKENS_MIN = count_tokens(b"." * _CHAT_FRAME_BYTES) + 1
"""Shortest prompt, in tokens, that can be sent as a chat."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """An HTTP request ready to be sent, and the response that it must get."""

    path: str
    body: bytes
    digest: bytes
    input_tokens: int
    output_tokens: int
    tier: str = ""
    head_lines: str = ""
    """Header lines that say who asks, each with its line end."""


def prepare_request(
    request: WorkloadRequest, *, model: str, seed: int, index: int, chat: bool = False
) -> PreparedRequest:
    """Write the `index`-th request of the run with this seed: 4 bytes of prompt for each input token.

    A prompt shorter than the chat template itself is sent as a plain completion. A request of a tier names
    its tier and tenant in headers.
    """
    chat = chat and request.input_tokens >= CHAT_TOKENS_MIN
    size = request.input_tokens * BYTES_PER_TOKEN - (_CHAT_FRAME_BYTES if chat else 0)
    text = _unique_text(seed, index, size)
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


def _write_caller_lines(request: WorkloadRequest) -> str:
    if not request.tier:
        return ""
    tenant = f"x-tenant-id: {request.tenant}\r\n" if request.tenant else ""
    return f"x-customer-tier: {request.tier}\r\n{tenant}"


def _unique_text(seed: int, index: int, size: int) -> str:
    pattern = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=32).hexdigest()
    return (pattern * (size // len(pattern) + 1))[:size]
