"""The default images of engines, for manifests that name no image.

`plan/pools` writes the default into the launch spec of a pool, so that it is part of the revision: an
operator of a newer version, with newer defaults, starts replacements like their peers. Only in a pool from
before this field, without a recorded default, each new pod gets the default of its operator
(`manifests/engine_container`).
"""

from dataclasses import dataclass

from fulcrum_core.api import LaunchSpec
from fulcrum_core.hardware import Vendor, resolve_hardware
from fulcrum_operator.engines import vllm
from fulcrum_operator.engines.from_spec import DEFAULT_HARDWARE


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineImages:
    """Default images of one installation, by what the engine is built for; None: there is no default."""

    nvidia: str | None = vllm.IMAGE
    amd: str | None = None
    cpu: str | None = None
    simulated: str | None = None
    """Image of simulated engines: the operator's own, unless the installation names one."""

    def default_for(self, launch_spec: LaunchSpec) -> str | None:
        """The default image for the engine and hardware of this launch spec; None if there is no default.

        Callers ask only for a launch spec that names no image itself: that is not looked at here.
        """
        if launch_spec.engine.is_simulated:
            return self.simulated
        hardware = launch_spec.hardware or DEFAULT_HARDWARE
        facts = resolve_hardware(
            hardware.type, resource=hardware.resource, memory_bytes=hardware.memory, fabric=hardware.fabric
        )
        images = {Vendor.NVIDIA: self.nvidia, Vendor.AMD: self.amd, Vendor.CPU: self.cpu}
        return images[facts.vendor]
