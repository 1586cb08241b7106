"""Dashboard Tiers and tenants: what each tier was promised and got, and the callers that were refused.

`__main__` calls `build`.
"""

from dataclasses import replace

from tools.dashboards.panels import Panel, build_dashboard, figure, lines
from tools.dashboards.queries import (
    ENDED,
    OFFERED,
    RATE,
    SELECTOR,
    SLO_MET,
    Query,
    largest,
    quantile,
    rate,
)

_MET = f"sum by (tier) (increase({SLO_MET}[$__range]))"
_JUDGED = f"sum by (tier) (increase({ENDED}[$__range]))"
_TENANT_REQUESTS = f"fulcrum_router_tenant_requests_total{{{SELECTOR}}}"
_JUDGED_OF_TENANT = f'fulcrum_router_tenant_requests_total{{{SELECTOR},result!="limited"}}'
_LIMITED_OF_TENANT = f'fulcrum_router_tenant_requests_total{{{SELECTOR},result="limited"}}'
_MET_OF_TENANT = f'fulcrum_router_tenant_requests_total{{{SELECTOR},result="met"}}'
_MISSED = f"sum by (tier, part) (rate(fulcrum_router_slo_misses_total{{{SELECTOR}}}[{RATE}])) > 0"


def build() -> str:
    """Build the JSON of the dashboard."""
    rows = [
        ("What was promised", _promise()),
        ("Admission", _admission()),
        ("Latency", _latency()),
        ("Tenants and callers", [*_tenants(), _callers()]),
    ]
    return build_dashboard("Tiers and tenants", "Who gets what was promised?", rows)


def _promise() -> list[Panel]:
    return [
        figure(
            "SLO attainment of each tier",
            "Over the time range. A tier below the objective: see by which part it misses, below.",
            Query(f"{_MET} / {_JUDGED}", "{{tier}}"),
            unit="percentunit",
            width=12,
        ),
        figure(
            "Share of the requests",
            "Of all that arrived. A tier with far more than planned takes what is reserved for others.",
            Query(
                f"sum by (tier) (increase({OFFERED}[$__range]))"
                f" / ignoring (tier) group_left () "
                f"sum(increase({OFFERED}[$__range]))",
                "{{tier}}",
            ),
            unit="percentunit",
            width=12,
        ),
        lines(
            "Misses of each tier by part",
            "waiting, admission: the tier's share is used up. decode: the same for all tiers of a service.",
            [Query(_MISSED, "{{tier}} {{part}}")],
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Requests of each tier",
            "That arrive, per second. A jump in one tier: look for the tenant in its clients' logs.",
            [rate("router_requests_offered_total", "tier")],
            unit="reqps",
        ),
    ]


def _admission() -> list[Panel]:
    return [
        lines(
            "Decisions on admission",
            "With router.admission Enforce, or what it would do with Advise. queue: served late; degrade: "
            "with less output. refuse in a high tier: the service is too small.",
            [_only_positive(rate("router_admission_decisions_total", "mode, tier, decision"))],
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Refused requests",
            "By reason. prefill_full, waited_too_long: more prefill. decode_full: more decode. rate_limit: a "
            "tenant sends more than it may; see the tenants below.",
            [_only_positive(rate("router_admission_refusals_total", "mode, tier, reason"))],
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Outcomes of each tier",
            "Requests that ended, except ok. left_late: clients gave up; failed, broken: see the dashboard "
            "Service.",
            [
                Query(
                    f"sum by (tier, outcome) (rate(fulcrum_router_requests_total{{{SELECTOR},"
                    f'outcome!="ok"}}[{RATE}])) > 0',
                    "{{tier}} {{outcome}}",
                )
            ],
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Reserve",
            "Share of prefill and KV cache reserved for a tier. kept: others leave it free. lent for hours: "
            "the tier does not need it.",
            [largest("router_tier_reserve_ratio", "tier, state")],
            unit="percentunit",
            stacked=True,
        ),
    ]


def _tenants() -> list[Panel]:
    return [
        lines(
            "Requests of tenants",
            "Those with most requests (spec.router.namedTenants), and (others). One far above the rest: give "
            "it a rate limit, or a tier of its own.",
            [Query(f"sum by (tenant) (rate({_TENANT_REQUESTS}[{RATE}]))", "{{tenant}}")],
            unit="reqps",
            stacked=True,
        ),
        lines(
            "SLO attainment of tenants",
            "Requests over a rate limit do not count. One tenant below the others of its tier: it sends "
            "longer prompts, or more than its fair share.",
            [
                Query(
                    f"sum by (tenant) (rate({_MET_OF_TENANT}[{RATE}]))"
                    f" / sum by (tenant) (rate({_JUDGED_OF_TENANT}[{RATE}]))",
                    "{{tenant}}",
                )
            ],
            unit="percentunit",
            top=1.0,
        ),
        lines(
            "Tenants over their rate limit",
            "Requests per second that got 429. A client that ignores Retry-After shows as a flat line.",
            [
                Query(
                    f"sum by (tenant) (rate({_LIMITED_OF_TENANT}[{RATE}])) > 0",
                    "{{tenant}}",
                )
            ],
            unit="reqps",
        ),
    ]


def _latency() -> list[Panel]:
    return [
        lines(
            "TTFT p99",
            "By tier. A tier of higher priority above a lower one: see FulcrumPredictionsOff.",
            [quantile(0.99, "fulcrum_router_ttft_seconds")],
            unit="s",
        ),
        lines(
            "Waiting in the router p99",
            "By tier. Lower tiers wait first; if the highest waits, too, the service is too small.",
            [quantile(0.99, "fulcrum_router_waiting_seconds")],
            unit="s",
        ),
    ]


def _callers() -> Panel:
    unknown_tiers = f"sum(rate(fulcrum_router_unknown_tiers_total{{{SELECTOR}}}[{RATE}]))"
    return lines(
        "Keys, headers and tiers that are not valid",
        "401: a client has no key, or an old one. dropped: a client that is not a trusted proxy names a "
        "tenant or a tier; see spec.router.auth. unknown tier: the service does not list it, so the default "
        "tier counts.",
        [
            Query(unknown_tiers, "unknown tier"),
            replace(rate("router_refused_callers_total", "reason"), legend="401, {{reason}} key"),
            replace(rate("router_dropped_headers_total", "header"), legend="dropped {{header}}"),
        ],
        unit="reqps",
    )


def _only_positive(query: Query) -> Query:
    """Leave out series that are 0: most of all combinations of labels."""
    return replace(query, expr=f"{query.expr} > 0")
