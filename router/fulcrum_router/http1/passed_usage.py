"""The usage in a response to `/v1/responses` or `/v1/messages`, which is forwarded as it comes.

A whole response is parsed, because it may repeat objects of its request, and the client may call any of them
`usage`. Of a stream, and of a response that is too large or came in chunks, the last counts are searched for.
Those are not sure: they may raise what the router has counted itself, and must not lower it.

`pass_through` adds the bytes of each such response and reads the counts at its end, for the tenant's tokens.
"""

import re

import orjson

from fulcrum_router.http1.engine_events import Usage

MAX_PARSED_BYTES = 1024 * 1024
"""A larger response is not kept."""
_TAIL_BYTES = 4_096
_MAX_TOKENS = 99_999_999
_PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
"""Parts of the prompt. `/v1/messages` counts cached tokens apart, `/v1/responses` does not name them so."""
_COUNT = re.compile(rb'"\s*:\s*(\d{1,8})(?![\d.eE])')


class PassedUsage:
    """Reads the usage from the bytes of one response."""

    __slots__ = ("_is_kept", "_kept_bytes", "_parts")

    def __init__(self, *, streaming: bool) -> None:
        self._is_kept = not streaming
        """Whether all of the response is kept, and not its last bytes only."""
        self._parts: list[bytes] = []
        self._kept_bytes = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes of the body as they came, with the framing of chunks."""
        self._parts.append(data)
        self._kept_bytes += len(data)
        if self._kept_bytes > (MAX_PARSED_BYTES if self._is_kept else 2 * _TAIL_BYTES):
            self._is_kept = False
            self._parts = [b"".join(self._parts)[-_TAIL_BYTES:]]
            self._kept_bytes = _TAIL_BYTES

    def read(self) -> tuple[Usage | None, bool]:
        """Return the usage, None if there is none, and whether it is sure: parsed, not searched for."""
        content = b"".join(self._parts)
        if self._is_kept:
            try:
                parsed = orjson.loads(content)
            except orjson.JSONDecodeError:
                pass  # it came in chunks
            else:
                return _read_object(parsed.get("usage") if type(parsed) is dict else None), True
        output_tokens = _find_last(content, b"output_tokens")
        if not output_tokens:
            return None, False
        return Usage(_find_last(content, b"input_tokens"), None, output_tokens), False


def _read_object(usage: object) -> Usage | None:
    if type(usage) is not dict:
        return None
    prompt_tokens = sum(_read_count(usage.get(name)) for name in _PROMPT_COUNTS)
    return Usage(prompt_tokens, None, _read_count(usage.get("output_tokens")))


def _read_count(count: object) -> int:
    return count if type(count) is int and 0 <= count <= _MAX_TOKENS else 0


def _find_last(content: bytes, name: bytes) -> int:
    """The last count with this name; 0: none."""
    start = content.rfind(b'"' + name + b'"')
    found = _COUNT.match(content, start + len(name) + 1) if start >= 0 else None
    return 0 if found is None else int(found[1])
