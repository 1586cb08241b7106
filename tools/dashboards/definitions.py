"""The dashboards: Service, Tiers and tenants, Instances, Autoscaler, Cost and Control plane."""

from tools.dashboards.panels import (
    RATE,
    SELECTOR,
    Panel,
    Query,
    build_dashboard,
    figure,
    lines,
    quantile,
    quantiles,
    timeline,
)

_JUDGED = 'outcome=~"ok|failed|broken|left_late"'
_OFFERED = f"sum(rate(fulcrum_router_requests_offered_total{{{SELECTOR}}}[{RATE}]))"
Rows = list[tuple[str, list[Panel]]]


def _router(metric: str, by: str, *, labels: str = "") -> Query:
    """The largest value of a gauge of the routers, by a label: a standby shows 0."""
    return Query(f"max by ({by}) (fulcrum_router_{metric}{{{SELECTOR}{labels}}})", _legend(by))


def _rate(metric: str, by: str, *, labels: str = "") -> Query:
    return Query(f"sum by ({by}) (rate(fulcrum_{metric}{{{SELECTOR}{labels}}}[{RATE}]))", _legend(by))


def _legend(by: str) -> str:
    return " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))


def build_dashboards() -> dict[str, str]:
    """Return the JSON of each dashboard by the name of its file, without suffix."""
    return {
        "service": build_dashboard("Service", "Is the SLO met, and what holds it back?", _service()),
        "tiers": build_dashboard("Tiers and tenants", "Who gets what was promised?", _tiers()),
        "cost": build_dashboard(
            "Cost", "What do tokens cost?", _cost(), inputs=[("price", "Price of a GPU hour", "2.50")]
        ),
        "instances": build_dashboard("Instances", "Who serves, and who is slow?", _instances()),
        "autoscaler": build_dashboard("Autoscaler", "What it sees, decides and does.", _autoscaler()),
        "control-plane": build_dashboard("Control plane", "Operator, routers, API.", _control_plane()),
    }


def _service() -> Rows:
    met = f"sum by (tier) (rate(fulcrum_router_requests_slo_met_total{{{SELECTOR}}}[{RATE}]))"
    judged = f"sum by (tier) (rate(fulcrum_router_requests_total{{{SELECTOR},{_JUDGED}}}[{RATE}]))"
    budget = f"on (namespace, service) group_left () fulcrum:slo_budget:ratio{{{SELECTOR}}}"
    slo: list[Panel] = [
        lines(
            "SLO attainment",
            "Share of requests that met TTFT and TPOT. Below the objective: look at the causes beside it.",
            [
                Query(f"{met} / {judged}", "{{tier}}"),
                Query(f"max(fulcrum_operator_slo_objective_ratio{{{SELECTOR}}})", "objective"),
            ],
            unit="percentunit",
        ),
        lines(
            "What the misses wait for",
            "Misses per second by the part of their time that was longest. waiting, prefill_queue: "
            "more prefill. "
            "decode, decode_queue: more decode. transfer: see KV transfers below. retries: see failed legs.",
            [_rate("router_slo_misses_total", "part")],
            stacked=True,
        ),
        lines(
            "Error budget burn",
            "1 uses up the budget exactly. Above 14.4 in both windows FulcrumSLOBurnsFast fires.",
            [
                Query(
                    f"fulcrum:slo_misses:ratio_rate{window}{{{SELECTOR}}} / {budget}",
                    f"{{{{tier}}}} {window}",
                )
                for window in ("5m", "1h")
            ],
            limit=14.4,
        ),
        lines(
            "Where the time goes",
            "Mean seconds of a request by part. Compare with the objectives: the part that grows is "
            "the bottleneck.",
            [
                Query(
                    f"sum by (part) (rate(fulcrum_router_request_time_seconds_total{{{SELECTOR}}}[{RATE}]))"
                    f" / ignoring (part) group_left () sum({judged})",
                    "{{part}}",
                )
            ],
            unit="s",
            stacked=True,
        ),
    ]
    latency: list[Panel] = [
        lines(
            "TTFT of streams",
            "From arrival to the first token. If p99 leaves p50 behind, look at the queues.",
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
    ]
    work: list[Panel] = [
        lines(
            "Split",
            "Serving instances by role. A flip moves one from the one line to the other.",
            [_router("serving_instances", "role")],
        ),
        lines(
            "Load by role",
            "1: the objective is just met. Above it the autoscaler flips, or holds; the dashboard "
            "Autoscaler shows the reason.",
            [Query(f"max by (role) (fulcrum_autoscaler_load_ratio{{{SELECTOR}}})", "{{role}}")],
            limit=1.0,
        ),
        lines(
            "Requests",
            "Per second, by outcome. failed and broken are ours to explain; invalid ones are the clients'.",
            [Query(_OFFERED, "offered"), _rate("router_requests_total", "outcome")],
            unit="reqps",
        ),
        lines(
            "Refused and stopped",
            "Requests that were not tried again, by reason. full: the waiting room; retry_budget: "
            "engines fail.",
            [_rate("router_stopped_requests_total", "reason")],
            unit="reqps",
        ),
    ]
    kv: list[Panel] = [
        lines(
            "KV transfers",
            "By outcome. recomputed: decode computed the prompt again; the runbook of "
            "KVTransferVerified says why.",
            [_rate("router_kv_transfers_total", "outcome")],
            unit="ops",
        ),
        lines(
            "Time of KV transfers",
            "From sending the decode leg to its first token: transfer, queue and first step.",
            [
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    f"(rate(fulcrum_router_kv_transfer_seconds_bucket{{{SELECTOR}}}[{RATE}])))",
                    f"p{100 * share:g}",
                )
                for share in (0.5, 0.99)
            ],
            unit="s",
        ),
        lines(
            "Local prefills",
            "Prompts that decode computes itself, by reason. More than a few: prefill or KV transfers fail.",
            [_rate("router_local_prefills_total", "reason")],
            unit="reqps",
        ),
        lines(
            "Failed legs",
            "Requests to engines that failed, by cause. For engine and network the dashboard "
            "Instances names the instance.",
            [_rate("router_leg_failures_total", "phase, cause")],
            unit="reqps",
        ),
    ]
    return [("SLO", slo), ("Latency", latency), ("Work", work), ("KV transfers and failures", kv)]


