"""Dashboard Service: SLO attainment, latency, work and failures of one service. `__main__` calls `build`."""

from tools.dashboards.panels import PART_COLORS, Panel, build_dashboard, figure, lines
from tools.dashboards.queries import (
    ENDED,
    OFFERED,
    RATE,
    SELECTOR,
    SLO_MET,
    Query,
    largest,
    quantiles,
    quantiles_of_all,
    rate,
)

_MET = f"sum by (tier) (rate({SLO_MET}[{RATE}]))"
_JUDGED = f"sum by (tier) (rate({ENDED}[{RATE}]))"
_PREFILL_QUEUED = f'fulcrum_router_instance_prefill_queued_seconds{{{SELECTOR},role!="decode"}}'
_PROMPT_TOKENS = f"sum(rate(fulcrum_router_prompt_tokens_sent_total{{{SELECTOR}}}[{RATE}]))"
_OVERFLOW = f"sum(rate(fulcrum_router_overflow_prompt_tokens_total{{{SELECTOR}}}[{RATE}]))"
_TRANSFERS = f"fulcrum_router_kv_transfers_total{{{SELECTOR}"
_ATTAINED = (
    f"sum by (namespace, service, tier) (increase({SLO_MET}[$__range]))"
    f" / sum by (namespace, service, tier) (increase({ENDED}[$__range]))"
)
_BUDGET = f"on (namespace, service) group_left () fulcrum:slo_budget:ratio{{{SELECTOR}}}"


def build() -> str:
    """Build the JSON of the dashboard."""
    rows = [("SLO", _slo()), ("Latency", _latency()), ("Work", _work()), ("KV transfers and failures", _kv())]
    return build_dashboard(
        "Service",
        "Is the SLO met, and what holds it back?",
        rows,
        filters={"tier": "fulcrum_router_requests_offered_total"},
    )


def _slo_figures() -> list[Panel]:
    return [
        figure(
            "SLO attainment in the time range",
            "Of each tier. Below the objective: the panels below show since when, and what the misses wait "
            "for.",
            Query(_ATTAINED, "{{tier}}"),
            unit="percentunit",
            width=12,
        ),
        figure(
            "Error budget left",
            "Of the time range, for each tier. 0 %: more requests missed than the objective allows; see what "
            "the misses wait for.",
            Query(f"clamp_min(1 - (1 - {_ATTAINED}) / {_BUDGET}, 0)", "{{tier}}"),
            unit="percentunit",
            width=12,
            steps=((None, "red"), (0.001, "orange"), (0.25, "green")),
        ),
    ]


def _slo() -> list[Panel]:
    return [
        *_slo_figures(),
        lines(
            "SLO attainment",
            "Share of requests that met TTFT and TPOT. Below the objective: the next panel shows the causes.",
            [
                Query(f"{_MET} / {_JUDGED}", "{{tier}}"),
                Query(f"max(fulcrum_operator_slo_objective_ratio{{{SELECTOR}}})", "objective"),
            ],
            unit="percentunit",
        ),
        lines(
            "What the misses wait for",
            "Misses per second by the part of their time that was longest. waiting, prefill_queue: "
            "more prefill. "
            "decode, decode_queue: more decode. transfer: see KV transfers below. retries: see failed legs.",
            [rate("router_slo_misses_total", "part")],
            unit="reqps",
            stacked=True,
            colors=PART_COLORS,
        ),
        lines(
            "Error budget burn",
            "1 uses up the budget exactly. Above 14.4 in both windows, or if 80 % of the requests miss, "
            "FulcrumSLOBurnsFast fires.",
            [
                Query(
                    f"fulcrum:slo_misses:ratio_rate{window}{{{SELECTOR}}} / {_BUDGET}",
                    f"{{{{tier}}}} {window}",
                )
                for window in ("5m", "1h")
            ],
            limit=14.4,
        ),
        lines(
            "Where the time goes",
            "Mean seconds of a request by part. Compare with the objectives: the part that grows "
            "is the cause.",
            [
                Query(
                    f"sum by (part) (rate(fulcrum_router_request_time_seconds_total{{{SELECTOR}}}[{RATE}]))"
                    f" / ignoring (part) group_left () sum({_JUDGED})",
                    "{{part}}",
                )
            ],
            unit="s",
            stacked=True,
            colors=PART_COLORS,
        ),
    ]


