"""What a check says: how it stands, what was seen, what to do."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Standing(StrEnum):
    """How bad it is: a problem keeps something from working; a warning may, or could not be looked at."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check. `about` names the service, where it is about one."""

    name: str
    standing: Standing
    seen: str
    advice: str = ""
    about: str = ""
    explains: tuple[str, ...] = ()
    """Other findings that only follow from this one, and are told here alone."""

    @property
    def title(self) -> str:
        """What it is about: `operator`, `chat: images`."""
        return f"{self.about}: {self.name}" if self.about else self.name

    def dump(self) -> dict[str, Any]:
        """For programs."""
        told = asdict(self)
        return {
            "check": told["name"],
            "verdict": self.standing.value,
            **{field: told[field] for field in ("about", "seen", "advice", "explains") if told[field]},
        }


def ok(name: str, seen: str, *, about: str = "") -> Finding:
    """Nothing to do."""
    return Finding(name, Standing.OK, seen, "", about)


def warning(name: str, seen: str, advice: str, *, about: str = "") -> Finding:
    """Something to look at."""
    return Finding(name, Standing.WARNING, seen, advice, about)


def problem(name: str, seen: str, advice: str, *, about: str = "") -> Finding:
    """Something that does not work."""
    return Finding(name, Standing.PROBLEM, seen, advice, about)


def worst(findings: Iterable[Finding]) -> Standing:
    """The worst of all."""
    order = list(Standing)
    return max((finding.standing for finding in findings), key=order.index, default=Standing.OK)