def _tiers() -> Rows:
    met = f"sum by (tier) (increase(fulcrum_router_requests_slo_met_total{{{SELECTOR}}}[$__range]))"
    judged = f"sum by (tier) (increase(fulcrum_router_requests_total{{{SELECTOR},{_JUDGED}}}[$__range]))"
    missed = f"sum by (tier, part) (rate(fulcrum_router_slo_misses_total{{{SELECTOR}}}[{RATE}])) > 0"
    promise: list[Panel] = [
        figure(
            "SLO attainment of each tier",
            "Over the time range. A tier below the objective: see by which part it misses, below.",
            Query(f"{met} / {judged}", "{{tier}}"),
            unit="percentunit",
            width=12,
        ),
        figure(
            "Share of the requests",
            "Of all that arrived. A tier with far more than planned takes what is reserved for others.",
            Query(
                f"sum by (tier) (increase(fulcrum_router_requests_offered_total{{{SELECTOR}}}[$__range]))"
                f" / ignoring (tier) group_left () "
                f"sum(increase(fulcrum_router_requests_offered_total{{{SELECTOR}}}[$__range]))",
                "{{tier}}",
            ),
            unit="percentunit",
            width=12,
        ),
        lines(
            "Misses of each tier by part",
            "waiting, admission: the tier's share is used up. decode: the same for all tiers of a service.",
            [Query(missed, "{{tier}} {{part}}")],
            unit="reqps",
            stacked=True,
        ),
        lines(
            "Requests of each tier",
            "That arrive, per second. A jump in one tier: look for the tenant in its clients' logs.",
            [_rate("router_requests_offered_total", "tier")],
            unit="reqps",
        ),
    ]
    latency: list[Panel] = [
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
    callers: list[Panel] = [
        lines(
            "Refused callers",
            "401 per second, by reason. unknown: a client has an old key.",
            [_rate("router_refused_callers_total", "reason")],
            unit="reqps",
        ),
        lines(
            "Headers without effect",
            "A client that is not a trusted proxy names tenant or tier: see spec.router.auth.",
            [_rate("router_dropped_headers_total", "header")],
            unit="reqps",
        ),
        lines(
            "Unknown tiers",
            "Requests that name a tier that the service does not list; they get the default tier.",
            [Query(f"sum(rate(fulcrum_router_unknown_tiers_total{{{SELECTOR}}}[{RATE}]))", "requests")],
            unit="reqps",
        ),
    ]
    return [("What was promised", promise), ("Latency", latency), ("Callers", callers)]


def _cost() -> Rows:
    devices = f"fulcrum_operator_devices{{{SELECTOR}}}"
    tokens = f"sum(rate(fulcrum_router_output_tokens_total{{{SELECTOR}}}[{RATE}]))"
    now: list[Panel] = [
        figure(
            "GPUs",
            "Requested by the instances, by pool. More than the load needs for hours: lower the maximum.",
            Query(f"max by (pool) ({devices})", "{{pool}}"),
        ),
        figure(
            "GPU hours",
            "Over the time range, by pool.",
            Query(f"avg_over_time((max by (pool) ({devices}))[$__range:1m]) * $__range_s / 3600", "{{pool}}"),
        ),
        figure(
            "Cost",
            "GPU hours times the price above, over the time range, by pool.",
            Query(
                f"avg_over_time((max by (pool) ({devices}))[$__range:1m]) * $__range_s / 3600 * $price",
                "{{pool}}",
            ),
        ),
        figure(
            "Cost of a million output tokens",
            "Over the time range. It falls with the load: instances cost the same when they idle.",
            Query(
                f"1e6 * sum(avg_over_time((max by (pool) ({devices}))[$__range:1m])) * $__range_s / 3600"
                f" * $price / sum(increase(fulcrum_router_output_tokens_total{{{SELECTOR}}}[$__range]))",
                "per million",
            ),
        ),
    ]
    over_time: list[Panel] = [
        lines(
            "Output tokens",
            "Per second. Without a price, the number to compare two configurations by.",
            [Query(tokens, "tokens")],
        ),
        lines(
            "Output tokens of a GPU",
            "Per second and GPU. Low while the SLO is met: the service is larger than it needs to be.",
            [Query(f"{tokens} / sum(max by (pool) ({devices}))", "tokens")],
        ),
        lines(
            "Cost of a million output tokens over time",
            "At the price above. Peaks at night: scale down, or let batch work run then.",
            [Query(f"1e6 * sum(max by (pool) ({devices})) * $price / 3600 / ({tokens} > 0)", "per million")],
        ),
        lines(
            "GPUs by pool",
            "Requested by the instances. Compare with the load in the dashboard Autoscaler.",
            [Query(f"max by (pool) ({devices})", "{{pool}}")],
            stacked=True,
        ),
    ]
    return [("In the time range", now), ("Over time", over_time)]


def _instances() -> Rows:
    prefill, decode = (
        f'max by (instance) (fulcrum_router_instance_serving{{{SELECTOR},role="{role}"}})'
        for role in ("prefill", "decode")
    )
    state: list[Panel] = [
        timeline(
            "Roles",
            "Role of each instance over time; other: it serves as both, or takes no new work. "
            "Stripes that alternate: see "
            "FulcrumFlapping.",
            Query(f"{prefill} * 1 or {decode} * 2", "{{instance}}"),
            names=[("other", "grey"), ("prefill", "blue"), ("decode", "orange")],
        ),
        timeline(
            "Ejected",
            "An instance that the router sends nothing: it fails, is slow or does not respond. See its log.",
            _router("instance_ejected", "instance"),
            names=[("serves", "green"), ("ejected", "red")],
        ),
    ]
    load: list[Panel] = [
        lines(
            "Prefill work queued",
            "Predicted seconds until an instance has done its prompts. One line far above the "
            "others: it is slow.",
            [_router("instance_prefill_queued_seconds", "instance")],
            unit="s",
        ),
        lines(
            "Decode legs",
            "Requests that an instance generates output for. Uneven lines: KV is full somewhere, or "
            "one is slow.",
            [_router("instance_decode_legs", "instance")],
        ),
        lines(
            "KV tokens of decode legs",
            "Prompt and output so far. Near the capacity, engines preempt: more decode instances.",
            [_router("instance_decode_tokens", "instance")],
        ),
        lines(
            "Pending transfers",
            "Prompts that are computed and not fetched. A line that only grows: decode cannot reach "
            "this instance.",
            [_router("instance_pending_transfers", "instance")],
        ),
    ]
    health: list[Panel] = [
        lines(
            "Share of failed legs",
            "Near 1: the engine fails. All near 1: look at what the clients send.",
            [_router("instance_error_ratio", "instance")],
            unit="percentunit",
            top=1.0,
        ),
        lines(
            "Drift of prefill predictions",
            "Predicted by measured time. Below 1: slower than its pool; half of it deserves a look "
            "at the node.",
            [_router("instance_prefill_drift_ratio", "instance")],
        ),
        lines(
            "KV cache use (engine)",
            "vLLM's own figure. At 1, requests wait in the engine or are preempted.",
            [
                Query(
                    f"max by (instance, role) (vllm:kv_cache_usage_perc{{{SELECTOR}}})",
                    "{{instance}} {{role}}",
                )
            ],
            unit="percentunit",
            top=1.0,
        ),
        lines(
            "Waiting in engines",
            "vLLM's own figure. Waiting in decode: more decode instances, or a longer wait for KV.",
            [
                Query(
                    f"max by (instance, role) (vllm:num_requests_waiting{{{SELECTOR}}})",
                    "{{instance}} {{role}}",
                )
            ],
        ),
    ]
    return [("State", state), ("Load", load), ("Health", health)]


def _autoscaler() -> Rows:
    seen: list[Panel] = [
        lines(
            "Load by role",
            "What the autoscaler saw. NaN (a gap): it cannot tell, and flips nothing.",
            [Query(f"max by (role) (fulcrum_autoscaler_load_ratio{{{SELECTOR}}})", "{{role}}")],
            limit=1.0,
        ),
        lines(
            "Assigned and serving instances",
            "Apart for long: an engine starts, drains or is ejected.",
            [
                Query(
                    f"max by (role) (fulcrum_autoscaler_assigned_instances{{{SELECTOR}}})",
                    "{{role}} assigned",
                ),
                Query(f"max by (role) (fulcrum_router_serving_instances{{{SELECTOR}}})", "{{role}} serving"),
            ],
        ),
        lines(
            "Age of the router's state",
            "More than some seconds: the autoscaler cannot read the router; see FulcrumAutoscalerBlind.",
            [Query(f"max(fulcrum_autoscaler_router_state_age_seconds{{{SELECTOR}}})", "age")],
            unit="s",
        ),
        lines(
            "Error of the predicted TTFT",
            "0.1: predicted 10 % too long. Beyond 0.5 flips come too early or too late.",
            [_router("ttft_prediction_error_ratio", "part")],
            unit="percentunit",
        ),
    ]
    done: list[Panel] = [
        lines(
            "Decisions",
            "By action. refuse: a rule forbids the flip that the load calls for; `fulcrum explain` names it.",
            [_rate("autoscaler_decisions_total", "action")],
            unit="ops",
        ),
        lines(
            "Flips",
            "By new role, in five minutes. Both roles together: instances flip to and fro.",
            [Query(f"sum by (to) (increase(fulcrum_autoscaler_flips_total{{{SELECTOR}}}[5m]))", "to {{to}}")],
        ),
        lines(
            "Flip requests of the router",
            "No instance of the role met the SLO for a request. Without flips after it: see the decisions.",
            [_rate("router_flip_requests_total", "role")],
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
    return [("What it sees", seen), ("What it does", done)]


def _control_plane() -> Rows:
    state: list[Panel] = [
        figure(
            "Operators that lead",
            "1 is right. 0: see FulcrumOperatorWithoutLeader.",
            Query("sum(fulcrum_operator_leader)"),
        ),
        figure("Active routers", "1 is right. 0: see FulcrumNoActiveRouter.", _router("active", "service")),
        figure(
            "Generation of the assignment",
            "The router's acknowledgement. If it stays behind the PDAssignment, the router's watch is stale.",
            _router("assignment_generation", "service"),
        ),
        figure(
            "Takeovers in an hour",
            "More than one beyond roll-outs: routers lose their Lease; see FulcrumRouterFailover.",
            Query(f"sum(increase(fulcrum_router_takeovers_total{{{SELECTOR}}}[1h]))"),
        ),
    ]
    reconciles: list[Panel] = [
        lines(
            "Reconciles",
            "Per second, by outcome. error, unreadable: see the condition Degraded of the services.",
            [Query(f"sum by (outcome) (rate(fulcrum_operator_reconciles_total[{RATE}]))", "{{outcome}}")],
            unit="ops",
        ),
        lines(
            "Duration of reconciles",
            "Seconds mean that the API server is slow.",
            [
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    f"(rate(fulcrum_operator_reconcile_seconds_bucket[{RATE}])))",
                    f"p{100 * share:g}",
                )
                for share in (0.5, 0.99)
            ],
            unit="s",
        ),
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
            [Query(f"max by (phase) (fulcrum_operator_longest_phase_seconds{{{SELECTOR}}})", "{{phase}}")],
            unit="s",
        ),
        timeline(
            "Conditions",
            "Ready and KVTransferVerified are True, Degraded is False in a sound service; docs/runbooks has "
            "a page for each.",
            Query(
                f"max by (condition, reason) (fulcrum_operator_service_condition{{{SELECTOR}}}) + 1",
                "{{condition}}: {{reason}}",
            ),
            names=[("Unknown", "grey"), ("False", "purple"), ("True", "blue")],
        ),
    ]
    router: list[Panel] = [
        lines(
            "Memory of requests",
            "At the limit the router refuses bodies with a 503: raise its memory, or send smaller ones.",
            [
                Query(f"max(fulcrum_router_request_memory_bytes{{{SELECTOR}}})", "held"),
                Query(f"max(fulcrum_router_request_memory_max_bytes{{{SELECTOR}}})", "limit"),
            ],
            unit="bytes",
        ),
        lines(
            "Failed background tasks",
            "Each was started again. Any line deserves the router's log.",
            [_rate("router_background_task_failures_total", "task")],
            unit="ops",
        ),
    ]
    return [("State", state), ("Operator", reconciles), ("Router", router)]
