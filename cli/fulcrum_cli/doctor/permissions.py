"""Permissions that the user and the accounts of operator, autoscaler and routers need, and their checks.

`access_reviews` asks the API server for each, and `examine` has the results judged here. None is granted
here: the chart's roles do that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_cli.doctor.findings import CheckId, Component, Finding, ok, problem, warning
from fulcrum_core.api.meta import GROUP
from fulcrum_core.formatting import format_list


@dataclass(frozen=True, slots=True)
class Permission:
    """One RBAC permission, such as `patch pdassignments.fulcrum.dev`; of one object if `name` is set."""

    verb: str
    resource: str
    group: str = GROUP
    name: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        resource = self.resource + (f"/{self.subresource}" if self.subresource else "")
        return f"{self.verb} {resource}{f'.{self.group}' if self.group else ''}"


@dataclass(frozen=True, slots=True)
class AccessReview:
    """The API server's review of a permission; `allowed` is None without permission to request reviews."""

    permission: Permission
    allowed: bool | None


LIST_SERVICES = Permission("list", "pdservices")
USER_PERMISSIONS = (
    LIST_SERVICES,
    *(Permission("list", plural) for plural in ("pdpools", "pdinstances", "pdassignments", "qostiers")),
    Permission("patch", "pdassignments"),
    Permission("get", "services", "", subresource="proxy"),
)
"""Permissions that status, flip, drain and explain need."""

_PERMISSIONS_NAMED_MAX = 8
"""Missing permissions named in one finding."""
_LEASES = "coordination.k8s.io"
_CHILD_RESOURCES = (
    *(("services", ""), ("serviceaccounts", ""), ("deployments", "apps"), ("poddisruptionbudgets", "policy")),
    *(("networkpolicies", "networking.k8s.io"), ("endpointslices", "discovery.k8s.io")),
    *((kind, "rbac.authorization.k8s.io") for kind in ("roles", "rolebindings")),
)
OPERATOR_PERMISSIONS = (
    *(Permission(verb, kind) for verb in ("list", "watch") for kind in ("pdservices", "qostiers")),
    *(
        Permission(verb, kind)
        for verb in ("create", "list", "patch", "watch")
        for kind in ("pdpools", "pdassignments", "pdinstances")
    ),
    *(Permission("delete", kind) for kind in ("pdpools", "pdassignments", "pdinstances")),
    *(
        Permission("patch", kind, subresource="status")
        for kind in ("pdservices", "pdpools", "pdinstances", "pdassignments")
    ),
    *(Permission(verb, "pods", "") for verb in ("create", "delete", "list", "patch", "watch")),
    *(Permission(verb, "events", "") for verb in ("create", "patch")),
    *(
        Permission(verb, kind, group)
        for verb in ("create", "delete", "list", "patch", "watch")
        for kind, group in _CHILD_RESOURCES
    ),
    *(Permission(verb, "leases", _LEASES) for verb in ("create", "delete", "get", "patch")),
)
AUTOSCALER_PERMISSIONS = (
    *(
        Permission(verb, kind)
        for verb in ("list", "watch")
        for kind in ("pdservices", "pdpools", "pdinstances", "pdassignments")
    ),
    *(Permission(verb, "pdassignments") for verb in ("get", "patch")),
)


def router_permissions(service: str) -> tuple[Permission, ...]:
    """Return the permissions that the routers of a service need."""
    kinds = ("pdservices", "pdpools", "pdinstances", "pdassignments", "qostiers")
    return (
        *(Permission(verb, kind) for verb in ("list", "watch") for kind in kinds),
        *(Permission(verb, "pods", "") for verb in ("list", "watch")),
        *(Permission(verb, "leases", _LEASES, name=f"{service}-router") for verb in ("get", "patch")),
        *(
            Permission(verb, "endpointslices", "discovery.k8s.io", name=f"{service}-router")
            for verb in ("get", "patch")
        ),
    )


def denied_permissions(reviews: Sequence[AccessReview]) -> list[Permission]:
    """Return the permissions that were denied; those that could not be reviewed are left out."""
    return [review.permission for review in reviews if review.allowed is False]


def check_user_permissions(reviews: Sequence[AccessReview], *, namespace: str) -> Finding:
    """Check the user's permissions; a missing one is a problem only if services cannot be listed."""
    missing = denied_permissions(reviews)
    if missing:
        make_finding = problem if LIST_SERVICES in missing else warning
        observed = f"in namespace {namespace} you have no permission to {', '.join(map(str, missing))}"
        return make_finding(
            CheckId.USER_PERMISSIONS,
            observed,
            "ask for a Role with these permissions, which status, flip, drain and explain need",
        )
    return ok(CheckId.USER_PERMISSIONS, f"you may read and change services in namespace {namespace}")


def check_service_account(
    component: Component, account: str, reviews: Sequence[AccessReview], *, service: str = ""
) -> Finding:
    """Check that a component's ServiceAccount (`namespace/name`) has the permissions that it needs."""
    check = component.permissions_check
    missing = denied_permissions(reviews)
    if missing:
        return problem(
            check,
            f"ServiceAccount {account} has no permission to "
            f"{format_list([*map(str, missing)], at_most=_PERMISSIONS_NAMED_MAX)}",
            "restore the RoleBinding that the chart (for a router: the operator) creates",
            service=service,
        )
    if any(review.allowed is None for review in reviews):
        return warning(
            check, f"skipped: no permission to review the access of ServiceAccount {account}",
            "run this as a user with permission to create SubjectAccessReviews", service=service,
        )  # fmt: skip
    return ok(check, f"ServiceAccount {account} has all permissions that it needs", service=service)
