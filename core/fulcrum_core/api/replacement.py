"""How instances of a service are drained, replaced and moved: parts of a PDService's spec.

The operator's plan (`rollout`, `disruption_budget`, `departing_nodes`) follows them.
"""

from typing import Literal, Self

from pydantic import ConfigDict, Field, StrictBool, StrictInt, model_validator

from fulcrum_core.api.meta import ApiModel, Duration, cel_rule


class DrainSpec(ApiModel):
    """How an instance is drained before it stops."""

    timeout: Duration = Field(
        default=120.0,
        ge=0,
        description="Longest wait for an instance's requests before the instance is stopped (default 120s).",
    )


class RolloutSpec(ApiModel):
    """How instances are replaced when their launch spec changes."""

    model_config = ConfigDict(
        json_schema_extra=cel_rule(
            "self.maxSurge + self.maxUnavailable > 0",
            "has maxSurge and maxUnavailable 0: nothing could be replaced",
        )
    )

    max_surge: StrictInt = Field(
        default=1,
        ge=0,
        le=1024,
        description="Instances of a pool that may exist beyond the desired number (default 1).",
    )
    max_unavailable: StrictInt = Field(
        default=0,
        ge=0,
        le=1024,
        description="Instances of a pool that may be missing during a roll-out (default 0).",
    )
    paused: StrictBool = Field(
        default=False, description="Whether the roll-out is paused: no instance is replaced (default false)."
    )
    progress_deadline: Duration | None = Field(
        default=None,
        gt=0,
        description="Longest wait for a new instance to become ready before the last good revision returns "
        "(default: two minutes plus ten times the engine's start-up time).",
    )

    @model_validator(mode="after")
    def _check_surge_or_unavailable(self) -> Self:
        if not self.max_surge + self.max_unavailable:
            raise ValueError("has maxSurge and maxUnavailable 0: nothing could be replaced")
        return self


class DisruptionSpec(ApiModel):
    """How many instances a drain of a node may take away or move at a time."""

    max_unavailable: StrictInt | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Most instances that evictions may take away at a time, and most that are moved from "
        "cordoned nodes at a time (default: one, and evictions leave the floors; instances on nodes that are "
        "about to be drained are replaced before they stop).",
    )
    cordoned_nodes: Literal["Move", "Stay"] = Field(
        default="Move",
        description="Move: instances on cordoned nodes are replaced on other nodes, even if nobody drains "
        "the node. Stay: they serve until they are evicted; only then are they replaced (default Move). "
        "Instances on nodes that will be deleted always move.",
    )
