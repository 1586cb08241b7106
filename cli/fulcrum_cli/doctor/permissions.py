"""Who may do what: the person who asks, and the accounts of operator, autoscaler and routers."""

from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_core.api.meta import GROUP
from fulcrum_core.formatting import format_list


@dataclass(frozen=True, slots=True)
class Permission:
    """One right: `patch pdassignments.fulcrum.dev`, of one object if it has a name."""

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
    """What the API server says about a right; `allowed` is None where it may not be asked."""

    permission: Permission
    allowed: bool | None


LIST_SERVICES = Permission("list", "pdservices")
USER_PERMISSIONS = (
    LIST_SERVICES,
    *(Permission("list", plural) for plural in ("pdpools", "pdinstances", "pdassignments", "qostiers")),
    Permission("patch", "pdassignments"),
    Permission("get", "services", "", subresource="proxy"),
)
"""What status, flip, drain and explain need."""

_PERMISSIONS_NAMED_MAX = 8
"""So many missing rights are named."""
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
    *(Permission("delete", kind) for kind in ("pdpools", "pdinstances")),
    *(Permission("patch", kind, subresource="status") for kind in ("pdservices", "pdpools", "pdinstances")),
    *(Permission(verb, "pods", "") for verb in ("create", "delete", "list", "patch", "watch")),
    *(Permission(verb, "events", "") for verb in ("create", "patch")),
    *(
        Permission(verb, kind, group)
        for verb in ("create", "list", "patch", "watch")
        for kind, group in _CHILD_RESOURCES
    ),
    *(Permission(verb, "leases", _LEASES) for verb in ("create", "get", "patch")),
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
    """What the routers of a service need."""
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
    """The rights that are known to be missing."""
    return [review.permission for review in reviews if review.allowed is False]


def check_user_permissions(reviews: Sequence[AccessReview], *, namespace: str) -> Finding:
    """Whether the person may do what this program offers: a problem only if even services may not be seen."""
    missing = denied_permissions(reviews)
    if missing:
        found = problem if LIST_SERVICES in missing else warning
        observed = f"in namespace {namespace} you may not {', '.join(map(str, missing))}"
        return found(
            "your permissions",
            observed,
            "ask for a Role with these rights, for status, flip, drain and explain",
        )
    return ok("your permissions", f"you may look at and change what is in namespace {namespace}")


def check_service_account(
    component: str, account: str, reviews: Sequence[AccessReview], *, service: str = ""
) -> Finding:
    """Whether a part's ServiceAccount (`namespace/name`) may do what the part has to do."""
    name = f"{component}'s permissions"
    missing = denied_permissions(reviews)
    if missing:
        return problem(
            name,
            f"ServiceAccount {account} may not "
            f"{format_list([*map(str, missing)], at_most=_PERMISSIONS_NAMED_MAX)}",
            "bind the Role that the chart (for a router: the operator) makes again",
            service=service,
        )
    if any(review.allowed is None for review in reviews):
        return warning(
            name, f"not looked at: you may not ask for ServiceAccount {account}",
            "ask somebody with the right to create SubjectAccessReviews to run this", service=service,
        )  # fmt: skip
    return ok(name, f"ServiceAccount {account} may do what it has to", service=service)
