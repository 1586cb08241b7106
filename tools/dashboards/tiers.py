"""Dashboard Tiers and tenants: what each tier was promised and got, and the callers that were refused."""

from tools.dashboards.panels import Panel, build_dashboard, figure, lines
from tools.dashboards.queries import ENDED, OFFERED, RATE, SELECTOR, SLO_MET, Query, quantile, rate

_MET = f"sum by (tier) (increase({SLO_MET}[$__range]))"
_JUDGED = f"sum by (tier) (increase({ENDED}[$__range]))"
_MISSED = f"sum by (tier, part) (rate(fulcrum_router_slo_misses_total{{{SELECTOR}}}[{RATE}])) > 0"


def build() -> str:
    """Build the JSON of the dashboard."""
    rows = [("What was promised", _promise()), ("Latency", _latency()), ("Callers", _callers())]
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


def _callers() -> list[Panel]:
    return [
        lines(
            "Refused callers",
            "401 per second, by reason. unknown: a client has an old key.",
            [rate("router_refused_callers_total", "reason")],
            unit="reqps",
        ),
        lines(
            "Headers without effect",
            "A client that is not a trusted proxy names tenant or tier: see spec.router.auth.",
            [rate("router_dropped_headers_total", "header")],
            unit="reqps",
        ),
        lines(
            "Unknown tiers",
            "Requests that name a tier that the service does not list; they get the default tier.",
            [Query(f"sum(rate(fulcrum_router_unknown_tiers_total{{{SELECTOR}}}[{RATE}]))", "requests")],
            unit="reqps",
        ),
    ]
