"""Loads recorded workloads: CSV files, plain or gzip, one request per row, sorted by arrival.

Columns: `arrival_s`, `input_tokens`, `output_tokens`, and optionally `prefix_hash_ids` (space-separated block
ids) and `tenant`. A file with one invalid row is rejected as a whole: leaving rows out would distort every
measurement.
"""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.workload.requests import WorkloadRequest

REQUIRED_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")


class _Cell(NamedTuple):
    """One value of the file and its position."""

    path: Path
    row: int
    column: str
    text: str

    def make_error(self, rule: str) -> InvalidInput:
        return InvalidInput(f"{self.path} row {self.row} {self.column}", self.text or "empty", rule)


def load_trace(path: str | Path) -> tuple[WorkloadRequest, ...]:
    """Load all requests of a file, in its order.

    Raises:
        InvalidInput: naming the file, the row (1 is the first after the header), the column and the rule.
    """
    path = Path(path)
    rows = csv.DictReader(io.StringIO(_read_text(path), newline=""), strict=True)
    try:
        _check_header(path, rows.fieldnames or ())
        requests = tuple(_parse_requests(path, rows))
    except csv.Error as error:
        raise InvalidInput(f"{path} line {rows.line_num + 1}", error, "must be CSV") from error
    if not requests:
        raise InvalidInput(str(path), "0 requests", "must hold at least one request")
    return requests


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode("utf-8-sig")
    except FileNotFoundError:
        raise InvalidInput(str(path), "missing", "must be a file that exists") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InvalidInput(
            str(path), _first_line(error), "must be a readable CSV file, plain or gzip"
        ) from error


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].lower()


def _check_header(path: Path, columns: Sequence[str]) -> None:
    for column in REQUIRED_COLUMNS:
        if column not in columns:
            found = ", ".join(columns) or "an empty header"
            raise InvalidInput(f"{path} header", found, f"must hold the column {column}")


def _parse_requests(path: Path, rows: Iterator[Mapping[str, str | None]]) -> Iterator[WorkloadRequest]:
    previous_s = 0.0
    for number, row in enumerate(rows, start=1):
        arrival = _Cell(path, number, "arrival_s", row["arrival_s"] or "")
        arrival_s = _parse_arrival(arrival)
        if arrival_s < previous_s:
            raise arrival.make_error(f"must not be earlier than the row before ({previous_s:g} s)")
        previous_s = arrival_s
        yield WorkloadRequest(
            arrival_s=arrival_s,
            input_tokens=_parse_tokens(_Cell(path, number, "input_tokens", row["input_tokens"] or "")),
            output_tokens=_parse_tokens(_Cell(path, number, "output_tokens", row["output_tokens"] or "")),
            prefix_hash_ids=_parse_ids(
                _Cell(path, number, "prefix_hash_ids", row.get("prefix_hash_ids") or "")
            ),
            tenant=row.get("tenant") or None,
        )


def _parse_arrival(cell: _Cell) -> float:
    try:
        arrival_s = float(cell.text)
    except ValueError:
        raise cell.make_error("must be a number of seconds") from None
    if not math.isfinite(arrival_s):
        raise cell.make_error("must be a finite number of seconds")
    if arrival_s < 0:
        raise cell.make_error("must not be negative")
    return arrival_s


def _parse_tokens(cell: _Cell) -> int:
    try:
        tokens = int(cell.text)
    except ValueError:
        raise cell.make_error("must be a whole number of tokens") from None
    if tokens < 1:
        raise cell.make_error("must be at least 1 token")
    return tokens


def _parse_ids(cell: _Cell) -> tuple[int, ...]:
    try:
        return tuple(map(int, cell.text.split()))
    except ValueError:
        raise cell.make_error("must be space-separated whole numbers") from None
