"""Loads traces (recorded workloads), in our own layout or in a published one (see `layouts`).

If one request is invalid, the whole file is rejected: a workload without some of its requests would distort
every measurement. Only requests that a publisher marks as failed, by 0 output tokens, are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fulcrum_core.errors import InvalidInput
from fulcrum_simulator.workload.layouts import FileLayout
from fulcrum_simulator.workload.record_files import Cell, Record, open_records
from fulcrum_simulator.workload.requests import WorkloadRequest

REQUESTS_MAX = 6_000_000
"""Most requests that a file may have, failed ones included; they take about a gigabyte of memory."""
TOKENS_MAX = 10_000_000
"""Most tokens that a prompt or an output may have; longer than any context of a model."""
BLOCK_IDS_MAX = 25_000_000
"""Most block ids that a file may have; they take about a gigabyte, too."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded workload: the requests of a file, in its order, and the name of its layout.

    `failed` counts the requests that the publisher marked as failed; they are left out.
    """

    layout: str
    requests: tuple[WorkloadRequest, ...]
    failed: int


def load_trace(path: str | Path, *, requests_max: int = REQUESTS_MAX) -> Trace:
    """Load a file. Arrivals in a published layout become seconds since the first request.

    Raises:
        InvalidInput: if the file or one request is invalid; it names file, line, field and rule.
    """
    path = Path(path)
    with open_records(path) as (layout, records):
        reader = _RequestReader(layout, requests_max)
        requests = tuple(reader.read(records))
    if not requests:
        raise InvalidInput(str(path), "0 requests", "must hold at least one request")
    return Trace(layout.name, requests, reader.failed)


class _RequestReader:
    """Turns the records of one file into requests, and checks them and their order."""

    def __init__(self, layout: FileLayout, requests_max: int) -> None:
        self.failed = 0
        self._layout, self._requests_max = layout, requests_max
        self._first_s: float | None = None if layout.counts_from_first else 0.0
        self._previous_s = 0.0
        self._ids = 0

    def read(self, records: Iterator[Record]) -> Iterator[WorkloadRequest]:
        """Yield the requests; those that failed are counted instead."""
        for number, record in enumerate(records, start=1):
            if number > self._requests_max:
                rule = f"is above the limit of {self._requests_max} requests"
                raise InvalidInput(record.place, number, rule)
            arrival_s = self._read_arrival(record.cell(self._layout.arrival))
            if self._layout.failed_have_no_output and record.cell(self._layout.output).text == "0":
                self.failed += 1
                continue
            input_tokens = _read_tokens(record.cell(self._layout.input))
            yield WorkloadRequest(
                arrival_s=arrival_s,
                input_tokens=input_tokens,
                output_tokens=_read_tokens(record.cell(self._layout.output)),
                prefix_hash_ids=self._read_ids(record.cell(self._layout.hash_ids), most=input_tokens),
                tenant=record.cell(self._layout.tenant).text or None,
            )

    def _read_ids(self, cell: Cell, *, most: int) -> tuple[int, ...]:
        ids = _parse_ids(cell)
        if len(ids) > most:
            raise cell.make_error(f"must be at most one id for each of the {most} tokens")
        self._ids += len(ids)
        if self._ids > BLOCK_IDS_MAX:
            raise cell.make_error(f"makes more than {BLOCK_IDS_MAX} ids in the file")
        return ids

    def _read_arrival(self, cell: Cell) -> float:
        try:
            read_s = self._layout.read_arrival_s(cell.text)
        except (ValueError, OverflowError):
            read_s = math.nan
        if not math.isfinite(read_s):
            raise cell.make_error(f"must be {self._layout.arrival_is}")
        if self._first_s is None:
            self._first_s = self._previous_s = read_s
        if read_s < 0 and not self._layout.counts_from_first:
            raise cell.make_error("must not be negative")
        if read_s < self._previous_s:
            raise cell.make_error("must not be earlier than the request before")
        self._previous_s = read_s
        return read_s - self._first_s


def _read_tokens(cell: Cell) -> int:
    try:
        tokens = int(cell.text)
    except ValueError:
        raise cell.make_error("must be a whole number of tokens") from None
    if tokens < 1:
        raise cell.make_error("must be at least 1 token")
    if tokens > TOKENS_MAX:
        raise cell.make_error(f"must be at most {TOKENS_MAX} tokens")
    return tokens


def _parse_ids(cell: Cell) -> tuple[int, ...]:
    if isinstance(cell.value, list):
        if not all(type(value) is int for value in cell.value):  # a boolean is an int, too
            raise cell.make_error("must be whole numbers")
        return tuple(cell.value)
    try:
        return tuple(map(int, cell.text.split()))
    except ValueError:
        raise cell.make_error("must be whole numbers") from None
