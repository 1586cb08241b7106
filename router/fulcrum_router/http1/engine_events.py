"""Byte patterns in the responses of vLLM: the abort, the usage and the end of a stream.

The decode leg searches an engine's bytes instead of parsing each event: JSON parsing per token would be the
largest part of the router's CPU time. vLLM writes compact JSON with stable key names; quotes in generated
text are escaped, so that text cannot match a pattern. `decode_response` uses most of it; `passed_usage` reads
the responses of other APIs.
"""

import re
from typing import NamedTuple

from fulcrum_router.http1.framing import find_chunks, frame_chunk

DONE_EVENT = b"data: [DONE]"
"""Last event of a stream."""
EMPTY_CHOICES = b'"choices":[]'
"""Occurs in the event with the usage and in no other."""
ERROR_EVENT, ERROR_BODY = b'data: {"error":', b'{"error":'
"""Beginning of an event, and of a whole response, with which an engine fails a request after status 200."""
EVENT_AND_CHUNK_END = b"\n\n\r\n"
"""End of a chunk that ends with an event. Text cannot match: line ends in it are escaped."""
ABORT = b'"abort"'
"""Cheap test before `ABORT_PATTERN`."""
ABORT_PATTERN = re.compile(rb'"finish_reason"\s*:\s*"abort"')

_ERROR_CODE = re.compile(rb'"code"\s*:\s*"?([45]\d\d)\b')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,8})(?![\d.eE])')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,8})(?![\d.eE])')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,8})(?![\d.eE])')
_MAX_USAGE_BYTES = 1024
_USUAL_USAGE = re.compile(
    rb'"usage":\{"prompt_tokens":(\d{1,8}),"total_tokens":\d{1,9},"completion_tokens":(\d{1,8}),'
    rb'"prompt_tokens_details":(?:null|\{"cached_tokens":(\d{1,8})\})'
)
"""The usage in vLLM's order: one match takes half the time of three searches."""


class Usage(NamedTuple):
    """The tokens of one request, as the engine counts them."""

    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the engine did not compute; None: not reported."""
    completion_tokens: int = 0
    """Output tokens of all choices."""


def parse_usage(content: bytes) -> Usage | None:
    """The last usage object in a response or an event; None if there is none."""
    start = max(content.rfind(b'"usage":{'), content.rfind(b'"usage": {'))
    if start < 0:
        return None
    found = _USUAL_USAGE.match(content, start)
    if found is not None:
        prompt_tokens, completion_tokens, cached_tokens = found.groups()
        return Usage(
            int(prompt_tokens), None if cached_tokens is None else int(cached_tokens), int(completion_tokens)
        )
    usage = content[start : start + _MAX_USAGE_BYTES]
    prompt = _PROMPT_TOKENS.search(usage)
    if prompt is None:
        return None
    cached, completion = _CACHED_TOKENS.search(usage), _COMPLETION_TOKENS.search(usage)
    return Usage(int(prompt[1]), int(cached[1]) if cached else None, int(completion[1]) if completion else 0)


def read_error_status(content: bytes) -> int:
    """The status of the first error in a response that has status 200; 500 if it names none."""
    found = _ERROR_CODE.search(content, content.find(ERROR_BODY))
    return int(found[1]) if found is not None else 500


def strip_usage_events(framed: bytes) -> bytes:
    """The chunks without the event that has no choices; all other events stay.

    `framed` holds whole chunks. A chunk that does not hold whole events is kept: a superfluous event does
    less harm than a lost one.
    """
    kept: list[bytes] = []
    position = 0
    for start, end, after in find_chunks(framed):
        content = framed[start:end]
        if EMPTY_CHOICES in content and content.startswith(b"data:") and content.endswith(b"\n\n"):
            events = content[:-2].split(b"\n\n")
            rest = b"".join(event + b"\n\n" for event in events if EMPTY_CHOICES not in event)
            kept.append(frame_chunk(rest) if rest else b"")
        else:
            kept.append(framed[position:after])
        position = after
    return b"".join((*kept, framed[position:]))


def has_no_token(framed: bytes) -> bool:
    """Whether the events hold no token: only `[DONE]`, the usage or comments.

    While vLLM shuts down it sends `[DONE]` alone on a new stream.
    """
    return framed.count(b"data:") == framed.count(DONE_EVENT) + framed.count(EMPTY_CHOICES)


def count_output_tokens(events: int, *, chat: bool) -> int:
    """Tokens in a whole stream of `events` events without a usage, taken as one token each.

    `[DONE]` and the first event of a chat (the role) carry none.
    """
    return max(0, events - 1 - chat)
