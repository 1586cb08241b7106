"""Says in the usage of a response that admission limited its output: `"degraded_max_tokens": N`.

Without it a client that reads only the body takes a short answer for the model's choice.

`data_path.degraded_response` calls it with the last bytes of a response; everything else is forwarded
unchanged.
"""

import re
from dataclasses import replace

from fulcrum_router.http1.engine_events import EMPTY_CHOICES
from fulcrum_router.http1.framing import ResponseHead, find_chunks, frame_chunk

_USAGE = re.compile(rb'"usage":\s?\{(?!\})')
_LENGTH_LINE = re.compile(rb"^content-length:[^\r\n]*", re.IGNORECASE | re.MULTILINE)


def add_output_limit(content: bytes, limit: int) -> bytes:
    """Add the limit to the last usage object of a response or an event; the same bytes if there is none."""
    found = list(_USAGE.finditer(content))
    if not found:
        return content
    start = found[-1].end()
    return b'%b"degraded_max_tokens":%d,%b' % (content[:start], limit, content[start:])


def add_limit_to_stream(framed: bytes, limit: int) -> bytes:
    """Add the limit to the usage event in whole chunks; all other chunks stay as they are."""
    sent: list[bytes] = []
    position = 0
    for start, end, after in find_chunks(framed):
        content = framed[start:end]
        is_usage = EMPTY_CHOICES in content
        sent.append(frame_chunk(add_output_limit(content, limit)) if is_usage else framed[position:after])
        position = after
    return b"".join((*sent, framed[position:]))


def set_length(head: ResponseHead, length: int) -> ResponseHead:
    """The head of a response whose body has another length."""
    line = b"content-length: %d" % length
    return replace(head, header_lines=_LENGTH_LINE.sub(line, head.header_lines, count=1), length=length)
