"""Who may do what: the person who asks, and the accounts of operator, autoscaler and routers."""

from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_core.api.meta import GROUP
from fulcrum_core.spelling import format_list


@dataclass(frozen=True, slots=True)
class Need:
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
class Answer:
    """What the API server says about a right; `allowed` is None where it may not be asked."""

    need: Need
    allowed: bool | None


SEE_SERVICES = Need("list", "pdservices")
PERSON = (
    SEE_SERVICES,
    *(Need("list", plural) for plural in ("pdpools", "pdinstances", "pdassignments", "qostiers")),
    Need("patch", "pdassignments"),
    Need("get", "services", "", subresource="proxy"),
)
"""What status, flip, drain and explain need."""

_TOLD = 8
"""So many missing rights are named."""
_LEASES = "coordination.k8s.io"
_CHILDREN = (
    *(("services", ""), ("serviceaccounts", ""), ("deployments", "apps"), ("poddisruptionbudgets", "policy")),
    *(("networkpolicies", "networking.k8s.io"), ("endpointslices", "discovery.k8s.io")),
    *((kind, "rbac.authorization.k8s.io") for kind in ("roles", "rolebindings")),
)
OPERATOR = (
    *(Need(verb, kind) for verb in ("list", "watch") for kind in ("pdservices", "qostiers")),
    *(
        Need(verb, kind)
        for verb in ("create", "list", "patch", "watch")
        for kind in ("pdpools", "pdassignments", "pdinstances")
    ),
    *(Need("delete", kind) for kind in ("pdpools", "pdinstances")),
    *(Need("patch", kind, subresource="status") for kind in ("pdservices", "pdpools", "pdinstances")),
    *(Need(verb, "pods", "") for verb in ("create", "delete", "list", "patch", "watch")),
    *(Need(verb, "events", "") for verb in ("create", "patch")),
    *(Need(verb, kind, group) for verb in ("create", "list", "patch", "watch") for kind, group in _CHILDREN),
    *(Need(verb, "leases", _LEASES) for verb in ("create", "get", "patch")),
)
AUTOSCALER = (
    *(
        Need(verb, kind)
        for verb in ("list", "watch")
        for kind in ("pdservices", "pdpools", "pdinstances", "pdassignments")
    ),
    *(Need(verb, "pdassignments") for verb in ("get", "patch")),
)


def router_needs(service: str) -> tuple[Need, ...]:
    """What the routers of a service need."""
    kinds = ("pdservices", "pdpools", "pdinstances", "pdassignments", "qostiers")
    return (
        *(Need(verb, kind) for verb in ("list", "watch") for kind in kinds),
        *(Need(verb, "pods", "") for verb in ("list", "watch")),
        *(Need(verb, "leases", _LEASES, name=f"{service}-router") for verb in ("get", "patch")),
        *(
            Need(verb, "endpointslices", "discovery.k8s.io", name=f"{service}-router")
            for verb in ("get", "patch")
        ),
    )


def refused(answers: Sequence[Answer]) -> list[Need]:
    """The rights that are known to be missing."""
    return [answer.need for answer in answers if answer.allowed is False]


def check_person(answers: Sequence[Answer], *, namespace: str) -> Finding:
    """Whether the person may do what this program offers: a problem only if even services may not be seen."""
    missing = refused(answers)
    if missing:
        found = problem if SEE_SERVICES in missing else warning
        seen = f"in namespace {namespace} you may not {', '.join(map(str, missing))}"
        return found(
            "your rights", seen, "ask for a Role with these rights, for status, flip, drain and explain"
        )
    return ok("your rights", f"you may look at and change what is in namespace {namespace}")


def check_account(what: str, account: str, answers: Sequence[Answer], *, about: str = "") -> Finding:
    """Whether a part's ServiceAccount (`namespace/name`) may do what the part has to do."""
    name = f"{what}'s rights"
    missing = refused(answers)
    if missing:
        return problem(
            name,
            f"ServiceAccount {account} may not {format_list([*map(str, missing)], at_most=_TOLD)}",
            "bind the Role that the chart (for a router: the operator) makes again",
            about=about,
        )
    if any(answer.allowed is None for answer in answers):
        return warning(
            name, f"not looked at: you may not ask for ServiceAccount {account}",
            "ask somebody with the right to create SubjectAccessReviews to run this", about=about,
        )  # fmt: skip
    return ok(name, f"ServiceAccount {account} may do what it has to", about=about)
