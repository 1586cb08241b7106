"""What happened in a simulated world, in order: the ground on which checkers stand, and its digest."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, `at_s` after the world's start."""

    at_s: float
    kind: str
    fields: dict[str, Any]


@dataclass(slots=True)
class History:
    """All events of one run. `now_s` tells the time since its start."""

    now_s: Callable[[], float]
    events: list[Event] = field(default_factory=list)

    def record(self, kind: str, **fields: Any) -> None:
        """Write one down."""
        self.events.append(Event(self.now_s(), kind, fields))

    def of_kind(self, *kinds: str) -> Iterator[Event]:
        """The events of these kinds, in order."""
        return (event for event in self.events if event.kind in kinds)

    def digest(self) -> str:
        """Equal for two runs in which the same things happened at the same times."""
        text = "\n".join(f"{e.at_s:.9f} {e.kind} {sorted(e.fields.items())}" for e in self.events)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
