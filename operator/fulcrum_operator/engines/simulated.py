"""The adapter of the simulated engine server: command line and identity.

Pod manifests and the local run use it; the server itself is `fulcrum_simulator.server`. There is no flip with
a restart: a simulated engine serves both roles.
"""

from fulcrum_core.api import EngineIdentitySpec, PDInstance, PDInstanceSpec
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import FlipStrategy

FLIP_STRATEGY = FlipStrategy.RELABEL
"""Like vLLM's NixlConnector with `kv_both`, the engine takes its role from each request."""

SERVER_MODULE = "fulcrum_simulator.server"
"""Module of the engine server, run with `python -m`."""

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
    """Return the command-line arguments of `SERVER_MODULE` for one instance.

    Args:
        instance: The instance to serve.
        host: Address that the engine listens on and announces to its peers.
        port: Port of its HTTP API; 0 for any free port.
        side_channel_port: Port at which peers pull KV blocks; 0 for any free port.
        shutdown_timeout_s: Seconds after SIGTERM in which running requests may end; 0 is not passed.
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
    """Return the identity of the engine. Engines with equal model and profile shape can exchange KV."""
    return EngineIdentitySpec(
        model=spec.model,
        engine=_ENGINE,
        kv_dtype=_KV_DTYPE,
        block_size=profile.block_size,
        tensor_parallel=profile.tensor_parallel,
    )
