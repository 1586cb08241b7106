"""Latencies and text of files as the commands print them."""

import pytest

from fulcrum_cli.terminal.output import format_columns, format_seconds
from fulcrum_cli.terminal.printable import make_printable


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.34, "340 ms"), (0.9994, "999 ms"), (0.9999, "1.00 s"), (1.25, "1.25 s")]
)
def test_a_latency_is_printed_in_milliseconds_unless_it_rounds_to_a_second(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("déjà 2 × – 5", "déjà 2 × – 5"),
        ("\x1b[2Ja\x9b\r\nb", "\\x1b[2Ja\\x9b\\r\\nb"),
        ("\u202egpj", "\\u202egpj"),
        ("\udcff", "\\udcff"),
    ],
)
def test_characters_that_are_not_printable_are_escaped(text: str, printed: str) -> None:
    assert make_printable(text) == printed
    assert format_columns((text, "b")) == [f"{printed}   b"]
