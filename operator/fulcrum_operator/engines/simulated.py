"""The simulated engine server: its command line and what it is to its peers."""

from fulcrum_core.api import EngineIdentitySpec, PDInstance, PDInstanceSpec
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import FlipStrategy

FLIP_STRATEGY = FlipStrategy.RELABEL
"""Like vLLM's NixlConnector as `kv_both`, it takes its role from each request."""

SERVER_MODULE = "fulcrum_simulator.server"
"""The module that an engine runs."""

_ENGINE = "simulated"
_KV_DTYPE = "auto"


def arguments(
    instance: PDInstance,
    *,
    host: str,
    port: int = 0,
    side_channel_port: int = 0,
    shutdown_timeout_s: float = 0.0,
) -> tuple[str, ...]:
    """What `SERVER_MODULE` is told.

    Args:
        instance: What it serves.
        host: The address that it listens on and that peers are told.
        port: Of its HTTP API; 0: any.
        side_channel_port: Where peers pull KV blocks; 0: any.
        shutdown_timeout_s: How long a SIGTERM lets running requests end; 0, the default, is not passed.
    """
    spec = instance.spec
    return (
        *("--name", instance.metadata.name),
        *("--model", spec.model),
        *("--profile", spec.engine.profile),
        *("--host", host, "--port", str(port), "--side-channel-port", str(side_channel_port)),
        *(("--role", spec.role.lower()) if spec.role else ()),
        *(("--shutdown-timeout", f"{shutdown_timeout_s:g}") if shutdown_timeout_s else ()),
    )


def identity(spec: PDInstanceSpec, profile: EngineProfile) -> EngineIdentitySpec:
    """What its peers must agree with to exchange KV blocks: engines of one model and one profile's shape."""
    return EngineIdentitySpec(
        model=spec.model,
        engine=_ENGINE,
        kv_dtype=_KV_DTYPE,
        block_size=profile.block_size,
        tensor_parallel=profile.tensor_parallel,
    )
