"""One consistent picture of a service and all that was made for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fulcrum_core.api import IdentitySpec, PDAssignment, PDAssignmentSpec, PDInstance, PDPool, PDService
from fulcrum_core.ports import EngineObservation
from fulcrum_core.state import RouterState
from fulcrum_core.values import FlipStrategy, Phase


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine of some instance is known to be."""

    identity: IdentitySpec
    strategy: FlipStrategy
    startup_s: float
    """From its start to serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a plan is made from. Missing facts are None or absent, never guessed."""

    service: PDService
    now_s: float
    pools: tuple[PDPool, ...] = ()
    instances: tuple[PDInstance, ...] = ()
    assignment: PDAssignment | None = None
    tiers: frozenset[str] = frozenset()
    """Names of the QoSTiers that exist."""
    engines: Mapping[str, EngineObservation] = field(default_factory=dict)
    facts: Mapping[str, EngineFacts] = field(default_factory=dict)
    """By instance."""
    router: RouterState | None = None
    """The router's ledger; None where it was not asked or does not answer."""
    endpoint: str | None = None
    """Where clients reach the router; None until it serves."""
    accepted: PDAssignmentSpec | None = None
    """The last wish that was judged and found right; None after a restart of the operator."""

    @property
    def serving(self) -> frozenset[str]:
        """Names of the instances that serve."""
        return frozenset(i.metadata.name for i in self.instances if i.status.phase is Phase.SERVING)


def number_of(service: str, name: str) -> int | None:
    """The number in an instance's name `<service>-<n>`; None for a name that is not of that form."""
    head, _, tail = name.rpartition("-")
    return int(tail) if head == service and tail.isascii() and tail.isdigit() else None


def by_number(name: str) -> tuple[int, str]:
    """Sort key of instance names: chat-2 comes before chat-10."""
    tail = name.rpartition("-")[2]
    return (int(tail) if tail.isascii() and tail.isdigit() else -1, name)
