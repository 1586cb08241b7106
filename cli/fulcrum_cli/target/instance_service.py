"""From the name of an instance to its service."""

from fulcrum_cli.target.connection import TargetConnection, service_name_of
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.formatting import format_list


async def find_service_of_instance(connection: TargetConnection, instance: str) -> PDService:
    """The service that the instance belongs to.

    Raises:
        InvalidInput: if there is no such instance.
    """
    instances = (await connection.store.list(PDInstance, namespace=connection.namespace)).items
    found = next((i.spec.service for i in instances if i.metadata.name == instance), None)
    services = {service.metadata.name: service for service in await connection.services()}
    name = found if found in services else service_name_of(instance)
    if name not in services:
        known = format_list([i.metadata.name for i in instances], at_most=12) or "none"
        raise InvalidInput("instance", instance, f"is not in {connection.description}; there are {known}")
    return services[name]
