"""The simulated engine server: its command line and what it is to its peers."""

from fulcrum_core.api import IdentitySpec, PDInstance, PDInstanceSpec
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import FlipStrategy

STRATEGY = FlipStrategy.RELABEL
"""Like vLLM's NixlConnector as `kv_both`, it takes its role from each request."""

_ENGINE = "simulated"
_KV_DTYPE = "auto"


def command(instance: PDInstance, *, python: str, host: str) -> tuple[str, ...]:
    """The command line that serves this instance on free ports of `host`."""
    spec = instance.spec
    return (
        *(python, "-m", "fulcrum_simulator.server"),
        *("--name", instance.metadata.name),
        *("--model", spec.model),
        *("--profile", spec.engine.profile),
        *("--host", host, "--port", "0", "--side-channel-port", "0"),
    )


def identity(spec: PDInstanceSpec, profile: EngineProfile) -> IdentitySpec:
    """What its peers must agree with to exchange KV blocks: engines of one model and one profile's shape."""
    return IdentitySpec(
        model=spec.model,
        engine=_ENGINE,
        kv_dtype=_KV_DTYPE,
        block_size=profile.block_size,
        tensor_parallel=profile.tensor_parallel,
    )
