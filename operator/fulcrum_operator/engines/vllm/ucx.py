"""UCX's environment: which transports may carry KV between two engines.

What is listed may be used, and UCX takes the fastest that both ends have. A list that lacks the fast one
falls back to TCP without a word, so each fabric's list has what it is there for.
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
    """The variables of UCX on this hardware.

    Args:
        hardware: Vendor and fabric.
        devices: Network devices that may be used; None: all.
        loopback: Whether all peers are on this machine.
    """
    transports = (*_transports(hardware), "tcp", "sm", "self")
    variables = [LaunchEnvVar("UCX_TLS", ",".join(transports))]
    if net := devices or ("lo" if loopback else None):
        variables.append(LaunchEnvVar("UCX_NET_DEVICES", net))
    if "rc" in transports:
        # A transfer is many small blocks: rendezvous early, and one rail for what is sent eagerly.
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
