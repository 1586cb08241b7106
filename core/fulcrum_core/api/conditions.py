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
IMAGE_PULL_ERRORS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}
)
"""Reasons of the kubelet for a container that waits because its image cannot be pulled."""
UNSCHEDULABLE = "Unschedulable"
ENGINE_START_FAILED = "EngineStartFailed"
NODE_LOST = "NodeLost"
INSTANCE_LOST = "InstanceLost"
ROLLED_BACK = "RolledBack"
RELABEL_NOT_SUPPORTED = "RelabelNotSupported"
AS_EXPECTED = "AsExpected"

TIERS_ACCEPTED = "TiersAccepted"
"""Every QoSTier that the service names exists."""
TIERS_FOUND = "TiersFound"
TIER_NOT_FOUND = "TierNotFound"

SCALING_LIMITED = "ScalingLimited"
"""A pool has other than the replicas that somebody asked for: its bounds or the roles' floors clamp them."""
TOO_MANY_REPLICAS = "TooManyReplicas"
TOO_FEW_REPLICAS = "TooFewReplicas"
LIMITED_BY_FLOORS = "LimitedByFloors"
DESIRED_WITHIN_RANGE = "DesiredWithinRange"

MODEL_FITS = "ModelFits"
"""An instance of each pool can hold the model and one request of the longest context.

`fulcrum_core.models.check_fit` gives the reasons of what is worked out; these are of what was seen.
"""
LOADED = "Loaded"
"""An engine serves it, so it does fit."""
OUT_OF_MEMORY = "OutOfMemory"
"""An engine that never served was killed for taking more memory than it was given."""
NO_INSTANCE_YET = "NoInstanceYet"

KV_TRANSFER_VERIFIED = "KVTransferVerified"
"""Decode instances were seen to continue from KV that prefill instances computed, pair by pair."""
VERIFIED = "Verified"
RECOMPUTED = "Recomputed"
"""Decode computed a prompt that it had been handed."""
LEASE_EXPIRED = "LeaseExpired"
"""Hand-offs were fetched too late, and dropped."""
HANDSHAKE_FAILED = "HandshakeFailed"
"""Decode does not reach the side channel of prefill."""
INCOMPATIBLE = "Incompatible"
"""Prefill gives no hand-offs that decode can read."""
SLOW_TRANSPORT = "SlowTransport"
"""Fetching KV takes several times as long as computing it."""
NOT_REPORTED = "NotReported"
"""The engines do not say how much of a prompt they computed."""
KV_TRANSFER_PROBLEMS = (HANDSHAKE_FAILED, INCOMPATIBLE, LEASE_EXPIRED, RECOMPUTED, SLOW_TRANSPORT)
"""These tell of a pair that does not do what it is there for, the worst first."""
NOT_APPLICABLE = "NotApplicable"
"""A single instance hands nothing over; simulated engines hold no model."""
NO_TRAFFIC_YET = "NoTrafficYet"
"""No hand-off was seen yet."""

SLO_MET = "SLOMet"
"""In every tier so many requests met TTFT and TPOT as the service shall attain."""
ATTAINED = "Attained"
MISSED = "Missed"
NO_TRAFFIC = "NoTraffic"
TOO_FEW_REQUESTS = "TooFewRequests"
"""Requests: so few say nothing."""
ROUTER_NOT_REPORTING = "RouterNotReporting"
"""The router has not said for long what it counted."""
