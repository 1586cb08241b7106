"""What objects of one manifest, and those already there, must hold together."""

from collections.abc import Iterable, Sequence

from fulcrum_core.api import PDService, QoSTier, Resource
from fulcrum_core.errors import InvalidInput


def check_references(objects: Sequence[Resource], existing: Iterable[Resource] = ()) -> None:
    """Refuse a manifest that says an object twice, or names a QoSTier that neither it nor the store has.

    Raises:
        InvalidInput: for the first rule broken.
    """
    seen: set[tuple[str, str, str]] = set()
    for obj in objects:
        key = (obj.kind, obj.metadata.namespace, obj.metadata.name)
        if key in seen:
            raise InvalidInput(f"{obj.kind} metadata.name", obj.metadata.name, "is in the manifest twice")
        seen.add(key)
    tiers = {
        (tier.metadata.namespace, tier.metadata.name)
        for tier in (*objects, *existing)
        if isinstance(tier, QoSTier)
    }
    for service in objects:
        if isinstance(service, PDService):
            _check_tiers(service, tiers)


def _check_tiers(service: PDService, tiers: set[tuple[str, str]]) -> None:
    for index, name in enumerate(service.spec.qos_tiers):
        if (service.metadata.namespace, name) not in tiers:
            path = f"PDService {service.metadata.name} spec.qosTiers[{index}]"
            raise InvalidInput(path, name, "is not the name of a QoSTier")
