"""Dashboard Control plane: operators, active routers, reconciles, and the memory of the router.

`__main__` calls `build`. Engines are on the dashboard Instances, requests on Service.
"""

from tools.dashboards.panels import Panel, build_dashboard, figure, lines, timeline
from tools.dashboards.queries import RATE, SELECTOR, Query, largest, quantiles_of_all, rate

_BAD, _NEUTRAL = "Degraded|ScalingLimited", "Progressing|Simulated"
"""Conditions that are False in a healthy service, and those that say nothing of its health."""


def _condition(matcher: str, first: int) -> str:
    """The conditions of which `first` is the value of Unknown."""
    metric = f"fulcrum_operator_service_condition{{{SELECTOR},condition{matcher}}}"
    return f"max by (condition, reason) ({metric}) + {first + 1}"


_CONDITIONS = " or ".join(
    (
        _condition(f'!~"{_BAD}|{_NEUTRAL}"', 0),
        _condition(f'=~"{_BAD}"', 3),
        _condition(f'=~"{_NEUTRAL}"', 6),
    )
)
_ONE_IS_RIGHT = ((None, "red"), (1.0, "green"), (2.0, "orange"))


def build() -> str:
    """Build the JSON of the dashboard."""
    rows = [
        ("State", _state()),
        ("Reconciles", _reconciles()),
        ("Instances", _instances()),
        ("Router", _router()),
    ]
    return build_dashboard("Control plane", "Operator, routers, API.", rows)


def _state() -> list[Panel]:
    return [
        figure(
            "Operators that lead",
            "1 is right. 0: see FulcrumOperatorWithoutLeader.",
            Query("sum(fulcrum_operator_leader)"),
            steps=_ONE_IS_RIGHT,
        ),
        figure(
            "Active routers",
            "1 is right. 0: see FulcrumNoActiveRouter.",
            largest("router_active", "service"),
            steps=_ONE_IS_RIGHT,
        ),
        figure(
            "Assignments a router has not read",
            "0 is right. More for a minute: flips and cordons have no effect; see FulcrumWatchStale.",
            Query(
                f"max(fulcrum_operator_assignment_generation{{{SELECTOR}}})"
                f" - min(fulcrum_router_assignment_generation{{{SELECTOR}}})"
            ),
            steps=((None, "green"), (1.0, "orange")),
        ),
        figure(
            "Takeovers in an hour",
            "More than one beyond roll-outs: routers lose their Lease; see FulcrumRouterFailover.",
            Query(f"sum(increase(fulcrum_router_takeovers_total{{{SELECTOR}}}[1h]))"),
        ),
    ]


def _reconciles() -> list[Panel]:
    return [
        lines(
            "Reconciles",
            "Per second, by outcome. error, unreadable: see the condition Degraded of the services.",
            [Query(f"sum by (outcome) (rate(fulcrum_operator_reconciles_total[{RATE}]))", "{{outcome}}")],
            unit="ops",
        ),
        lines(
            "Duration of reconciles",
            "Seconds mean that the API server is slow.",
            quantiles_of_all("fulcrum_operator_reconcile_seconds", ""),
            unit="s",
        ),
        lines(
            "API calls",
            "Of the operator, each second, by method and status. 429, 5xx, none: the API server is "
            "overloaded or unavailable. 409: somebody else writes the same objects.",
            [
                Query(
                    f"sum by (method, status) (rate(fulcrum_operator_api_requests_total[{RATE}]))",
                    "{{method}} {{status}}",
                )
            ],
            unit="reqps",
        ),
    ]


def _instances() -> list[Panel]:
    return [
        lines(
            "Instances by phase",
            "All Serving is right. Starting for long: see how long the model should take in `fulcrum "
            "status`.",
            [Query(f"max by (phase) (fulcrum_operator_instances{{{SELECTOR}}}) > 0", "{{phase}}")],
            stacked=True,
        ),
        lines(
            "Longest time in a phase",
            "Draining for more than half an hour: a request does not end; see FulcrumDrainStuck.",
            [largest("operator_longest_phase_seconds", "phase")],
            unit="s",
        ),
        timeline(
            "Conditions",
            "Red: a service needs somebody; docs/runbooks has a page for each condition. Blue and purple "
            "only say what is going on.",
            Query(_CONDITIONS, "{{condition}}: {{reason}}"),
            names=[
                *(("Unknown", "grey"), ("False", "red"), ("True", "green")),
                *(("Unknown", "grey"), ("False", "green"), ("True", "red")),
                *(("Unknown", "grey"), ("False", "purple"), ("True", "blue")),
            ],
        ),
        lines(
            "Time of drains",
            "Of drains that ended in the last hour, in all services. Near the drain "
            "timeout: requests are cut off; raise it, or send shorter ones.",
            quantiles_of_all("fulcrum_operator_drain_seconds", "", window="1h"),
            unit="s",
        ),
    ]


def _router() -> list[Panel]:
    return [
        lines(
            "Memory of requests",
            "At the limit the router refuses bodies with a 503: raise its memory, or send smaller ones. At "
            "half of it the router disconnects clients that do not read their responses.",
            [
                Query(f"max(fulcrum_router_request_memory_bytes{{{SELECTOR}}})", "held"),
                Query(f"max(fulcrum_router_request_memory_max_bytes{{{SELECTOR}}})", "limit"),
                Query(f"max(fulcrum_router_unsent_response_bytes{{{SELECTOR}}})", "unsent responses"),
            ],
            unit="bytes",
        ),
        lines(
            "Faults of the router",
            "All 0 is right. refused connections, no memory: clients open or send more than the router "
            "has room for. assignments: see FulcrumWatchStale. A background task: see the router's log.",
            [
                _total("router_refused_connections_total", "refused connections"),
                _total("router_memory_refusals_total", "refused: no memory"),
                _total("router_assignments_refused_total", "refused assignments"),
                _total("router_failed_handshakes_total", "failed TLS handshakes"),
                rate("router_background_task_failures_total", "task"),
            ],
            unit="ops",
        ),
    ]


def _total(metric: str, legend: str) -> Query:
    """How often a counter is raised in a second."""
    return Query(f"sum(rate(fulcrum_{metric}{{{SELECTOR}}}[{RATE}]))", legend)
