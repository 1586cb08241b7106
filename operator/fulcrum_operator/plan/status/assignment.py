"""The status of a PDAssignment, which the columns of `kubectl get pda` show: roles as a count and a list.

`plan/service` writes it with the spec that `plan/assignment` decided.
"""

from collections.abc import Sequence

from fulcrum_core.api import PDAssignmentSpec, PDAssignmentStatus
from fulcrum_core.values import Role

_NAMES_MAX = 8
"""Names that the summary lists for each role."""


def assignment_status(spec: PDAssignmentSpec) -> PDAssignmentStatus:
    """Return the summary of the assigned roles."""
    prefill = [name for name, entry in spec.roles.items() if entry.role is Role.PREFILL]
    decode = [name for name, entry in spec.roles.items() if entry.role is Role.DECODE]
    return PDAssignmentStatus(
        prefill=len(prefill),
        decode=len(decode),
        cordoned=sum(entry.cordoned for entry in spec.roles.values()),
        prefill_instances=_list_first(prefill),
        decode_instances=_list_first(decode),
    )


def _list_first(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
