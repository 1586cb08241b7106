"""PDAssignment: the role of every instance of a service, in one object, so that roles change atomically.

Every voluntary change is one write of this object, conditional on its resourceVersion and checked by
`fulcrum_core.assignment.may_apply`. Routers acknowledge its generation.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from fulcrum_core.api.meta import ApiModel, PrinterColumn, Resource, Time
from fulcrum_core.values import Actor, Role

AssignedRole = Literal[Role.PREFILL, Role.DECODE]


class Refusal(ApiModel):
    """A desired change that was refused."""

    role: AssignedRole | None = Field(
        default=None,
        description="Role that was refused; unset: another change was refused, such as a cordon.",
    )
    reason: str = Field(max_length=1024, description="Why the change was refused.")
    until: Time = Field(description="Until this time the same change is refused without being checked again.")


class RoleAssignment(ApiModel):
    """Desired role of one instance."""

    role: AssignedRole = Field(description="Prefill or Decode.")
    since: Time = Field(description="When the instance got this role.")
    by: Actor = Field(description="Who assigned the role: Operator, Autoscaler or Person.")
    reason: str = Field(default="", max_length=1024, description="Why the role was assigned, with numbers.")
    pinned_until: Time | None = Field(
        default=None, description="Until this time only a person may flip the instance."
    )
    cordoned: StrictBool = Field(
        default=False, description="Whether the instance gets no new requests (default false)."
    )
    cordoned_by: Actor | None = Field(
        default=None,
        description="Who cordoned the instance (default: `by`). Only a person may remove a person's cordon.",
    )
    cordon_reason: str = Field(default="", max_length=1024, description="Why the instance is cordoned.")
    refused: Refusal | None = Field(
        default=None, description="Last change of this instance that was refused."
    )

    @property
    def effective_cordoned_by(self) -> Actor | None:
        """Actor that cordoned the instance; None if the instance is not cordoned."""
        return (self.cordoned_by or self.by) if self.cordoned else None

    @property
    def effective_cordon_reason(self) -> str:
        """Reason of the cordon; without one, the reason of the role."""
        return self.cordon_reason or self.reason or "no reason given"


class Floors(ApiModel):
    """Fewest serving instances of each role that a voluntary change may leave."""

    prefill: StrictInt = Field(
        default=1, ge=0, le=1024, description="Fewest serving prefill instances (default 1)."
    )
    decode: StrictInt = Field(
        default=1, ge=0, le=1024, description="Fewest serving decode instances (default 1)."
    )

    def for_role(self, role: Role) -> int:
        """The floor of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


def _drop_null_roles(roles: object) -> object:
    """Drop roles that are null, as if they were not written."""
    if not isinstance(roles, Mapping):
        return roles
    return {name: role for name, role in roles.items() if role is not None}


class PDAssignmentSpec(ApiModel):
    """Desired role of each instance of a service, with the floors and the flip history."""

    service: str = Field(max_length=253, description="PDService that the roles belong to.")
    roles: Annotated[dict[str, RoleAssignment], BeforeValidator(_drop_null_roles), Field(max_length=1024)] = (
        Field(default_factory=dict, description="Role of each instance, by instance name.")
    )
    floors: Floors = Field(default_factory=Floors, description="Fewest serving instances of each role.")
    last_prefill_to_decode: Time | None = Field(
        default=None,
        description="When an instance was last flipped from Prefill to Decode; the cooldown counts from it.",
    )
    flips: StrictInt = Field(default=0, ge=0, le=2**53, description="Number of flips so far.")


class PDAssignmentStatus(ApiModel):
    """Summary of the assigned roles, for `kubectl get`. Programs read the roles themselves from the spec."""

    prefill: int | None = Field(default=None, description="Number of instances with the role Prefill.")
    decode: int | None = Field(default=None, description="Number of instances with the role Decode.")
    cordoned: int | None = Field(default=None, description="Number of cordoned instances.")
    prefill_instances: str = Field(
        default="", description="Names of the first instances with the role Prefill."
    )
    decode_instances: str = Field(
        default="", description="Names of the first instances with the role Decode."
    )


class PDAssignment(Resource):
    """Role of every instance of one service. Created by the operator under the service's name."""

    plural: ClassVar[str] = "pdassignments"
    short_name: ClassVar[str] = "pda"
    immutable_fields: ClassVar[tuple[str, ...]] = ("service",)
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Prefill", type="integer", json_path=".status.prefill"),
        PrinterColumn(name="Decode", type="integer", json_path=".status.decode"),
        PrinterColumn(name="Cordoned", type="integer", json_path=".status.cordoned"),
        PrinterColumn(name="Flips", type="integer", json_path=".spec.flips"),
        PrinterColumn(name="Floor P", type="integer", json_path=".spec.floors.prefill"),
        PrinterColumn(name="Floor D", type="integer", json_path=".spec.floors.decode"),
        PrinterColumn(
            name="Prefill Instances", type="string", json_path=".status.prefillInstances", priority=1
        ),
        PrinterColumn(
            name="Decode Instances", type="string", json_path=".status.decodeInstances", priority=1
        ),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["PDAssignment"] = "PDAssignment"
    spec: PDAssignmentSpec = Field(description="Desired role of each instance.")
    status: PDAssignmentStatus = Field(
        default_factory=PDAssignmentStatus, description="Summary of the assigned roles."
    )
