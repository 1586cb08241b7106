"""What the service's manifest tells the router, resolved."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from fulcrum_core.api.pdservice import PDService, TimeoutsSpec
from fulcrum_core.api.qostier import QoSTier
from fulcrum_core.values import AutoscalingMode, Slo

DEFAULT_TIER = "default"


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of requests."""

    name: str
    slo: Slo
    engine_priority: int = 0
    """As engines read it: lower is earlier. 0: not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long an engine is waited for, in seconds; read at every leg, and so no model of the API's."""

    connect_s: float
    prefill_s: float
    first_byte_s: float
    idle_s: float

    @classmethod
    def from_spec(cls, spec: TimeoutsSpec) -> Self:
        """As the manifest says."""
        return cls(
            connect_s=spec.connect,
            prefill_s=spec.prefill,
            first_byte_s=spec.first_byte,
            idle_s=spec.idle,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """One service as the data path sees it."""

    service: str
    model: str
    timeouts: Timeouts
    default_tier: Tier
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    autoscaling_mode: AutoscalingMode = AutoscalingMode.OFF
    max_decode_load: float = 0.5
    prefill_to_decode_cooldown_s: float = 0.0
    drain_timeout_s: float = 0.0
    """How long requests in flight get where something ends."""

    def find_tier(self, name: str | None) -> Tier:
        """The tier a request names; the service's own where it names none that the service has."""
        return self.tiers.get(name, self.default_tier) if name else self.default_tier


def resolve_settings(service: PDService, tiers: Iterable[QoSTier]) -> ServiceSettings:
    """What `service` says. A tier of it that does not exist (yet) is served as the service's own."""
    spec = service.spec
    slo = spec.slo.to_slo()
    mode = AutoscalingMode.OFF if spec.autoscaling.flip.paused else spec.autoscaling.mode
    known = {tier.metadata.name: tier for tier in tiers}
    return ServiceSettings(
        service=service.metadata.name,
        model=spec.model,
        timeouts=Timeouts.from_spec(spec.router.timeouts),
        default_tier=Tier(DEFAULT_TIER, slo),
        tiers={name: _resolve_tier(known[name], slo) for name in spec.qos_tiers if name in known},
        autoscaling_mode=mode,
        max_decode_load=spec.autoscaling.arrow.shrink,
        prefill_to_decode_cooldown_s=spec.autoscaling.flip.prefill_to_decode_cooldown,
        drain_timeout_s=spec.drain.timeout,
    )


def _resolve_tier(tier: QoSTier, slo: Slo) -> Tier:
    own = tier.spec.slo.to_slo() if tier.spec.slo else slo
    return Tier(tier.metadata.name, own, -tier.spec.priority)
