"""What a router says of itself and of its instances, idle but for what a test is about."""

from typing import Any

from fulcrum_core.state import InstanceState, RouterState
from fulcrum_core.values import Role


def instance_state(name: str, role: Role = Role.DECODE, **numbers: Any) -> InstanceState:
    """An idle, serving instance, but for `numbers`."""
    idle: dict[str, Any] = {
        "serving": True,
        "prefill_queued_s": 0.0,
        "prefill_tokens": 0,
        "decode_tokens": 0,
        "decode_requests": 0,
        "legs": 0,
        "open_handoffs": 0,
        "itl_s": None,
    }
    return InstanceState(name=name, role=role, **{**idle, **numbers})


def router_state(*instances: InstanceState, **fields: Any) -> RouterState:
    """The router of the service `chat` at generation 1, with nothing to tell but `fields`."""
    quiet: dict[str, Any] = {
        "service": "chat",
        "generation": 1,
        "acknowledged_at_s": 0.0,
        "at_s": 0.0,
        "flip_wanted": None,
        "flip_wanted_seq": 0,
        "prediction_error": None,
        "local_prefills": 0,
        "tiers": (),
    }
    return RouterState(instances=instances, **{**quiet, **fields})
