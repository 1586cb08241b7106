"""The input of an engine adapter: the parts of a service that one instance's engine depends on.

`from_spec` builds it; the modules of `engines/vllm` read it and nothing else of the service.
"""

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
from fulcrum_core.api.env import EnvVar
from fulcrum_core.api.pdpool import PoolRole
from fulcrum_core.hardware import UNKNOWN_GPU, HardwareFacts
from fulcrum_core.models import Fit, Layout, ModelFacts, check_fit, transfer_buffer_bytes
from fulcrum_core.values import Role, Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A request to launch the engine of one instance.

    Args:
        model: Name of the model for clients and at the hub.
        pool_role: Role of the instance's pool; Flexible if the instance may flip.
        role: Role at start; only connectors that fix the role at start use it.
        slo: Objectives of the service.
        proxy_host: Host of the service's router, to which an LMCache sender reports the end of a prefill.
        drain_timeout_s: Seconds in which running requests may end.
        facts: Facts of the model; None if they were not read: the engine chooses what depends on them.
        hardware: Hardware of one device.
        devices: Number of devices; None if not specified.
        cores: Number of cores of an engine on CPUs; None if not specified.
        args: The user's arguments, added after the generated ones.
        env: The user's variables, which replace generated ones of the same name.
        version: Version of the engine in its image.
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
    cores: int | None = None
    model_source: ModelSourceSpec = field(default_factory=ModelSourceSpec)
    parallelism: ParallelismSpec = field(default_factory=ParallelismSpec)
    quantization: QuantizationSpec = field(default_factory=QuantizationSpec)
    settings: EngineSettingsSpec = field(default_factory=EngineSettingsSpec)
    kv_transfer: KvTransferSpec = field(default_factory=KvTransferSpec)
    kv_cache: KvCacheSpec = field(default_factory=KvCacheSpec)
    args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    version: str

    @property
    def layout(self) -> Layout:
        """Parallelism, precision and memory of the model on the instance's devices."""
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
        """Whether the devices have room for the model and one request of the longest context."""
        return check_fit(self.facts, self.hardware, self.layout)

    @property
    def started_for_prefill(self) -> bool:
        """Whether the engine is started to prefill: by its pool's fixed role or by its role at start."""
        return "Prefill" in (self.pool_role, self.role)

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks; by default every device has a part of each layer."""
        spec = self.parallelism
        return spec.tensor or max(1, (self.devices or 1) // (spec.pipeline * spec.data))

    @property
    def buffer_bytes(self) -> int | None:
        """Bytes of one rank's LMCache transfer buffer; None without LMCache or if the model is not known."""
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
        """Longest prompt whose KV may be transferred, in tokens; None if not known."""
        return self.model_source.max_length or (self.facts.context_tokens if self.facts else None)
