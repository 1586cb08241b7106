"""The list of our kinds, for stores, manifests and CRDs. A new kind is entered here."""

from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.qostier import QoSTier
from fulcrum_core.errors import InvalidInput

KINDS: tuple[type[Resource], ...] = (PDService, PDPool, PDInstance, PDAssignment, QoSTier)
_BY_NAME = {kind.kind_name(): kind for kind in KINDS}


def find_kind(name: object) -> type[Resource]:
    """Return the model of a kind.

    Raises:
        InvalidInput: if there is no such kind.
    """
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        raise InvalidInput("kind", name, f"is not one of {', '.join(_BY_NAME)}")
    return kind
