"""The history of a simulation run: its events in order, and their digest, by which two runs are compared.

`control_loop` records it, and the checkers judge it.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One event, `at_s` seconds after the start of the run."""

    at_s: float
    kind: str
    fields: dict[str, Any]


@dataclass(slots=True)
class History:
    """All events of one run. `now_s` returns the time since its start."""

    now_s: Callable[[], float]
    events: list[Event] = field(default_factory=list)

    def record(self, kind: str, **fields: Any) -> None:
        """Append an event at the current time."""
        self.events.append(Event(self.now_s(), kind, fields))

    def of_kind(self, *kinds: str) -> Iterator[Event]:
        """Return the events of these kinds, in order."""
        return (event for event in self.events if event.kind in kinds)

    def digest(self) -> str:
        """Return a digest that is equal for two runs with the same events at the same times."""
        text = "\n".join(f"{e.at_s:.9f} {e.kind} {sorted(e.fields.items())}" for e in self.events)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
