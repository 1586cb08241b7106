"""The status of a PDAssignment, which the columns of `kubectl get pda` show: roles as a count and a list.

`plan/service` writes it with the spec that `plan/assignment` decided.
"""

from fulcrum_core.api import PDAssignmentSpec, PDAssignmentStatus
from fulcrum_core.formatting import format_list
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
        prefill_instances=format_list(prefill, at_most=_NAMES_MAX),
        decode_instances=format_list(decode, at_most=_NAMES_MAX),
    )
