"""The kinds of fulcrum.dev/v1alpha1. The CRDs are generated from these models.

Every room reads and writes objects as these types; Kubernetes' own objects are dictionaries
(`fulcrum_cluster.objects`).
"""

from fulcrum_core.api.manifest import load_manifest, parse_object
from fulcrum_core.api.meta import Condition, ObjectMeta, OwnerReference, Resource
from fulcrum_core.api.pdassignment import (
    Floors,
    PDAssignment,
    PDAssignmentSpec,
    PDAssignmentStatus,
    Refusal,
    RoleAssignment,
)
from fulcrum_core.api.pdinstance import EngineIdentitySpec, PDInstance, PDInstanceSpec, PDInstanceStatus
from fulcrum_core.api.pdpool import (
    Bounds,
    LaunchSpec,
    PDPool,
    PDPoolSpec,
    PDPoolStatus,
    PoolRole,
    RefusedRevision,
)
from fulcrum_core.api.pdservice import (
    LastDecision,
    PDService,
    PDServiceSpec,
    PDServiceStatus,
    PoolSpec,
    RoleStatus,
    ServiceSloSpec,
    TierStatus,
)
from fulcrum_core.api.qostier import QoSTier, QoSTierSpec, SloSpec
from fulcrum_core.api.registry import KINDS

__all__ = [
    "KINDS",
    "Bounds",
    "Condition",
    "EngineIdentitySpec",
    "Floors",
    "LastDecision",
    "LaunchSpec",
    "ObjectMeta",
    "OwnerReference",
    "PDAssignment",
    "PDAssignmentSpec",
    "PDAssignmentStatus",
    "PDInstance",
    "PDInstanceSpec",
    "PDInstanceStatus",
    "PDPool",
    "PDPoolSpec",
    "PDPoolStatus",
    "PDService",
    "PDServiceSpec",
    "PDServiceStatus",
    "PoolRole",
    "PoolSpec",
    "QoSTier",
    "QoSTierSpec",
    "Refusal",
    "RefusedRevision",
    "Resource",
    "RoleAssignment",
    "RoleStatus",
    "ServiceSloSpec",
    "SloSpec",
    "TierStatus",
    "load_manifest",
    "parse_object",
]
