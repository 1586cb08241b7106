"""Deterministic text: token counts of prompts, and the output text that belongs to a prompt.

Shared by the simulated engine and the load generator. The output is a pure function of the prompt whose KV
cache the engine holds. If a KV transfer delivers the blocks of another prompt, the output is that prompt's,
and a client that has its own prompt detects the wrong text. A prompt that ends with the beginning of its own
output is continued with the rest, as greedy decoding does.
"""

import hashlib
import re
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


_OUTPUT_AT_END = re.compile(rb"[A-Z][a-z]{3}(?: [a-z]{3})*\Z")


def output_token(digest: bytes, index: int) -> str:
    """Return the `index`-th output token (from 0) for the prompt with this digest.

    The first is a word with a capital letter, each other one a space and three letters.
    """
    letters = hashlib.blake2b(digest + index.to_bytes(4, "big"), digest_size=4).digest()
    word = "".join(chr(ord("a") + byte % 26) for byte in letters)
    return f" {word[1:]}" if index else word.capitalize()


def output_text(digest: bytes, tokens: int) -> str:
    """Return the first `tokens` output tokens for the prompt with this digest."""
    return "".join(output_token(digest, index) for index in range(tokens))


def split_off_output(prompt: bytes) -> tuple[bytes, int]:
    """Split a prompt that ends with output for what is before: return that prompt, and the output's tokens.

    Without such an end: the whole prompt, and 0.
    """
    found = _OUTPUT_AT_END.search(prompt) if prompt[-1:].islower() else None
    if found is None:
        return prompt, 0
    before, output = prompt[: found.start()], found[0]
    tokens = count_tokens(output)
    is_output = output_text(prompt_digest(before), tokens).encode() == output
    return (before, tokens) if is_output else (prompt, 0)


def render_chat(messages: Sequence[Mapping[str, Any]], *, continue_final: bool = False) -> bytes:
    """Render a chat as a prompt: one `<|role|>content` line per message, then the assistant's tag.

    `continue_final` leaves the last message open, for more of it.
    """
    lines = [f"<|{message.get('role', 'user')}|>{message.get('content') or ''}\n" for message in messages]
    text = "".join(lines)
    return (text[:-1] if continue_final else text + "<|assistant|>").encode()