def _latency() -> list[Panel]:
    return [
        lines(
            "TTFT of streams",
            "From arrival to the first token, of the tiers chosen above. p99 far above p50 (dotted): "
            "look at the queues.",
            quantiles("fulcrum_router_ttft_seconds"),
            unit="s",
        ),
        lines(
            "TPOT of streams",
            "Mean time per token after the first. Too high: more decode instances, or smaller batches.",
            quantiles("fulcrum_router_tpot_seconds"),
            unit="s",
        ),
        lines(
            "Whole responses",
            "Duration of responses that are not streamed. Their objective is TTFT plus TPOT for each "
            "further token.",
            quantiles("fulcrum_router_response_seconds"),
            unit="s",
        ),
        lines(
            "Waiting in the router",
            "Until the first leg is sent. More than some milliseconds: every prefill instance has "
            "enough work.",
            quantiles("fulcrum_router_waiting_seconds"),
            unit="s",
        ),
        lines(
            "Time between tokens",
            "Engines' own figure of single tokens; TPOT is its mean over a request. p99 far above "
            "p50: prompts are computed beside answers, or engines preempt.",
            quantiles_of_all(
                "vllm:inter_token_latency_seconds", f"{{{SELECTOR}}}", shares=(0.5, 0.9, 0.99, 0.999)
            ),
            unit="s",
        ),
        lines(
            "KV cache use by role",
            "Mean and fullest instance. Decode near 1: requests wait or are preempted, so more decode "
            "instances.",
            [
                Query(
                    f"{name} by (role) (fulcrum_router_instance_kv_usage_ratio{{{SELECTOR}}})",
                    f"{{{{role}}}} {label}",
                )
                for name, label in (("avg", "mean"), ("max", "fullest"))
            ],
            unit="percentunit",
            top=1.0,
        ),
    ]


def _work() -> list[Panel]:
    return [
        lines(
            "Split",
            "Serving instances by role. A flip moves an instance from one line to the other.",
            [largest("router_serving_instances", "role")],
        ),
        lines(
            "Load by role (policy arrow)",
            "1: the objective is just met. Above it the autoscaler flips, or holds; the "
            "dashboard Autoscaler shows the reason, and the forecasts of policy balanced.",
            [largest("autoscaler_load_ratio", "role")],
            limit=1.0,
        ),
        lines(
            "Queues before prefill",
            "Predicted seconds until prompts that wait are computed: all in the router, and on the instances "
            "that compute prompts. They grow while decode's queue does not: more prefill.",
            [
                Query(f"max(fulcrum_router_waiting_prefill_seconds{{{SELECTOR}}})", "router"),
                Query(f"avg({_PREFILL_QUEUED})", "instances, mean"),
                Query(f"max({_PREFILL_QUEUED})", "fullest instance"),
            ],
            unit="s",
        ),
        lines(
            "Queues before decode",
            "Requests that wait in the engines of instances that decode, for a place in the batch or for "
            "their KV, and prompts whose KV nobody has fetched yet. They grow while prefill's queue does "
            "not: more decode.",
            [
                Query(f'sum(vllm:num_requests_waiting{{{SELECTOR},role!="prefill"}})', "in engines"),
                Query(f"sum(fulcrum_router_instance_pending_transfers{{{SELECTOR}}})", "pending transfers"),
            ],
        ),
        lines(
            "Requests",
            "Per second, by outcome. failed and broken are ours to explain; invalid ones are the clients'.",
            [Query(f"sum(rate({OFFERED}[{RATE}]))", "offered"), rate("router_requests_total", "outcome")],
            unit="reqps",
        ),
        lines(
            "Share of prompts on CPUs",
            "Of the prompt tokens, only with a pool of CPUs beside GPUs. At the line "
            "FulcrumCPUPrefill fires after a while: GPUs are missing.",
            [Query(f"{_OVERFLOW} / ({_PROMPT_TOKENS} > 0)", "CPUs")],
            unit="percentunit",
            limit=0.05,
            top=0.1,
        ),
        lines(
            "Refused and stopped",
            "Requests that were not tried again, by reason. full: the waiting room; retry_budget: "
            "engines fail.",
            [rate("router_stopped_requests_total", "reason")],
            unit="reqps",
        ),
    ]


def _kv() -> list[Panel]:
    return [
        lines(
            "KV transfers",
            "By outcome. recomputed: decode computed the prompt again; the runbook of "
            "KVTransferVerified says why.",
            [rate("router_kv_transfers_total", "outcome")],
            unit="ops",
        ),
        lines(
            "Verified KV transfers",
            "Share of transfers whose KV decode has used, of those whose outcome is known. Below 1: see the "
            "runbook of KVTransferVerified.",
            [
                Query(
                    f'sum(rate({_TRANSFERS},outcome="verified"}}[{RATE}])) '
                    f'/ sum(rate({_TRANSFERS},outcome=~"verified|recomputed"}}[{RATE}]))',
                    "verified",
                )
            ],
            unit="percentunit",
            top=1.0,
        ),
        lines(
            "Time of KV transfers",
            "From sending the decode leg to its first token: transfer, queue and first step.",
            quantiles_of_all("fulcrum_router_kv_transfer_seconds", f"{{{SELECTOR}}}"),
            unit="s",
        ),
        lines(
            "Local prefills",
            "Prompts that decode computes itself, by reason. More than a few: prefill or KV transfers fail.",
            [rate("router_local_prefills_total", "reason")],
            unit="reqps",
        ),
        lines(
            "Failed legs",
            "Requests to engines that failed, by cause. For engine and network the dashboard "
            "Instances names the instance.",
            [rate("router_leg_failures_total", "phase, cause")],
            unit="reqps",
        ),
        lines(
            "Streams whose engine failed",
            "continued: another instance went on, and the client saw nothing. not_sound: without a seed or "
            "greedy sampling the rest would be another text. Any line: an engine ended; see the instances.",
            [rate("router_stream_continuations_total", "outcome")],
            unit="reqps",
        ),
    ]
