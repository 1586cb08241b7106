"""The layouts of trace files: our own, and those in which traces of LLM traffic are published.

A layout names the fields of arrival and lengths, and how the arrival is written. A file is recognised by the
columns of its header (CSV) or the keys of its first object (JSON lines).

| layout | file | fields |
|---|---|---|
| Fulcrum | CSV | arrival_s, input_tokens, output_tokens; optional prefix_hash_ids, tenant |
| Azure 2023, 2024 | CSV | TIMESTAMP (date and time), ContextTokens, GeneratedTokens |
| BurstGPT | CSV | Timestamp (seconds), Request tokens, Response tokens, and others |
| ServeGen | CSV that ServeGen saves | request_id, timestamp (seconds), input_tokens, output_tokens |
| Mooncake | JSON lines | timestamp (milliseconds), input_length, output_length, hash_ids |
| Qwen Bailian | JSON lines | the same with timestamp in seconds, and chat_id |
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime

_MS_PER_S = 1000


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One layout.

    Attributes:
        arrival, input, output: Names of the fields.
        read_arrival_s: Returns the seconds that an arrival means; ValueError if it is not one.
        arrival_is: What an arrival is, for an error.
        counts_from_first: Whether arrivals become seconds since the first request; else they already are.
        failed_have_no_output: Whether 0 output tokens mark a request that failed, which is left out.
        hash_ids, tenant: Names of the optional fields; empty if the layout has none.
        mark: Another field that tells the layout from one with the same names; empty if none is needed.
    """

    name: str
    arrival: str
    input: str
    output: str
    read_arrival_s: Callable[[str], float]
    arrival_is: str = "a finite number of seconds"
    counts_from_first: bool = True
    failed_have_no_output: bool = False
    hash_ids: str = ""
    tenant: str = ""
    mark: str = ""

    @property
    def required(self) -> tuple[str, ...]:
        """Fields that every request has."""
        return tuple(filter(None, (self.arrival, self.input, self.output, self.mark)))


def _read_date_time(text: str) -> float:
    """Return the seconds since 1970 of `2023-11-16 18:17:03.9799600`, with or without an offset."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _read_milliseconds(text: str) -> float:
    return float(text) / _MS_PER_S


FULCRUM = FileLayout(
    "Fulcrum",
    "arrival_s",
    "input_tokens",
    "output_tokens",
    float,
    counts_from_first=False,
    hash_ids="prefix_hash_ids",
    tenant="tenant",
)
AZURE = FileLayout(
    "Azure",
    "TIMESTAMP",
    "ContextTokens",
    "GeneratedTokens",
    _read_date_time,
    arrival_is="a date and time",
)
BURST_GPT = FileLayout(
    "BurstGPT", "Timestamp", "Request tokens", "Response tokens", float, failed_have_no_output=True
)
SERVE_GEN = FileLayout("ServeGen", "timestamp", "input_tokens", "output_tokens", float)
MOONCAKE = FileLayout(
    "Mooncake",
    "timestamp",
    "input_length",
    "output_length",
    _read_milliseconds,
    arrival_is="a finite number of milliseconds",
    hash_ids="hash_ids",
)

QWEN_BAILIAN = FileLayout(
    "Qwen Bailian", "timestamp", "input_length", "output_length", float, hash_ids="hash_ids", mark="chat_id"
)

CSV_LAYOUTS = (FULCRUM, AZURE, BURST_GPT, SERVE_GEN)
JSON_LAYOUTS = (QWEN_BAILIAN, MOONCAKE)


def find_layout(fields: Collection[str], layouts: Collection[FileLayout]) -> FileLayout | None:
    """Return the first layout whose required fields are all present; None if there is none."""
    return next((layout for layout in layouts if all(name in fields for name in layout.required)), None)
