"""PDAssignment: who plays which role, in one object, because only one object can be changed atomically.

Every voluntary action is one write of this object, conditional on its resourceVersion and judged by
`fulcrum_core.assignment.may_apply`. Its generation is the epoch that routers acknowledge.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from fulcrum_core.api.meta import ApiModel, PrinterColumn, Resource, Time
from fulcrum_core.values import Actor, Role

AssignedRole = Literal[Role.PREFILL, Role.DECODE]


class Refusal(ApiModel):
    """A wish that was turned down, so that nobody retries for ever."""

    role: AssignedRole | None = Field(
        default=None, description="The role that was wished for; none: another change, as a cordon or a pin."
    )
    reason: str = Field(max_length=1024, description="Why it was turned down.")
    until: Time = Field(description="Before this time the same wish is refused without a second look.")


class RoleAssignment(ApiModel):
    """The role one instance shall play."""

    role: AssignedRole = Field(description="Prefill or Decode.")
    since: Time = Field(description="When it was given this role.")
    by: Actor = Field(description="Who gave it: Operator, Autoscaler or Person.")
    reason: str = Field(default="", max_length=1024, description="Why, in words with numbers.")
    pinned_until: Time | None = Field(
        default=None, description="A person's word: until then nobody else flips it."
    )
    cordoned: StrictBool = Field(default=False, description="Whether it gets no new work (default false).")
    cordoned_by: Actor | None = Field(
        default=None, description="Who cordoned it (default: `by`). A person's cordon only a person lifts."
    )
    cordon_reason: str = Field(default="", max_length=1024, description="Why it is cordoned, in words.")
    refused: Refusal | None = Field(default=None, description="The last wish for it that was turned down.")

    @property
    def effective_cordoned_by(self) -> Actor | None:
        """Who keeps new work from it; None if nobody does."""
        return (self.cordoned_by or self.by) if self.cordoned else None

    @property
    def effective_cordon_reason(self) -> str:
        """Why it is cordoned, by the word of who cordoned it."""
        return self.cordon_reason or self.reason or "no reason given"


class Floors(ApiModel):
    """Fewest serving instances of each role that a voluntary action may leave."""

    prefill: StrictInt = Field(default=1, ge=0, le=1024, description="Fewest that serve prefill (default 1).")
    decode: StrictInt = Field(default=1, ge=0, le=1024, description="Fewest that serve decode (default 1).")

    def for_role(self, role: Role) -> int:
        """The floor of one role."""
        return self.prefill if role is Role.PREFILL else self.decode


def _drop_null_roles(roles: object) -> object:
    """A role of null is a role not written."""
    if not isinstance(roles, Mapping):
        return roles
    return {name: role for name, role in roles.items() if role is not None}


class PDAssignmentSpec(ApiModel):
    """The wish."""

    service: str = Field(max_length=253, description="The PDService this is for.")
    roles: Annotated[dict[str, RoleAssignment], BeforeValidator(_drop_null_roles), Field(max_length=1024)] = (
        Field(default_factory=dict, description="The role of each instance, by its name.")
    )
    floors: Floors = Field(default_factory=Floors, description="Fewest serving instances of each role.")
    last_prefill_to_decode: Time | None = Field(
        default=None,
        description="When an instance was last flipped from Prefill to Decode; the cooldown counts from it.",
    )
    flips: StrictInt = Field(default=0, ge=0, le=2**53, description="Flips so far.")


class PDAssignment(Resource):
    """Who plays which role in one service. Made by the operator under the service's name."""

    plural: ClassVar[str] = "pdassignments"
    short_name: ClassVar[str] = "pda"
    immutable_fields: ClassVar[tuple[str, ...]] = ("service",)
    printer_columns: ClassVar[tuple[PrinterColumn, ...]] = (
        PrinterColumn(name="Flips", type="integer", json_path=".spec.flips"),
        PrinterColumn(name="Floor P", type="integer", json_path=".spec.floors.prefill"),
        PrinterColumn(name="Floor D", type="integer", json_path=".spec.floors.decode"),
        PrinterColumn(name="Age", type="date", json_path=".metadata.creationTimestamp"),
    )

    kind: Literal["PDAssignment"] = "PDAssignment"
    spec: PDAssignmentSpec = Field(description="The wish.")
