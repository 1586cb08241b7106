"""Checks of a local run before anything is started: the manifest, and the router's port."""

from collections.abc import Sequence

from fulcrum_cli.local.engines import check_engines, check_port_is_free
from fulcrum_cli.manifest_files import check_objects, check_references
from fulcrum_core.api import PDService, Resource
from fulcrum_core.errors import InvalidInput


def check_manifest(objects: Sequence[Resource]) -> PDService:
    """Return the manifest's one PDService, after checking that this machine can run it.

    Raises:
        InvalidInput: for the first rule broken.
    """
    check_objects(objects)
    check_references(objects)
    services = [obj for obj in objects if isinstance(obj, PDService)]
    if len(services) != 1:
        names = ", ".join(service.metadata.name for service in services) or "none"
        raise InvalidInput("PDService", names, "must be exactly one: a local run serves one PDService")
    check_engines(services[0])
    return services[0]


def check_router_port(host: str, port: int) -> None:
    """Check that the router can listen on a port.

    Raises:
        InvalidInput: if the port cannot be bound.
    """
    try:
        check_port_is_free(host, port)
    except (OSError, OverflowError) as error:
        rule = f"cannot be listened on at {host}: {getattr(error, 'strerror', None) or error}"
        raise InvalidInput("port", port, f"{rule.lower()}; --port 0 takes a free one") from error
