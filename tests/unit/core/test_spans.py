"""The W3C trace context is read strictly: what is not valid begins a new trace."""

import pytest

from fulcrum_core.spans import TraceParent, format_traceparent, parse_traceparent

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
VALID = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        pytest.param(VALID, TraceParent(TRACE, SPAN, True), id="sampled"),
        pytest.param(VALID[:-1] + b"0", TraceParent(TRACE, SPAN, False), id="not sampled"),
        pytest.param(b"01" + VALID[2:] + b"-more", TraceParent(TRACE, SPAN, True), id="of a later version"),
        pytest.param(VALID + b"-more", None, id="version 00 with another field"),
        pytest.param(b"ff" + VALID[2:], None, id="version ff"),
        pytest.param(VALID.upper(), None, id="upper case"),
        pytest.param(b"00-" + b"0" * 32 + VALID[35:], None, id="no trace"),
        pytest.param(VALID[:36] + b"0" * 16 + VALID[52:], None, id="no span"),
        pytest.param(VALID[:-3], None, id="no flags"),
        pytest.param(b"", None, id="empty"),
    ],
)
def test_a_trace_parent_is_parsed(value: bytes, parsed: TraceParent | None) -> None:
    assert parse_traceparent(value) == parsed


def test_a_formatted_trace_parent_is_parsed_again() -> None:
    assert parse_traceparent(format_traceparent(7, 8)) == TraceParent(7, 8, True)
