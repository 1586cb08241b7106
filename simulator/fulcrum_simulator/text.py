"""Deterministic text: what a prompt is counted as, and what an engine answers to it.

The simulated engine's answer is a pure function of the prompt whose KV cache it holds. If a hand-off
delivers another prompt's blocks, the answer is that other prompt's, so a client that knows its own
prompt sees a wrong hand-off as wrong text. The load generator and the engine share these few lines
and nothing else.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

BYTES_PER_TOKEN = 4


def count_tokens(text: bytes) -> int:
    """Number of tokens in `text`: one for every four bytes, rounded up."""
    return -(-len(text) // BYTES_PER_TOKEN)


def prompt_digest(prompt: bytes) -> bytes:
    """16 bytes that stand for the whole prompt in hand-offs and answers."""
    return hashlib.blake2b(prompt, digest_size=16).digest()


def output_token(digest: bytes, index: int) -> str:
    """The `index`-th token (from 0) of the answer to the prompt with this digest: three letters, a space."""
    letters = hashlib.blake2b(digest + index.to_bytes(4, "big"), digest_size=3).digest()
    return "".join(chr(ord("a") + byte % 26) for byte in letters) + " "


def output_text(digest: bytes, tokens: int) -> str:
    """The first `tokens` tokens of the answer to the prompt with this digest."""
    return "".join(output_token(digest, index) for index in range(tokens))


def render_chat(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The prompt of a chat request: one `<|role|>content` line per message, then the assistant's tag."""
    lines = [f"<|{message.get('role', 'user')}|>{message.get('content') or ''}\n" for message in messages]
    return ("".join(lines) + "<|assistant|>").encode()
