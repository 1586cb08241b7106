"""Dashboard Cost: GPU hours, and the cost of output tokens by a price that the user types in.

`__main__` calls `build`.
"""

from tools.dashboards.panels import Panel, build_dashboard, figure, lines
from tools.dashboards.queries import RATE, SELECTOR, Query

_GPUS = f"max by (pool) (fulcrum_operator_devices{{{SELECTOR}}})"
_GPU_HOURS = f"sum_over_time(({_GPUS})[$__range:1m]) / 60"
"""A value each minute: the minutes in which a pool did not exist add nothing."""
_TOKENS = f"sum(rate(fulcrum_router_output_tokens_total{{{SELECTOR}}}[{RATE}]))"


def build() -> str:
    """Build the JSON of the dashboard."""
    rows = [("In the time range", _now()), ("Over time", _over_time())]
    return build_dashboard(
        "Cost", "What do tokens cost?", rows, inputs=[("price", "Price of a GPU hour", "2.50")]
    )


def _now() -> list[Panel]:
    return [
        figure(
            "GPUs",
            "Requested by the instances, by pool. More than the load needs for hours: lower the maximum.",
            Query(_GPUS, "{{pool}}"),
        ),
        figure(
            "GPU hours",
            "Over the time range, by pool.",
            Query(_GPU_HOURS, "{{pool}}"),
        ),
        figure(
            "Cost",
            "GPU hours times the price above, over the time range, by pool.",
            Query(
                f"{_GPU_HOURS} * $price",
                "{{pool}}",
            ),
        ),
        figure(
            "Cost of a million output tokens",
            "Over the time range. It falls with the load: instances cost the same when they idle.",
            Query(
                f"1e6 * sum({_GPU_HOURS}) * $price"
                f" / sum(increase(fulcrum_router_output_tokens_total{{{SELECTOR}}}[$__range]))",
                "per million",
            ),
        ),
    ]


def _over_time() -> list[Panel]:
    return [
        lines(
            "Output tokens",
            "Per second. Without a price, the number to compare two configurations by.",
            [Query(_TOKENS, "tokens")],
        ),
        lines(
            "Output tokens of a GPU",
            "Per second and GPU. Low while the SLO is met: the service is larger than it needs to be.",
            [Query(f"{_TOKENS} / sum({_GPUS})", "tokens")],
        ),
        lines(
            "Cost of a million output tokens over time",
            "At the price above. Peaks at night: scale down, or let batch work run then.",
            [Query(f"1e6 * sum({_GPUS}) * $price / 3600 / ({_TOKENS} > 0)", "per million")],
        ),
        lines(
            "GPUs by pool",
            "Requested by the instances. Compare with the load in the dashboard Autoscaler.",
            [Query(_GPUS, "{{pool}}")],
            stacked=True,
        ),
    ]
