"""Settings of one service for the data path, resolved from its PDService and QoSTiers.

The data path reads them at every request, so they are plain frozen dataclasses and not models of the API.

`observe.objects` resolves them again when an object has changed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.qostier import DEFAULT_MAX_QUEUE_S, QoSTier, QoSTierSpec
from fulcrum_core.api.router import AuthSpec, DispatchSpec, TimeoutsSpec
from fulcrum_core.networks import Network, parse_network
from fulcrum_core.values import AdmissionMode, AutoscalingMode, DispatchMode, FlipPolicy, Slo
from fulcrum_router.policy.tiers.admission import DEFAULT_TIER_ADMISSION, TierAdmission
from fulcrum_router.policy.tiers.tenant_counts import DEFAULT_NAMED_TENANTS
from fulcrum_router.policy.tiers.tier_reserve import NO_RESERVE, Reserve

DEFAULT_TIER = "default"
"""Name of the tier of all requests that no other tier applies to; its SLO is the service's own."""


_DEFAULT_DISPATCH = DispatchSpec()


@dataclass(frozen=True, slots=True)
class Tier:
    """A QoS tier of requests."""

    name: str
    slo: Slo
    engine_priority: int = 0
    """`priority` field of requests to engines: the lowest value is scheduled first. 0: not sent."""
    admission: TierAdmission = DEFAULT_TIER_ADMISSION
    tokens_per_minute: int | None = None
    """Rate limit of each tenant; None: none."""
    reserve: Reserve = NO_RESERVE
    """What is kept for it."""
    weight: int = 1
    """Its share among the tiers of its priority."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time-outs of requests to engines, in seconds. A copy of `TimeoutsSpec` that is fast to read."""

    connect_s: float
    """Longest time until the TCP connection is established."""
    prefill_s: float
    """Longest time until the response of a prefill leg."""
    first_byte_s: float
    """Longest time until the first byte of the response of a decode leg."""
    idle_s: float
    """Between two reads of the response of a decode leg."""

    @classmethod
    def from_spec(cls, spec: TimeoutsSpec) -> Self:
        """Copy the time-outs of a PDService."""
        return cls(
            connect_s=spec.connect,
            prefill_s=spec.prefill,
            first_byte_s=spec.first_byte,
            idle_s=spec.idle,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Who may send requests, and whose headers are trusted."""

    requires_key: bool
    trusted_networks: tuple[Network, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Settings of one service that the router uses."""

    service: str
    """Name of the PDService."""
    model: str
    """Model name that clients use."""
    timeouts: Timeouts
    default_tier: Tier
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    """Tiers by name, as far as the service lists them and they exist."""
    tiers_by_tenant: Mapping[str, Tier] = field(default_factory=dict)
    tiers_by_key: Mapping[str, Tier] = field(default_factory=dict)
    """Tier of an API key, by TENANT/NAME of the key."""
    access: AccessSettings | None = None
    """None: anybody may send requests, and name tenant and tier."""
    autoscaling_mode: AutoscalingMode = AutoscalingMode.OFF
    """Also OFF while flips are paused."""
    flip_policy: FlipPolicy = FlipPolicy.BALANCED
    max_decode_load: float = 0.5
    """See `FlipProposalRules.max_decode_load`."""
    prefill_to_decode_cooldown_s: float = 0.0
    """Seconds after a flip from prefill to decode in which no other is proposed."""
    prefill_ahead_s: float = _DEFAULT_DISPATCH.prefill_ahead
    """Prefill work in seconds from which an instance gets no more (`policy.waiting.waiting_room`);
    infinite: no request waits in the router."""
    deflects: bool = _DEFAULT_DISPATCH.deflect
    """Whether decode instances compute prompts in their spare time; see `policy.deflection`."""
    prefix_aware: bool = False
    """Whether dispatch counts what instances have in their prefix caches; see `policy.prefix_index`."""
    access_log: float = 0.0
    """Share of the requests that are logged."""
    named_tenants: int = DEFAULT_NAMED_TENANTS
    """Tenants that metrics count by name."""
    admission: AdmissionMode = AdmissionMode.OFF
    """What is done about requests that would miss their objectives."""
    drain_timeout_s: float = 0.0
    """Seconds that requests in flight get to finish when the router shuts down."""

    def has_tier(self, name: str) -> bool:
        """Whether requests may name this tier."""
        return name in self.tiers or name == self.default_tier.name

    def find_tier(self, name: str | None) -> Tier:
        """Return the tier of that name, or the default tier if the service has no such tier."""
        return self.tiers.get(name, self.default_tier) if name else self.default_tier


def resolve_settings(service: PDService, tiers: Iterable[QoSTier]) -> ServiceSettings:
    """Resolve the settings of `service`. A listed tier that does not exist is left out: its requests get the
    default tier."""
    spec = service.spec
    slo, dispatch = spec.slo.to_slo(), spec.router.dispatch
    mode = AutoscalingMode.OFF if spec.autoscaling.flip.paused else spec.autoscaling.mode
    known = {tier.metadata.name: tier for tier in tiers}
    listed = [known[name] for name in spec.qos_tiers if name in known]
    by_name = {tier.metadata.name: _resolve_tier(tier, slo) for tier in listed}
    return ServiceSettings(
        service=service.metadata.name,
        model=spec.model,
        timeouts=Timeouts.from_spec(spec.router.timeouts),
        default_tier=Tier(DEFAULT_TIER, slo),
        tiers=by_name,
        # Of two tiers that match the same tenant or key, the first in qosTiers counts.
        tiers_by_tenant={
            tenant: by_name[tier.metadata.name]
            for tier in reversed(listed)
            for tenant in tier.spec.match.tenants
        },
        tiers_by_key={
            key: by_name[tier.metadata.name] for tier in reversed(listed) for key in tier.spec.match.keys
        },
        access=None if spec.router.auth is None else _resolve_access(spec.router.auth),
        autoscaling_mode=mode,
        flip_policy=spec.autoscaling.policy,
        max_decode_load=spec.autoscaling.arrow.shrink,
        prefill_to_decode_cooldown_s=spec.autoscaling.flip.prefill_to_decode_cooldown,
        prefill_ahead_s=dispatch.prefill_ahead if dispatch.mode is DispatchMode.QUEUE else math.inf,
        deflects=dispatch.deflect,
        prefix_aware=dispatch.prefix_aware,
        access_log=spec.router.access_log,
        named_tenants=spec.router.named_tenants,
        admission=spec.router.admission,
        drain_timeout_s=spec.drain.timeout,
    )


def _resolve_access(auth: AuthSpec) -> AccessSettings:
    """A network that cannot be parsed is reported by the condition TiersAccepted, and trusts nobody."""
    networks = (parse_network(text) for text in auth.trusted_proxies)
    return AccessSettings(
        requires_key=auth.api_keys is not None,
        trusted_networks=tuple(network for network in networks if network is not None),
    )


def _resolve_tier(tier: QoSTier, slo: Slo) -> Tier:
    limit = tier.spec.rate_limit
    return Tier(
        tier.metadata.name,
        tier.spec.find_slo(slo),
        -tier.spec.priority,
        _resolve_admission(tier.spec),
        None if limit is None else limit.tokens_per_minute,
        Reserve(tier.spec.reserved_fraction, tier.spec.reclaim_within or math.inf),
        tier.spec.weight,
    )


def _resolve_admission(spec: QoSTierSpec) -> TierAdmission:
    admission = spec.admission
    return TierAdmission(
        sheddable=spec.sheddable,
        action=admission.mode,
        max_queue_s=admission.max_queue_time or DEFAULT_MAX_QUEUE_S,
        max_output_tokens=admission.max_output_tokens or 0,
    )
