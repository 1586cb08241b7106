"""Builders of RouterState and InstanceState: idle and serving unless a test sets other values."""

from typing import Any

from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_core.values import Role


def instance_state(name: str, role: Role = Role.DECODE, **numbers: Any) -> InstanceState:
    """Return an idle, serving instance with these fields replaced."""
    defaults: dict[str, Any] = {
        "serving": True,
        "prefill_queued_s": 0.0,
        "prefill_tokens": 0,
        "decode_tokens": 0,
        "decode_legs": 0,
        "legs": 0,
        "pending_transfers": 0,
        "itl_s": None,
    }
    return InstanceState(name=name, role=role, **{**defaults, **numbers})


def router_state(*instances: InstanceState, **fields: Any) -> RouterState:
    """Return the state of an idle router of the service `chat` with these fields replaced."""
    defaults: dict[str, Any] = {
        "service": "chat",
        "generation": 1,
        "acknowledged_at_s": 0.0,
        "at_s": 0.0,
        "flip_request_role": None,
        "flip_request_seq": 0,
        "prediction_error": None,
        "local_prefills": 0,
        "tiers": (),
    }
    return RouterState(instances=instances, **{**defaults, **fields})
