"""Reads trace files, plain or gzip, CSV or JSON lines, as records of named fields; see `layouts`.

A file is read line by line, so that its size does not matter, and no line may be longer than a limit.
`traces` turns the records into requests and checks them.
"""

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.workload.layouts import CSV_LAYOUTS, JSON_LAYOUTS, FileLayout, find_layout

LINE_LENGTH_MAX = 1 << 20
"""Longest line of a file, in characters."""
_VALUE_LENGTH_MAX = 60
"""Most characters of a value that an error repeats."""


class Cell(NamedTuple):
    """One value of the file and its position."""

    place: str
    field: str
    value: object

    @property
    def text(self) -> str:
        """The value as text; empty where the field is missing."""
        return "" if self.value is None else str(self.value)

    def make_error(self, rule: str) -> InvalidInput:
        """Return the error of a value that breaks `rule`."""
        return InvalidInput(f"{self.place} {self.field}", _shorten(self.text) or "empty", rule)


class Record(NamedTuple):
    """One request as written, and its position."""

    place: str
    fields: Mapping[str, Any]

    def cell(self, field: str) -> Cell:
        """Return the value of a field."""
        return Cell(self.place, field, self.fields.get(field))


@contextmanager
def open_records(path: Path) -> Iterator[tuple[FileLayout, Iterator[Record]]]:
    """Open a file, and yield its layout and an iterator of its records.

    Raises:
        InvalidInput: naming file, line, value and rule; also while the records are read.
    """
    with _open_text(path) as file:
        lines = _limit_lines(path, file)
        first, blank = next(lines, ""), 0
        while first and not first.strip():
            first, blank = next(lines, ""), blank + 1
        read = _read_json if first.lstrip().startswith("{") else _read_csv
        yield read(path, chain((first,), lines), blank)


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        opener = gzip.open if packed else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except FileNotFoundError:
        raise InvalidInput(str(path), "missing", "must be a file that exists") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidInput(
            str(path), _first_line(error), "must be a readable text file, plain or gzip"
        ) from error


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].lower()


def _limit_lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(LINE_LENGTH_MAX + 1):
        number += 1
        if len(line) > LINE_LENGTH_MAX:
            rule = f"must be at most {LINE_LENGTH_MAX} characters long"
            raise InvalidInput(f"{path}:{number}", _shorten(line), rule)
        yield line


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _VALUE_LENGTH_MAX else f"{text[:_VALUE_LENGTH_MAX]}…"


def _read_csv(path: Path, lines: Iterator[str], before: int) -> tuple[FileLayout, Iterator[Record]]:
    """Read a header and rows; `before` is the number of blank lines before them."""
    rows = csv.DictReader(lines, strict=True)
    try:
        columns = list(rows.fieldnames or ())
    except csv.Error as error:
        raise InvalidInput(f"{path}:{before + 1}", error, "must be CSV") from error
    layout = find_layout(columns, CSV_LAYOUTS)
    if layout is None:
        raise _make_layout_error(f"{path}:{before + 1}", columns, CSV_LAYOUTS)
    twice = next((name for name, count in Counter(filter(None, columns)).items() if count > 1), None)
    if twice is not None:
        raise InvalidInput(f"{path}:{before + 1}", _shorten(twice), "must name every column once")
    return layout, _read_rows(path, rows, before)


def _read_rows(path: Path, rows: "csv.DictReader[str]", before: int) -> Iterator[Record]:
    try:
        for row in rows:
            place = f"{path}:{before + rows.line_num}"
            if rows.restkey in row:
                rule = "must not hold more values than the header names"
                raise InvalidInput(place, _shorten(", ".join(row[rows.restkey])) or "empty", rule)
            yield Record(place, row)
    except csv.Error as error:
        raise InvalidInput(f"{path}:{before + rows.line_num + 1}", error, "must be CSV") from error


def _read_json(path: Path, lines: Iterator[str], before: int) -> tuple[FileLayout, Iterator[Record]]:
    records = _read_objects(path, lines, before)
    first = next(records)
    layout = find_layout(first.fields, JSON_LAYOUTS)
    if layout is None:
        raise _make_layout_error(first.place, list(first.fields), JSON_LAYOUTS)
    return layout, chain((first,), records)


def _read_objects(path: Path, lines: Iterator[str], before: int) -> Iterator[Record]:
    for number, line in enumerate(lines, start=before + 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise InvalidInput(f"{path}:{number}", _shorten(line.strip()), "must be a JSON object")
        yield Record(f"{path}:{number}", fields)


def _make_layout_error(place: str, found: list[str], layouts: tuple[FileLayout, ...]) -> InvalidInput:
    """Return the error of a file in no known layout: the first field that the nearest layout lacks."""
    nearest = min(layouts, key=lambda layout: sum(field not in found for field in layout.required))
    lacking = [field for field in nearest.required if field not in found]
    shown = _shorten(", ".join(found)) or "empty"
    if len(lacking) < len(nearest.required):
        return InvalidInput(place, shown, f"must hold the field {lacking[0]} of the {nearest.name} layout")
    known = "; ".join(f"{layout.name}: {', '.join(layout.required)}" for layout in layouts)
    return InvalidInput(place, shown, f"must hold the fields of one of these layouts: {known}")
