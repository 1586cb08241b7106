"""Types and reasons of conditions: the constants that programs match on.

A type names a state that lasts; a reason says in one word why it is True or False. Messages are for people
and are written in the module that computes the condition.
"""

READY = "Ready"
"""The service responds to requests: each role has enough serving instances, and the router runs."""
INSTANCES_SERVING = "InstancesServing"
TOO_FEW_INSTANCES = "TooFewInstances"
FLOORS_TOO_HIGH = "FloorsTooHigh"
ROUTER_STARTING = "RouterStarting"

PROGRESSING = "Progressing"
"""Instances are changing towards the spec."""
INSTANCES_CHANGING = "InstancesChanging"
ROLLOUT_PROGRESSING = "RolloutProgressing"
ROLLOUT_PAUSED = "RolloutPaused"
SETTLED = "Settled"

DEGRADED = "Degraded"
"""Something is broken and being repaired."""
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
NAME_TAKEN = "NameTaken"
"""An object that the service needs has the name of an object of somebody else, which is left alone."""
CHILD_REFUSED = "ChildRefused"
"""The API server refuses an object of the service: a quota, a webhook, a permission or a rule."""
RECONCILE_FAILED = "ReconcileFailed"
"""The operator cannot bring the service towards its spec; the rest of the status may be outdated."""
RELABEL_NOT_SUPPORTED = "RelabelNotSupported"
AS_EXPECTED = "AsExpected"

TIERS_ACCEPTED = "TiersAccepted"
"""Every QoSTier that the service names exists."""
TIERS_FOUND = "TiersFound"
TIER_NOT_FOUND = "TierNotFound"

SIMULATED = "Simulated"
"""Instances of the service run simulated engines: the text of their responses is made up."""
SIMULATED_ENGINES = "SimulatedEngines"
REAL_ENGINES = "RealEngines"

SCALING_LIMITED = "ScalingLimited"
"""A pool has another number of replicas than requested: its bounds or the roles' floors limit it."""
TOO_MANY_REPLICAS = "TooManyReplicas"
TOO_FEW_REPLICAS = "TooFewReplicas"
LIMITED_BY_FLOORS = "LimitedByFloors"
DESIRED_WITHIN_RANGE = "DesiredWithinRange"

MODEL_FITS = "ModelFits"
"""An instance of each pool has room for the model and one request of the longest context.

`fulcrum_core.models.check_fit` gives the computed reasons; the reasons here are of observed engines.
"""
LOADED = "Loaded"
"""An engine serves the model, so the model fits."""
OUT_OF_MEMORY = "OutOfMemory"
"""An engine that never became ready was killed because it exceeded its memory limit."""
NO_INSTANCE_YET = "NoInstanceYet"

KV_TRANSFER_VERIFIED = "KVTransferVerified"
"""Decode instances used the KV that prefill instances computed, checked for each pair of instances."""
VERIFIED = "Verified"
RECOMPUTED = "Recomputed"
"""The decode instance computed a prompt again whose KV it should have fetched."""
LEASE_EXPIRED = "LeaseExpired"
"""KV was fetched after its lease had expired, so the transfer was dropped."""
HANDSHAKE_FAILED = "HandshakeFailed"
"""The decode instance cannot reach the prefill instance's side channel."""
INCOMPATIBLE = "Incompatible"
"""The prefill instance returns no KV transfer parameters that the decode instance can use."""
SLOW_TRANSPORT = "SlowTransport"
"""Fetching KV takes several times as long as computing it."""
NOT_REPORTED = "NotReported"
"""The engines do not report how many prompt tokens they computed."""
KV_TRANSFER_PROBLEMS = (HANDSHAKE_FAILED, INCOMPATIBLE, LEASE_EXPIRED, RECOMPUTED, SLOW_TRANSPORT)
"""Reasons of a failed pair, worst first."""
NOT_APPLICABLE = "NotApplicable"
"""Of a service with a single instance, or with simulated engines, which hold no model."""
NO_TRAFFIC_YET = "NoTrafficYet"
"""No KV transfer was observed yet."""

SLO_MET = "SLOMet"
"""In every tier at least `slo.attainment` per cent of requests met TTFT and TPOT."""
ATTAINED = "Attained"
MISSED = "Missed"
NO_TRAFFIC = "NoTraffic"
TOO_FEW_REQUESTS = "TooFewRequests"
"""Too few requests for a meaningful share."""
ROUTER_NOT_REPORTING = "RouterNotReporting"
"""The router has not reported its counts for too long."""
