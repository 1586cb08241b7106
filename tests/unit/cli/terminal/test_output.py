"""Latencies as the commands print them."""

import pytest

from fulcrum_cli.terminal.output import format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.34, "340 ms"), (0.9994, "999 ms"), (0.9999, "1.00 s"), (1.25, "1.25 s")]
)
def test_a_latency_is_printed_in_milliseconds_unless_it_rounds_to_a_second(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
