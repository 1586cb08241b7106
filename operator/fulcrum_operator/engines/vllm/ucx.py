"""Environment variables of UCX: the transports that may carry KV between two engines.

UCX uses the fastest listed transport that both ends have. Without the fabric's own transport in the list it
falls back to TCP and does not report it, so each fabric has a list of its own. `vllm/launch` adds the
variables to an engine that transfers KV with NIXL.
"""

from fulcrum_core.hardware import Fabric, HardwareFacts, Vendor
from fulcrum_operator.engines.launch import LaunchEnvVar

_RDMA_TRANSPORTS = ("rc", "rdmacm")
_COPY_TRANSPORTS = {
    Vendor.NVIDIA: ("cuda_copy",),
    Vendor.AMD: ("rocm_copy",),
    Vendor.CPU: (),
}
_PEER_TRANSPORTS = {
    Vendor.NVIDIA: ("cuda_ipc",),
    Vendor.AMD: ("rocm_ipc",),
    Vendor.CPU: (),
}


def ucx_environment(
    hardware: HardwareFacts, *, devices: str | None, loopback: bool
) -> tuple[LaunchEnvVar, ...]:
    """Environment variables of UCX on this hardware.

    Args:
        hardware: Hardware with vendor and fabric.
        devices: Network devices that UCX may use; None for all.
        loopback: Whether all peers are on this machine.
    """
    transports = (*_transports(hardware), "tcp", "sm", "self")
    variables = [LaunchEnvVar("UCX_TLS", ",".join(transports))]
    if net := devices or ("lo" if loopback else None):
        variables.append(LaunchEnvVar("UCX_NET_DEVICES", net))
    if "rc" in transports:
        # A KV transfer has many small blocks: use rendezvous early, and one rail for eager messages.
        variables += [LaunchEnvVar("UCX_RNDV_THRESH", "16384"), LaunchEnvVar("UCX_MAX_EAGER_RAILS", "1")]
    return tuple(variables)


def _transports(hardware: HardwareFacts) -> tuple[str, ...]:
    peer, copy = _PEER_TRANSPORTS[hardware.vendor], _COPY_TRANSPORTS[hardware.vendor]
    match hardware.fabric:
        case Fabric.TCP:
            return copy
        case Fabric.NVLINK:
            return (*peer, *copy)
        case Fabric.INFINIBAND | Fabric.ROCE:
            return (*peer, *_RDMA_TRANSPORTS, *copy)
        case Fabric.AUTO:
            return copy if hardware.vendor is Vendor.CPU else (*peer, *_RDMA_TRANSPORTS, *copy)
