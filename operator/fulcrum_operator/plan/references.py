"""What the objects of one manifest must be, each and together."""

from collections.abc import Sequence

from fulcrum_core.api import PDService, QoSTier, Resource
from fulcrum_core.errors import InvalidInput


def check_objects(objects: Sequence[Resource]) -> None:
    """Refuse what no manifest may hold: an object twice, or one that only the operator makes.

    Raises:
        InvalidInput: for the first rule broken.
    """
    seen: set[tuple[str, str, str]] = set()
    for obj in objects:
        if not isinstance(obj, PDService | QoSTier):
            raise InvalidInput("kind", obj.kind, "is made by the operator: write a PDService")
        key = (obj.kind, obj.metadata.namespace, obj.metadata.name)
        if key in seen:
            raise InvalidInput(f"{obj.kind} metadata.name", obj.metadata.name, "is in the manifest twice")
        seen.add(key)


def check_references(objects: Sequence[Resource]) -> None:
    """Refuse a manifest that names a QoSTier and does not hold it.

    Raises:
        InvalidInput: for the first that is missing.
    """
    tiers = {(tier.metadata.namespace, tier.metadata.name) for tier in objects if isinstance(tier, QoSTier)}
    for service in objects:
        for index, name in enumerate(service.spec.qos_tiers if isinstance(service, PDService) else ()):
            if (service.metadata.namespace, name) not in tiers:
                path = f"PDService {service.metadata.name} spec.qosTiers[{index}]"
                raise InvalidInput(path, name, "is not the name of a QoSTier of this manifest")
