"""Build the launch request of an engine adapter from a PDService and the launch spec of an instance.

Pod manifests, the local run and `fulcrum plan` use it. The adapter decides what follows from a request.
"""

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
"""Hardware of a real engine if the manifest names none: one GPU."""


def build_launch_request(
    service: PDService,
    launch_spec: LaunchSpec,
    *,
    pool_role: PoolRole,
    role: Role | None = None,
    facts: ModelFacts | None = None,
    hardware: HardwareFacts | None = None,
) -> LaunchRequest:
    """Build the launch request for one instance.

    Args:
        service: The service, with its objectives and drain timeout.
        launch_spec: Launch spec of the instance itself: an instance of an old revision restarts unchanged.
        pool_role: Role of the pool; Flexible if the instance may flip.
        role: Role at the start, if it is fixed then.
        facts: Facts of the model; None if its config.json was not read.
        hardware: Hardware that replaces the manifest's, such as this machine's in a local run.
    """
    hardware_spec = launch_spec.hardware or DEFAULT_HARDWARE
    device = hardware or resolve_hardware(
        hardware_spec.type,
        resource=hardware_spec.resource,
        memory_bytes=hardware_spec.memory,
        fabric=hardware_spec.fabric,
    )
    return LaunchRequest(
        model=launch_spec.model,
        pool_role=pool_role,
        role=role,
        slo=service.spec.slo.to_slo(),
        proxy_host=f"{service.metadata.name}.{service.metadata.namespace}.svc",
        drain_timeout_s=service.spec.drain.timeout,
        facts=facts,
        hardware=device,
        devices=None if device.vendor is Vendor.CPU else hardware_spec.count,  # CPU cores are not devices
        cores=hardware_spec.count if device.vendor is Vendor.CPU else None,
        model_source=launch_spec.model_source or ModelSourceSpec(),
        parallelism=launch_spec.parallelism or ParallelismSpec(),
        quantization=launch_spec.quantization or QuantizationSpec(),
        settings=launch_spec.settings or EngineSettingsSpec(),
        kv_transfer=launch_spec.kv_transfer or KvTransferSpec(),
        kv_cache=launch_spec.kv_cache or KvCacheSpec(),
        args=launch_spec.engine.args,
        env=launch_spec.engine.env,
        version=vllm.VERSION,
    )
