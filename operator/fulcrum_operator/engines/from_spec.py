"""From the kinds to what an engine adapter is asked."""

from fulcrum_core.api import PDService, PoolRole
from fulcrum_core.api.engine import (
    EngineSettingsSpec,
    KvCacheSpec,
    KvTransferSpec,
    ModelSourceSpec,
    ParallelismSpec,
    QuantizationSpec,
)
from fulcrum_core.api.pdpool import HardwareSpec, LaunchSpec
from fulcrum_core.hardware import HardwareFacts, Vendor, resolve_hardware
from fulcrum_core.models import ModelFacts
from fulcrum_core.values import Role
from fulcrum_operator.engines import vllm
from fulcrum_operator.engines.launch_request import LaunchRequest

DEFAULT_HARDWARE = HardwareSpec(resource="nvidia.com/gpu")
"""What an instance of a real engine gets where the manifest does not say: one GPU."""


def build_launch_request(
    service: PDService,
    start: LaunchSpec,
    *,
    pool_role: PoolRole,
    role: Role | None = None,
    facts: ModelFacts | None = None,
    hardware: HardwareFacts | None = None,
) -> LaunchRequest:
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
    hardware_spec = start.hardware or DEFAULT_HARDWARE
    device = hardware or resolve_hardware(
        hardware_spec.type,
        resource=hardware_spec.resource,
        memory_bytes=hardware_spec.memory,
        fabric=hardware_spec.fabric,
    )
    return LaunchRequest(
        model=start.model,
        pool_role=pool_role,
        role=role,
        slo=service.spec.slo.to_slo(),
        proxy_host=f"{service.metadata.name}.{service.metadata.namespace}.svc",
        drain_timeout_s=service.spec.drain.timeout,
        facts=facts,
        hardware=device,
        devices=None if device.vendor is Vendor.CPU else hardware_spec.count,  # cores are no devices
        model_source=start.model_source or ModelSourceSpec(),
        parallelism=start.parallelism or ParallelismSpec(),
        quantization=start.quantization or QuantizationSpec(),
        settings=start.settings or EngineSettingsSpec(),
        kv_transfer=start.kv_transfer or KvTransferSpec(),
        kv_cache=start.kv_cache or KvCacheSpec(),
        args=start.engine.args,
        env=tuple((variable.name, variable.value) for variable in start.engine.env),
        version=vllm.VERSION,
    )
