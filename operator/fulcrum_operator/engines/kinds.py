"""From the kinds to what an engine adapter is asked."""

from fulcrum_core.api import PDInstance, PDPool, PDService
from fulcrum_core.api.engine import (
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
    ParallelismSpec,
    QuantizationSpec,
    SettingsSpec,
)
from fulcrum_core.api.pdpool import HardwareSpec
from fulcrum_core.hardware import HardwareFacts, Vendor, hardware_of
from fulcrum_core.models import ModelFacts
from fulcrum_core.values import Role
from fulcrum_operator.engines import vllm
from fulcrum_operator.engines.request import EngineRequest

DEVICE = HardwareSpec(resource="nvidia.com/gpu")
"""What an instance of a real engine gets where the manifest does not say: one GPU."""


def engine_request(
    service: PDService,
    pool: PDPool,
    instance: PDInstance,
    *,
    facts: ModelFacts | None,
    hardware: HardwareFacts | None = None,
) -> EngineRequest:
    """What is asked for this instance.

    What it is started with stands in the instance: one of an old revision is started again as it was.

    Args:
        service: Its objectives, and how long a drain may take.
        pool: Whether its instances flip.
        instance: What it is started with, and the role that it starts in where that is fixed.
        facts: Of the model; None: they were not read.
        hardware: In place of what the manifest says: a local run has this machine's.
    """
    start = instance.spec
    asked = start.hardware or DEVICE
    known = hardware or hardware_of(
        asked.type, resource=asked.resource, memory_bytes=asked.memory, fabric=asked.fabric
    )
    return EngineRequest(
        model=start.model,
        pool_role=pool.spec.role,
        role=Role(start.role) if start.role is not None else None,
        slo=service.spec.slo.slo(),
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
