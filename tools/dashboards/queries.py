"""PromQL of the dashboards: the labels that queries select by, and the queries that several panels share.

Tests run all of them against a real Prometheus.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SELECTOR = 'namespace="$namespace",service="$service"'
RATE = "$__rate_interval"
FLIPS = f"sum by (to) (increase(fulcrum_autoscaler_flips_total{{{SELECTOR}}}[{RATE}])) > 0"
"""Query of the annotations: when instances were flipped, and to which role."""
OFFERED = f"fulcrum_router_requests_offered_total{{{SELECTOR}}}"
"""Requests that arrived."""
SLO_MET = f"fulcrum_router_requests_slo_met_total{{{SELECTOR}}}"
_WITH_EXEMPLARS = frozenset({"fulcrum_router_ttft_seconds", "fulcrum_router_response_seconds"})
ENDED = f'fulcrum_router_requests_total{{{SELECTOR},outcome=~"ok|failed|refused|broken|left_late"}}'
"""Requests that count in the SLO attainment."""


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the name of its series."""

    expr: str
    legend: str = ""
    exemplars: bool = False
    """Whether the panel also shows the traces of some requests as points."""


def largest(metric: str, by: str, *, legend: str = "") -> Query:
    """The largest value of a gauge, by labels: of two routers the standby shows 0."""
    return Query(f"max by ({by}) (fulcrum_{metric}{{{SELECTOR}}})", legend or _name_series(by))


def rate(metric: str, by: str) -> Query:
    """How often a counter is raised in a second, by labels."""
    return Query(f"sum by ({by}) (rate(fulcrum_{metric}{{{SELECTOR}}}[{RATE}]))", _name_series(by))


def quantile(share: float, metric: str, selector: str = SELECTOR) -> Query:
    """A quantile of a histogram, by tier."""
    expr = f"histogram_quantile({share}, sum by (le, tier) (rate({metric}_bucket{{{selector}}}[{RATE}])))"
    return Query(expr, f"{{{{tier}}}} p{100 * share:g}", exemplars=metric in _WITH_EXEMPLARS)


def quantiles(metric: str) -> list[Query]:
    """The quantiles p50 to p99.9 of a histogram, by tier, of the tiers that are chosen."""
    chosen = f'{SELECTOR},tier=~"$tier"'
    return [quantile(share, metric, chosen) for share in (0.5, 0.9, 0.99, 0.999)]


def quantiles_of_all(
    metric: str, selector: str, *, window: str = RATE, shares: Sequence[float] = (0.5, 0.99)
) -> list[Query]:
    """Quantiles of a histogram over all series of the selector; `window`: what is rare needs a long one."""
    return [
        Query(
            f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{selector}[{window}])))",
            f"p{100 * share:g}",
        )
        for share in shares
    ]


def _name_series(by: str) -> str:
    return " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
