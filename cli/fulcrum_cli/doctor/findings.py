"""What a check says: how it stands, what was seen, what to do."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad it is: a problem keeps something from working; a warning may, or could not be looked at."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check. `service` names the service, where it is about one."""

    name: str
    severity: Severity
    observed: str
    advice: str = ""
    service: str = ""
    consequences: tuple[str, ...] = ()
    """Other findings that only follow from this one, and are told here alone."""

    @property
    def title(self) -> str:
        """What it is about: `operator`, `chat: images`."""
        return f"{self.service}: {self.name}" if self.service else self.name

    def dump(self) -> dict[str, Any]:
        """For programs."""
        fields = asdict(self)
        return {
            "check": fields["name"],
            "severity": self.severity.value,
            **{
                field: fields[field]
                for field in ("service", "observed", "advice", "consequences")
                if fields[field]
            },
        }


def ok(name: str, observed: str, *, service: str = "") -> Finding:
    """Nothing to do."""
    return Finding(name, Severity.OK, observed, "", service)


def warning(name: str, observed: str, advice: str, *, service: str = "") -> Finding:
    """Something to look at."""
    return Finding(name, Severity.WARNING, observed, advice, service)


def problem(name: str, observed: str, advice: str, *, service: str = "") -> Finding:
    """Something that does not work."""
    return Finding(name, Severity.PROBLEM, observed, advice, service)


def worst_severity(findings: Iterable[Finding]) -> Severity:
    """The worst of all."""
    order = list(Severity)
    return max((finding.severity for finding in findings), key=order.index, default=Severity.OK)
