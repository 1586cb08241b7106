"""Formats what several commands print: documents for programs; durations, tables and lines for people.

Commands print the result themselves. What only one command shows is formatted there.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import yaml

from fulcrum_cli.terminal.printable import make_printable
from fulcrum_core.api.meta import Condition, format_duration
from fulcrum_core.api.pdassignment import PDAssignment


class OutputFormat(StrEnum):
    """Values of `--output`."""

    JSON = "json"
    YAML = "yaml"


def render_document(document: Mapping[str, Any], output_format: OutputFormat) -> str:
    """Return the document in that format, without a final newline."""
    if output_format is OutputFormat.JSON:
        return json.dumps(document, indent=2, ensure_ascii=False)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110).rstrip("\n")


def format_age(seconds: float) -> str:
    """Format a duration for people: 90 seconds as `1m30s`; less than a second as `1s`.

    From ten minutes on only whole minutes are shown, from three hours hours, from two days days.
    """
    for unit_s, letter, minimum in ((86400, "d", 2), (3600, "h", 3), (60, "m", 10)):
        if seconds >= unit_s * minimum:
            return f"{seconds // unit_s:.0f}{letter}"
    return format_duration(max(1.0, round(seconds)))


def format_seconds(seconds: float) -> str:
    """Format a latency: `340 ms`, `1.25 s`."""
    milliseconds = round(seconds * 1000)
    return f"{milliseconds} ms" if milliseconds < 1000 else f"{seconds:.2f} s"


def format_columns(*rows: Sequence[str]) -> list[str]:
    """Align the cells of the rows in columns that are three spaces apart, as kubectl does.

    Characters that are not printable are replaced.
    """
    printable = [[make_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*printable, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in printable
    ]


def condition_lines(conditions: Sequence[Condition]) -> list[str]:
    """Return a table of the conditions and an empty line; nothing if there are no conditions."""
    rows = [(c.type, c.status, c.reason, c.message) for c in conditions]
    return [*format_columns(("CONDITION", "STATUS", "REASON", "MESSAGE"), *rows), ""] if rows else []


def refusal_lines(assignment: PDAssignment | None, *, now_s: float) -> list[str]:
    """Return one line for each flip or cordon that is refused now, with the reason and the time left."""
    entries = sorted(assignment.spec.roles.items()) if assignment else []
    return [
        f"refused {name}{f' → {entry.refused.role}' if entry.refused.role else ''}: {entry.refused.reason}, "
        f"for {format_age(entry.refused.until - now_s)} more"
        for name, entry in entries
        if entry.refused and entry.refused.until > now_s
    ]
