"""Who may do what: the person who asks, and the accounts of operator, autoscaler and routers."""

from collections.abc import Sequence
from dataclasses import dataclass

from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_core.api.meta import GROUP


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

OPERATOR = (
    *(Need(verb, kind) for verb in ("list", "watch") for kind in ("pdservices", "qostiers")),
    *(Need("patch", kind) for kind in ("pdpools", "pdassignments", "pdinstances")),
    *(Need("patch", kind, subresource="status") for kind in ("pdservices", "pdpools", "pdinstances")),
    *(
        Need("create", kind, group)
        for kind, group in (("pods", ""), ("services", ""), ("deployments", "apps"))
    ),
    Need("delete", "pods", ""),
)
AUTOSCALER = (
    *(Need(verb, kind) for verb in ("list", "watch") for kind in ("pdservices", "pdinstances")),
    Need("patch", "pdassignments"),
)


def router_needs(service: str) -> tuple[Need, ...]:
    """What the routers of a service need."""
    kinds = ("pdservices", "pdpools", "pdinstances", "pdassignments", "qostiers")
    return (
        *(Need(verb, kind) for verb in ("list", "watch") for kind in kinds),
        Need("list", "pods", ""),
        Need("patch", "leases", "coordination.k8s.io", name=f"{service}-router"),
        Need("patch", "endpointslices", "discovery.k8s.io", name=f"{service}-router"),
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
            f"ServiceAccount {account} may not {', '.join(map(str, missing))}",
            "bind the Role that the chart (for a router: the operator) makes again",
            about=about,
        )
    if any(answer.allowed is None for answer in answers):
        return warning(
            name, f"not looked at: you may not ask for ServiceAccount {account}",
            "ask somebody with the right to create SubjectAccessReviews to run this", about=about,
        )  # fmt: skip
    return ok(name, f"ServiceAccount {account} may do what it has to", about=about)
