"""Checks of a local run before anything is started: the manifest, and the router's port.

`run` and the options of `play` call them; a refusal is one line for the user.
"""

from collections.abc import Sequence
from pathlib import Path

from fulcrum_cli.local.engines import check_engines, check_port_is_free
from fulcrum_cli.manifest_files import check_objects, check_references
from fulcrum_core.api import PDService, Resource
from fulcrum_core.errors import InvalidInput


def check_manifest(objects: Sequence[Resource], *, api_keys: Path | None = None) -> PDService:
    """Return the manifest's one PDService, after checking that this machine can run it.

    `api_keys` takes the place of the Secret that the service names: there is none on this machine.

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
    _check_api_keys(services[0], api_keys)
    return services[0]


def _check_api_keys(service: PDService, folder: Path | None) -> None:
    auth = service.spec.router.auth
    keys = None if auth is None else auth.api_keys
    if keys is not None and folder is None:
        rule = "is not on this machine: `fulcrum up --api-keys FOLDER` names a folder with the same files"
        raise InvalidInput(
            f"PDService {service.metadata.name} spec.router.auth.apiKeys.secretName", keys.secret_name, rule
        )
    if keys is None and folder is not None:
        raise InvalidInput("--api-keys", folder, "has no effect: the service has no spec.router.auth.apiKeys")
    if folder is not None and not folder.is_dir():
        raise InvalidInput("--api-keys", folder, "is not a folder")


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
