"""Objects as users write them, so that a test names only kind, name and spec.

Tests of stores, local runs and the router use it; the operator's tests have `unit/operator/builders.py`.
"""

from collections.abc import Mapping
from typing import Any

from fulcrum_core.api import PDAssignment, PDInstance, PDService
from fulcrum_core.api.manifest import parse_as
from fulcrum_core.ports import R, Store


def make_object(kind: type[R], name: str, spec: Mapping[str, Any]) -> R:
    """Parse a manifest of this kind; the rules for users' manifests apply."""
    return parse_as(kind, {"metadata": {"name": name}, "spec": spec})


async def create_service_of_three(store: Store) -> None:
    """Create the service `chat` with one prefill and two decode instances, all serving."""
    await store.create(make_object(PDService, "chat", {"model": "m", "instances": 3}))
    roles = {"chat-0": "Prefill", "chat-1": "Decode", "chat-2": "Decode"}
    for name in roles:
        spec = {"service": "chat", "pool": "flex", "model": "m", "engine": {"type": "Simulated"}}
        await store.create(make_object(PDInstance, name, spec))
        await store.patch_status(PDInstance, name, {"phase": "Serving"}, namespace="default")
    entries = {
        name: {"role": role, "since": "2026-01-01T00:00:00.000000Z", "by": "Operator"}
        for name, role in roles.items()
    }
    await store.create(make_object(PDAssignment, "chat", {"service": "chat", "roles": entries}))
