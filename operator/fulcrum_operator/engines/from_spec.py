"""From the kinds to what an engine adapter is asked."""

from fulcrum_core.api import PDService, PoolRole
from fulcrum_core.api.engine import (
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
    ParallelismSpec,
    QuantizationSpec,
    SettingsSpec,
)
from fulcrum_core.api.pdpool import HardwareSpec, StartSpec
from fulcrum_core.hardware import HardwareFacts, Vendor, hardware_of
from fulcrum_core.models import ModelFacts
from fulcrum_core.values import Role
from fulcrum_operator.engines import vllm
from fulcrum_operator.engines.request import EngineRequest

DEVICE = HardwareSpec(resource="nvidia.com/gpu")
"""What an instance of a real engine gets where the manifest does not say: one GPU."""


def engine_request(
    service: PDService,
    start: StartSpec,
    *,
    pool_role: PoolRole,
    role: Role | None = None,
    facts: ModelFacts | None = None,
    hardware: HardwareFacts | None = None,
) -> EngineRequest:
    """What is asked for an instance.

    Args:
        service: Its objectives, and how long a drain may take.
        start: What the instance is started with: its own spec, so that one of an old revision is started
            again as it was.
        pool_role: Whether it flips.
        role: The role that it starts in, where that is fixed.
        facts: Of the model; None: they were not read.
        hardware: In place of what the manifest says: a local run has this machine's.
    """
    asked = start.hardware or DEVICE
    known = hardware or hardware_of(
        asked.type, resource=asked.resource, memory_bytes=asked.memory, fabric=asked.fabric
    )
    return EngineRequest(
        model=start.model,
        pool_role=pool_role,
        role=role,
        slo=service.spec.slo.slo(),
        proxy_host=f"{service.metadata.name}.{service.metadata.namespace}.svc",
        drain_s=service.spec.drain.timeout,
        facts=facts,
        hardware=known,
        devices=None if known.vendor is Vendor.CPU else asked.count,  # cores are no devices
        source=start.model_source or ModelSourceSpec(),
        parallelism=start.parallelism or ParallelismSpec(),
        quantization=start.quantization or QuantizationSpec(),
        settings=start.settings or SettingsSpec(),
        kv_transfer=start.kv_transfer or KvTransferSpec(),
        kv_cache=start.kv_cache or KvCacheSpec(),
        args=start.engine.args,
        env=tuple((variable.name, variable.value) for variable in start.engine.env),
        version=vllm.VERSION,
    )
