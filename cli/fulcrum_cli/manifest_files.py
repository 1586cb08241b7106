"""Read manifests from files, check their objects together, and find the shipped manifests.

`up`, `play` and `plan` use it; a single object is checked in `fulcrum_core.api.manifest`.
"""

from collections.abc import Sequence
from pathlib import Path

from fulcrum_core.api import PDService, QoSTier
from fulcrum_core.api.manifest import load_manifest
from fulcrum_core.api.meta import Resource
from fulcrum_core.errors import InvalidInput

_PACKAGE = Path(__file__).parent
_SHIPPED_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")


def read_manifest(path: Path) -> tuple[Resource, ...]:
    """Return all objects of the file.

    Raises:
        InvalidInput: if the file cannot be read, or an object breaks a rule (the first one is named).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidInput(str(path), "missing", "must be a file that exists") from None
    except OSError as error:
        raise InvalidInput(str(path), error.strerror, "must be a readable text file") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(str(path), "not UTF-8", "must be a readable text file") from error
    return load_manifest(text, source=str(path))


def find_shipped_manifest(name: str) -> Path:
    """Return the path of a shipped manifest: package data when installed, `examples/` in a checkout.

    A path that does not exist if there is no such manifest; `read_manifest` reports it.
    """
    files = [folder / f"{name}.yaml" for folder in _SHIPPED_FOLDERS]
    return next((file for file in files if file.exists()), files[-1])


def check_objects(objects: Sequence[Resource]) -> None:
    """Refuse a manifest with an object twice, or with a kind that only the operator creates.

    Raises:
        InvalidInput: for the first violation.
    """
    seen: set[tuple[str, str, str]] = set()
    for obj in objects:
        if not isinstance(obj, PDService | QoSTier):
            raise InvalidInput("kind", obj.kind, "is created by the operator: write a PDService")
        key = (obj.kind, obj.metadata.namespace, obj.metadata.name)
        if key in seen:
            raise InvalidInput(f"{obj.kind} metadata.name", obj.metadata.name, "is in the manifest twice")
        seen.add(key)


def check_references(objects: Sequence[Resource]) -> None:
    """Refuse a manifest that names a QoSTier but does not contain it.

    Raises:
        InvalidInput: for the first missing tier.
    """
    tiers = {(tier.metadata.namespace, tier.metadata.name) for tier in objects if isinstance(tier, QoSTier)}
    for service in objects:
        for index, name in enumerate(service.spec.qos_tiers if isinstance(service, PDService) else ()):
            if (service.metadata.namespace, name) not in tiers:
                path = f"PDService {service.metadata.name} spec.qosTiers[{index}]"
                raise InvalidInput(path, name, "is not the name of a QoSTier in this manifest")
