"""Accelerators: a table of known devices, which a manifest can override.

Memory is what the driver reports, in bytes; rates are peaks of one device at 16 bits, without sparsity. The
operator's engine adapters, `fulcrum plan` and the router's first predictions read it.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

MIB = 2**20


class Fabric(StrEnum):
    """Network that carries KV between two instances; `AUTO`: whatever the engine's transport finds."""

    AUTO = "auto"
    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"
    NVLINK = "NVLink"
    TCP = "TCP"

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth assumed in plans: 400 and 200 Gbit/s cards, NVLink 4, 25 Gbit/s Ethernet.

        `AUTO` counts as the slowest, so that plans work on any network.
        """
        return _FABRIC_BYTES_PER_S[self]

    @property
    def min_bytes_per_s(self) -> float:
        """Rate below which another, slower network must carry the KV; 0: there is no slower one.

        A quarter of `bytes_per_s`, because blocks are small and a card is shared; of NVLink a fifteenth,
        because KV blocks do not fill it. TCP reaches half of the lowest of these rates.
        """
        return _MIN_FABRIC_BYTES_PER_S.get(self, 0.0)


_FABRIC_BYTES_PER_S = {
    Fabric.INFINIBAND: 40e9,
    Fabric.ROCE: 20e9,
    Fabric.NVLINK: 600e9,
    Fabric.TCP: 2.5e9,
    Fabric.AUTO: 2.5e9,
}
_MIN_FABRIC_BYTES_PER_S = {Fabric.INFINIBAND: 10e9, Fabric.ROCE: 5e9, Fabric.NVLINK: 40e9}


class Vendor(StrEnum):
    """Vendor of the software stack that the engine is built for."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"
    CPU = "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFacts:
    """One kind of device.

    Args:
        name: As in the table, or as the manifest calls it.
        vendor: Whose software stack; decides transports and kernels.
        memory_bytes: Of one device; 0: unknown.
        bandwidth_bytes_per_s: Of its memory; 0: unknown.
        flops: Peak at 16 bits; 0: unknown.
        compute_capability: NVIDIA's compute capability × 10 (90: Hopper, 100: Blackwell); 0: not NVIDIA, or
        unknown.
        fabric: What carries KV to another instance.
    """

    name: str
    vendor: Vendor
    memory_bytes: int = 0
    bandwidth_bytes_per_s: float = 0.0
    flops: float = 0.0
    compute_capability: int = 0
    fabric: Fabric = Fabric.AUTO

    @property
    def memory_known(self) -> bool:
        """Whether the size of its memory is known; without it no fit can be computed."""
        return self.memory_bytes > 0

    @property
    def supports_fp8(self) -> bool:
        """Whether it multiplies in FP8: Ada and later, and each AMD device, since MI300 and MI325X do."""
        return self.compute_capability >= 89 or self.vendor is Vendor.AMD

    @property
    def supports_fp4(self) -> bool:
        """Whether it multiplies in FP4: Blackwell."""
        return self.compute_capability >= 100


def _nvidia(name: str, mib: int, tb_s: float, tflops: float, capability: int) -> HardwareFacts:
    return HardwareFacts(
        name=name,
        vendor=Vendor.NVIDIA,
        memory_bytes=mib * MIB,
        bandwidth_bytes_per_s=tb_s * 1e12,
        flops=tflops * 1e12,
        compute_capability=capability,
    )


def _amd(name: str, mib: int, tb_s: float, tflops: float) -> HardwareFacts:
    return replace(_nvidia(name, mib, tb_s, tflops, 0), vendor=Vendor.AMD)


CPU = HardwareFacts(name="CPU", vendor=Vendor.CPU, fabric=Fabric.TCP)
UNKNOWN_GPU = HardwareFacts(name="GPU", vendor=Vendor.NVIDIA)
"""A device without description: NVIDIA, of unknown size."""

_DEVICES = {
    facts.name: facts
    for facts in (
        _nvidia("H100-SXM", 81559, 3.35, 989.5, 90),
        _nvidia("H100-PCIe", 81559, 2.0, 756.0, 90),
        _nvidia("H100-NVL", 95830, 3.9, 835.0, 90),
        _nvidia("H200-SXM", 143771, 4.8, 989.5, 90),
        _nvidia("B200", 183359, 8.0, 2250.0, 100),
        _nvidia("GB200", 189471, 8.0, 2500.0, 100),
        _nvidia("A100-80GB", 81920, 2.039, 312.0, 80),
        _nvidia("A100-40GB", 40960, 1.555, 312.0, 80),
        _nvidia("A10G", 23028, 0.6, 70.0, 86),
        _nvidia("L4", 23034, 0.3, 121.0, 89),
        _nvidia("L40S", 46068, 0.864, 362.0, 89),
        _amd("MI300X", 196592, 5.3, 1307.0),
        _amd("MI325X", 262128, 6.0, 1307.0),
        CPU,
    )
}

_ALIASES = {
    "H100": "H100-SXM",
    "H100-80GB-HBM3": "H100-SXM",
    "H100-SXM5": "H100-SXM",
    "H100-80GB": "H100-SXM",
    "H200": "H200-SXM",
    "H200-141GB": "H200-SXM",
    "A100": "A100-80GB",
    "A100-SXM": "A100-80GB",
    "A100-SXM4-80GB": "A100-80GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-80GB-PCIE": "A100-80GB",
    "A100-PCIE-80GB": "A100-80GB",
    "A100-PCIE-40GB": "A100-40GB",
    "H100-PCIE": "H100-PCIe",
    "TESLA-A100": "A100-40GB",
    "INSTINCT-MI300X": "MI300X",
    "INSTINCT-MI300X-OAM": "MI300X",
    "INSTINCT-MI325X": "MI325X",
    "INSTINCT-MI325X-OAM": "MI325X",
}


def find_hardware(name: str) -> HardwareFacts | None:
    """The device of that name, also as nodes are labelled (`NVIDIA-H100-80GB-HBM3`); None: unknown."""
    plain = name.upper().replace("_", "-").removeprefix("NVIDIA-").removeprefix("AMD-")
    return _DEVICES.get(name) or _DEVICES.get(_ALIASES.get(plain, plain))


def resolve_hardware(
    name: str = "", *, resource: str = "", memory_bytes: int | None = None, fabric: Fabric | None = None
) -> HardwareFacts:
    """Describe a device from a manifest; the manifest's values override the table's.

    Without a known name the resource decides: `amd.com/…` is an AMD device, `cpu` no accelerator, anything
    else an NVIDIA device of unknown size.
    """
    found = find_hardware(name) if name else None
    facts = found or _hardware_by_resource(resource)
    if name and found is None:
        facts = replace(facts, name=name)
    if memory_bytes is not None:
        facts = replace(facts, memory_bytes=memory_bytes)
    return facts if fabric is None else replace(facts, fabric=fabric)


def _hardware_by_resource(resource: str) -> HardwareFacts:
    if resource == "cpu":
        return CPU
    if resource.startswith("amd.com/"):
        return HardwareFacts(name="AMD GPU", vendor=Vendor.AMD)
    return UNKNOWN_GPU
