"""Dashboard Autoscaler: what it sees, and what it decides and does. `__main__` calls `build`."""

from tools.dashboards.panels import Panel, build_dashboard, lines
from tools.dashboards.queries import RATE, SELECTOR, Query, largest, quantiles_of_all, rate

_FORECAST = (
    f'sum(rate(fulcrum_router_ttft_forecast_seconds_total{{{{{SELECTOR},time="{{time}}"}}}}[{RATE}]))'
    f" / sum(rate(fulcrum_router_ttft_forecasts_total{{{{{SELECTOR}}}}}[{RATE}]))"
)
_ACTUAL = {"forecast": "purple", "actual": "green"}
_WITHDRAWN = f"sum(rate(fulcrum_router_demand_withdrawn_prefill_seconds_total{{{SELECTOR}}}[{RATE}]))"
_PREFILL_WORK = (
    f"sum(rate(fulcrum_router_demand_prefill_seconds_total{{{SELECTOR}}}[{RATE}]))"
    f" - ({_WITHDRAWN} or vector(0))"
)
_OUTPUT_TOKENS = f"sum(rate(fulcrum_router_output_tokens_total{{{SELECTOR}}}[{RATE}]))"


def build() -> str:
    """Build the JSON of the dashboard."""
    rows = [("What it observes", _observed()), ("What it decides", _decided())]
    return build_dashboard("Autoscaler", "What the autoscaler observes and decides.", rows)


def _observed() -> list[Panel]:
    return [
        lines(
            "Load by role",
            "Of policy arrow, which flips to decode while decode is above expand, and to prefill only while "
            "decode is below shrink. A gap: the load is not known, and nothing flips; or the policy is "
            "balanced, which uses the forecasts below.",
            [
                largest("autoscaler_load_ratio", "role"),
                largest("autoscaler_threshold_ratio", "threshold", legend="{{threshold}} threshold"),
            ],
        ),
        lines(
            "Assigned and serving instances",
            "Apart for long: an engine starts, drains or is ejected.",
            [
                largest("autoscaler_assigned_instances", "role", legend="{{role}} assigned"),
                largest("router_serving_instances", "role", legend="{{role}} serving"),
            ],
        ),
        lines(
            "Age of the router's state",
            "More than some seconds: the autoscaler cannot read the router; see FulcrumAutoscalerBlind.",
            [Query(f"max(fulcrum_autoscaler_router_state_age_seconds{{{SELECTOR}}})", "age")],
            unit="s",
        ),
        *_forecasts(),
    ]


def _forecasts() -> list[Panel]:
    return [
        lines(
            "Forecast and actual TTFT",
            "Mean TTFT of streams, predicted when the prompt was sent, and measured. Flip "
            "requests follow from the same model. Lines that differ for minutes: see FulcrumPredictionsOff.",
            [
                Query(_FORECAST.format(time="predicted"), "forecast"),
                Query(_FORECAST.format(time="measured"), "actual"),
            ],
            unit="s",
            colors=_ACTUAL,
        ),
        lines(
            "Forecast and actual prefill work",
            "The prefill instances that prompts kept busy, as policy balanced expected it, and those that "
            "serve. Work above them: prefill is the bottleneck. Lines that differ for minutes: the load "
            "comes in bursts; keep more instances.",
            [
                largest("autoscaler_forecast_prefill_instances", "service", legend="forecast"),
                Query(_PREFILL_WORK, "actual"),
                Query(
                    f'max(fulcrum_router_serving_instances{{{SELECTOR},role="prefill"}})', "prefill serving"
                ),
            ],
            colors=_ACTUAL,
        ),
        lines(
            "Forecast and actual output tokens",
            "Policy balanced: tokens of the requests that arrive each second, and of the responses that end. "
            "A forecast that stays too low: answers are longer than the last ones were, and flips to decode "
            "come late; policy arrow needs no forecast.",
            [
                largest("autoscaler_forecast_output_tokens_per_second", "service", legend="forecast"),
                Query(_OUTPUT_TOKENS, "actual"),
            ],
            colors=_ACTUAL,
        ),
        lines(
            "Error of the predicted TTFT",
            "0.1: predicted 10 % too long. Beyond 0.5 flips come too early or too late.",
            [largest("router_ttft_prediction_error_ratio", "part")],
            unit="percentunit",
        ),
    ]


def _decided() -> list[Panel]:
    return [
        lines(
            "Decisions",
            "By action. refuse: a rule forbids the flip that the load calls for; `fulcrum explain` names it.",
            [rate("autoscaler_decisions_total", "action")],
            unit="ops",
        ),
        lines(
            "Flips",
            "By new role, in five minutes. Both roles together: instances flip back and forth.",
            [Query(f"sum by (to) (increase(fulcrum_autoscaler_flips_total{{{SELECTOR}}}[5m]))", "to {{to}}")],
        ),
        lines(
            "Time of a flip",
            "From the decision until the router dispatches by it, for the flips of an hour. Seconds: the API "
            "server or the router's watch is slow.",
            quantiles_of_all("fulcrum_router_flip_seconds", f"{{{SELECTOR}}}", window="1h"),
            unit="s",
        ),
        lines(
            "Flip requests of the router",
            "No instance of the role met the SLO for a request. Without flips after it: see the decisions.",
            [rate("router_flip_requests_total", "role")],
            unit="reqps",
        ),
        lines(
            "Write conflicts",
            "Flips that were decided again, because the assignment had changed. A few are normal.",
            [
                Query(
                    f"sum(rate(fulcrum_autoscaler_write_conflicts_total{{{SELECTOR}}}[{RATE}]))", "conflicts"
                )
            ],
            unit="ops",
        ),
    ]
