"""The requests of a workload: arrival time, lengths, tenant and tier; and a filter by length.

The sender writes a prompt of that length (`client.prompts`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fulcrum_core.formatting import format_count


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload, `arrival_s` seconds after the workload's start.

    `prefix_hash_ids` identify the prompt's blocks in order: equal leading ids mean an equal prefix.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_hash_ids: tuple[int, ...] = ()
    tenant: str | None = None
    tier: str = ""
    priority: int = 0
    """Priority of the tier; higher is more important."""


@dataclass(frozen=True, slots=True)
class OverlongRequests:
    """The number of requests that exceed the length limit of an engine, and the longest of them."""

    requests: int
    longest_tokens: int
    max_tokens: int

    def __str__(self) -> str:
        count = format_count(self.requests, "request is", "requests are")
        return (
            f"{count} longer than the engine's {self.max_tokens} tokens "
            f"(the longest has {self.longest_tokens}); left out, not cut"
        )


class LengthLimit:
    """Passes on the requests that fit an engine and counts the others; lengths are never cut."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._left_out = 0
        self._longest_tokens = 0

    def filter(self, requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
        """Yield the requests whose prompt and output together fit `max_tokens`, in order."""
        for request in requests:
            tokens = request.input_tokens + request.output_tokens
            if tokens <= self.max_tokens:
                yield request
            else:
                self._left_out += 1
                self._longest_tokens = max(self._longest_tokens, tokens)

    @property
    def overlong(self) -> OverlongRequests | None:
        """The requests left out so far; None if there are none."""
        if not self._left_out:
            return None
        return OverlongRequests(self._left_out, self._longest_tokens, self.max_tokens)
