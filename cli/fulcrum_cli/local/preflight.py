"""What a local run can serve: one PDService with what it refers to."""

import socket
from collections.abc import Sequence

from fulcrum_cli.local.engines import check_engines
from fulcrum_core.api import PDService, Resource
from fulcrum_core.errors import InvalidInput
from fulcrum_operator.plan.references import check_objects, check_references


def check_manifest(objects: Sequence[Resource]) -> PDService:
    """The service that the manifest is about; everything that it needs is there and right.

    Raises:
        InvalidInput: for the first rule broken.
    """
    check_objects(objects)
    check_references(objects)
    services = [obj for obj in objects if isinstance(obj, PDService)]
    if len(services) != 1:
        names = ", ".join(service.metadata.name for service in services) or "none"
        raise InvalidInput("PDService", names, "is not one: a local run serves exactly one")
    check_engines(services[0])
    return services[0]


def check_port_free(host: str, port: int) -> None:
    """Refuse a port that somebody listens on, before anything is started.

    Raises:
        InvalidInput: if it cannot be bound.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            rule = f"cannot be listened on at {host}: {getattr(error, 'strerror', None) or error}"
            raise InvalidInput("port", port, f"{rule.lower()}; --port 0 takes a free one") from error
