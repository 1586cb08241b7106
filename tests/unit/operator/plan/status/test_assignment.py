"""The summary of the roles that `kubectl get pda` shows."""

from fulcrum_core.api import PDAssignmentSpec, PDAssignmentStatus, RoleAssignment
from fulcrum_core.values import Actor, Role
from fulcrum_operator.plan.status.assignment import assignment_status


def entry(role: Role, *, cordoned: bool = False) -> RoleAssignment:
    return RoleAssignment.model_validate(
        {"role": role, "since": 0.0, "by": Actor.OPERATOR, "cordoned": cordoned}
    )


def test_roles_and_cordons_are_counted_and_the_first_eight_names_are_listed() -> None:
    roles = {f"chat-{number}": entry(Role.PREFILL, cordoned=number == 0) for number in range(10)}
    spec = PDAssignmentSpec(service="chat", roles={**roles, "chat-10": entry(Role.DECODE)})
    assert assignment_status(spec) == PDAssignmentStatus(
        prefill=10,
        decode=1,
        cordoned=1,
        prefill_instances="chat-0, chat-1, chat-2, chat-3, chat-4, chat-5, chat-6, chat-7 and 2 more",
        decode_instances="chat-10",
    )


def test_a_service_without_instances_has_zeros() -> None:
    assert assignment_status(PDAssignmentSpec(service="chat")) == PDAssignmentStatus(
        prefill=0, decode=0, cordoned=0
    )
