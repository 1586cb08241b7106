"""From the name of an instance to its service."""

from collections.abc import Iterable

from fulcrum_cli.connection import Connection
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput


def service_name(instance: str) -> str:
    """The service whose instances are called so: `chat` for `chat-3`."""
    return instance.rpartition("-")[0]


async def service_of(there: Connection, instance: str) -> PDService:
    """The service that the instance belongs to.

    Raises:
        InvalidInput: if there is no such instance.
    """
    instances = (await there.store.list(PDInstance, namespace=there.namespace)).items
    found = next((i.spec.service for i in instances if i.metadata.name == instance), None)
    services = {service.metadata.name: service for service in await there.services()}
    name = found if found in services else service_name(instance)
    if name not in services:
        known = _listed(i.metadata.name for i in instances)
        raise InvalidInput("instance", instance, f"is not in {there.words}; there are {known}")
    return services[name]


def _listed(names: Iterable[str], *, at_most: int = 12) -> str:
    known = list(names)
    more = f" and {len(known) - at_most} more" if len(known) > at_most else ""
    return (", ".join(known[:at_most]) or "none") + more
