"""Deterministic text: token counts of prompts, and the output text that belongs to a prompt.

Shared by the simulated engine and the load generator. The output is a pure function of the prompt whose KV
cache the engine holds. If a KV transfer delivers the blocks of another prompt, the output is that prompt's,
and a client that has its own prompt detects the wrong text.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

BYTES_PER_TOKEN = 4
"""Bytes of text in one token, in prompts and in outputs."""


def count_tokens(text: bytes) -> int:
    """Return the number of tokens in `text`: one for every four bytes, rounded up."""
    return -(-len(text) // BYTES_PER_TOKEN)


def prompt_digest(prompt: bytes) -> bytes:
    """Return the 16-byte digest that identifies the whole prompt in KV transfers and output tokens."""
    return hashlib.blake2b(prompt, digest_size=16).digest()


def output_token(digest: bytes, index: int) -> str:
    """Return the `index`-th output token (from 0) for the prompt with this digest: three letters and a
    space.
    """
    letters = hashlib.blake2b(digest + index.to_bytes(4, "big"), digest_size=3).digest()
    return "".join(chr(ord("a") + byte % 26) for byte in letters) + " "


def output_text(digest: bytes, tokens: int) -> str:
    """Return the first `tokens` output tokens for the prompt with this digest."""
    return "".join(output_token(digest, index) for index in range(tokens))


def render_chat(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Render a chat as a prompt: one `<|role|>content` line per message, then the assistant's tag."""
    lines = [f"<|{message.get('role', 'user')}|>{message.get('content') or ''}\n" for message in messages]
    return ("".join(lines) + "<|assistant|>").encode()
