"""From the name of an instance to its service."""

from fulcrum_cli.target.connection import Connection, service_name
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.spelling import format_list


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
        known = format_list([i.metadata.name for i in instances], at_most=12) or "none"
        raise InvalidInput("instance", instance, f"is not in {there.words}; there are {known}")
    return services[name]
