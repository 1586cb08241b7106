"""What an engine adapter is asked: the parts of a service that one instance's engine depends on."""

from dataclasses import dataclass, field

from fulcrum_core.api.engine import (
    Connector,
    EngineSettingsSpec,
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
    ParallelismSpec,
    QuantizationSpec,
)
from fulcrum_core.api.pdpool import PoolRole
from fulcrum_core.hardware import UNKNOWN_GPU, HardwareFacts
from fulcrum_core.models import Fit, Layout, ModelFacts, check_fit, transfer_buffer_bytes
from fulcrum_core.values import Role, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One instance's engine.

    Args:
        model: As clients name it, and the hub.
        pool_role: Whether it may change its role.
        role: The role that it starts in; only connectors that fix it at start ask.
        slo: The service's.
        proxy_host: Where an LMCache sender tells that a prefill is done: the service's router.
        drain_timeout_s: How long its requests may take to end.
        facts: Of the model; None: they were not read, and what follows from them is left to the engine.
        hardware: Of one of its devices.
        devices: How many it has; None: not said.
        args: Arguments after those that are made.
        env: Variables over those that are made.
        version: Of the engine in its image.
    """

    model: str
    pool_role: PoolRole
    slo: Slo
    proxy_host: str
    drain_timeout_s: float
    role: Role | None = None
    facts: ModelFacts | None = None
    hardware: HardwareFacts = UNKNOWN_GPU
    devices: int | None = None
    model_source: ModelSourceSpec = field(default_factory=ModelSourceSpec)
    parallelism: ParallelismSpec = field(default_factory=ParallelismSpec)
    quantization: QuantizationSpec = field(default_factory=QuantizationSpec)
    settings: EngineSettingsSpec = field(default_factory=EngineSettingsSpec)
    kv_transfer: KvTransferSpec = field(default_factory=KvTransferSpec)
    kv_cache: KvCacheSpec = field(default_factory=KvCacheSpec)
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    version: str

    @property
    def layout(self) -> Layout:
        """How it is laid over its devices."""
        spec = self.parallelism
        return Layout(
            tensor=self.tensor,
            pipeline=spec.pipeline,
            data=spec.data,
            expert=spec.expert,
            weights=self.quantization.weights,
            kv=self.quantization.kv_cache,
            max_tokens=self.model_source.max_length,
            devices=self.devices,
            buffer_bytes=self.buffer_bytes or 0,
        )

    @property
    def fit(self) -> Fit:
        """Whether it can hold the model and one request of the longest context."""
        return check_fit(self.facts, self.hardware, self.layout)

    @property
    def started_for_prefill(self) -> bool:
        """Whether it decodes for want of another instance only, until it is started again."""
        return "Prefill" in (self.pool_role, self.role)

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks: unless it is written, every device shares each layer."""
        spec = self.parallelism
        return spec.tensor or max(1, (self.devices or 1) // (spec.pipeline * spec.data))

    @property
    def buffer_bytes(self) -> int | None:
        """LMCache's transfer buffer of one rank; None: there is none, or it follows from an unknown model."""
        if self.kv_transfer.connector is not Connector.LMCACHE:
            return None
        if (
            self.kv_transfer.buffer_size is not None
            or self.facts is None
            or self.longest_prompt_tokens is None
        ):
            return self.kv_transfer.buffer_size
        kv = self.quantization.kv_cache
        return transfer_buffer_bytes(self.facts, self.longest_prompt_tokens, kv, tensor=self.tensor)

    @property
    def longest_prompt_tokens(self) -> int | None:
        """The longest prompt that may be handed over; None: not known."""
        return self.model_source.max_length or (self.facts.context_tokens if self.facts else None)
