"""Types and reasons of conditions: the words that programs match on.

A type is a state that lasts, a reason is one word for why it is True or False. Messages are for people
and stand where the condition is made.
"""

READY = "Ready"
"""The service answers requests: enough instances of each role serve, and the router runs."""
INSTANCES_SERVING = "InstancesServing"
TOO_FEW_INSTANCES = "TooFewInstances"
FLOORS_TOO_HIGH = "FloorsTooHigh"
ROUTER_STARTING = "RouterStarting"

PROGRESSING = "Progressing"
"""Instances are on their way to what the spec asks for."""
INSTANCES_CHANGING = "InstancesChanging"
ROLLOUT_PROGRESSING = "RolloutProgressing"
ROLLOUT_PAUSED = "RolloutPaused"
SETTLED = "Settled"

DEGRADED = "Degraded"
"""Something that was wanted does not work, and is being repaired."""
INSTANCES_FAILED = "InstancesFailed"
IMAGE_PULL_FAILED = "ImagePullFailed"
UNSCHEDULABLE = "Unschedulable"
ENGINE_DOES_NOT_START = "EngineDoesNotStart"
NODE_LOST = "NodeLost"
INSTANCE_LOST = "InstanceLost"
ROLLED_BACK = "RolledBack"
RELABEL_NOT_OFFERED = "RelabelNotOffered"
ALL_WELL = "AllWell"

TIERS_ACCEPTED = "TiersAccepted"
"""Every QoSTier that the service names exists."""
TIERS_FOUND = "TiersFound"
TIER_NOT_FOUND = "TierNotFound"

SCALING_LIMITED = "ScalingLimited"
"""A pool has other than the replicas that somebody asked for: its bounds or the roles' floors clamp them."""
TOO_MANY_REPLICAS = "TooManyReplicas"
TOO_FEW_REPLICAS = "TooFewReplicas"
FLOORS_HOLD = "FloorsHold"
WITHIN_BOUNDS = "WithinBounds"
