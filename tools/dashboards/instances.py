"""Dashboard Instances: role, load and health of each instance. `__main__` calls `build`."""

from tools.dashboards.panels import ROLE_COLORS, Panel, build_dashboard, heat_map, lines, timeline
from tools.dashboards.queries import RATE, SELECTOR, Query

_CHOSEN = f'{SELECTOR},instance=~"$instance"'
_NAME = "{{role}} {{instance}}"
_ROLES = {**ROLE_COLORS, "both": "purple"}
"""Roles and their colours; the value of a role is its place, from 1 on."""
_ROLE_VALUES = " or ".join(
    f'max by (instance) (fulcrum_router_instance_serving{{{_CHOSEN},role="{role}"}}) * {value}'
    for value, role in enumerate(_ROLES, start=1)
)


def build() -> str:
    """Build the JSON of the dashboard."""
    rows = [("State", _state()), ("Load", _load()), ("Health", _health()), ("Engines", _engines())]
    return build_dashboard(
        "Instances",
        "Who serves, and who is slow?",
        rows,
        filters={"instance": "fulcrum_router_instance_serving"},
    )


def _state() -> list[Panel]:
    return [
        timeline(
            "Roles",
            "Role of each instance over time; none: it takes no new work. Stripes that alternate: see "
            "FulcrumFlapping.",
            Query(_ROLE_VALUES, "{{instance}}"),
            names=[("none", "grey"), *_ROLES.items()],
        ),
        timeline(
            "Ejected",
            "An instance that the router sends nothing: it fails, is slow or does not respond. See its log.",
            _by_instance("ejected"),
            names=[("serves", "green"), ("ejected", "red")],
        ),
    ]


def _load() -> list[Panel]:
    return [
        heat_map(
            "KV cache use by instance",
            "As the router last read it. One busy row: a long request, or requests that share a prefix. "
            "All rows busy: more decode instances.",
            _by_instance("kv_usage_ratio"),
            unit="percentunit",
            steps=[(None, "#1b3a57"), (0.25, "#2f6f9f"), (0.5, "#7aa6c2"), (0.75, "orange"), (0.9, "red")],
        ),
        lines(
            "Prefill work queued",
            "Predicted seconds until an instance has done its prompts. One line far above the "
            "others: it is slow.",
            [_by_instance("prefill_queued_seconds")],
            unit="s",
        ),
        lines(
            "Decode legs",
            "Requests that an instance generates output for. Uneven lines: the KV cache of one is "
            "full, or one is slow.",
            [_by_instance("decode_legs")],
        ),
        lines(
            "KV tokens of decode legs",
            "Prompt and output so far. Near the capacity, engines preempt: more decode instances.",
            [_by_instance("decode_tokens")],
        ),
        lines(
            "Pending transfers",
            "Prompts that are computed and not fetched. A line that only grows: decode cannot reach "
            "this instance.",
            [_by_instance("pending_transfers")],
        ),
    ]


def _health() -> list[Panel]:
    return [
        lines(
            "Share of failed legs",
            "Near 1: the engine fails. All near 1: look at what the clients send.",
            [_by_instance("error_ratio")],
            unit="percentunit",
            top=1.0,
        ),
        lines(
            "Drift of prefill predictions",
            "Predicted by measured time. Below 1: slower than its pool. Below 0.5: look at the node.",
            [_by_instance("prefill_drift_ratio")],
        ),
    ]


def _engines() -> list[Panel]:
    return [
        lines(
            "Running in engines",
            "Requests in the batch. Near max_num_seqs while others wait: more instances of the role.",
            [_engine("num_requests_running")],
        ),
        lines(
            "Waiting in engines",
            "Waiting in decode: more decode instances, or a longer wait for KV.",
            [_engine("num_requests_waiting")],
        ),
        lines(
            "Preemptions",
            "Requests that lost their KV to others and are computed again. More than a few: more decode "
            "instances, or a smaller max_num_seqs.",
            [_engine_rate("num_preemptions_total")],
            unit="ops",
        ),
        lines(
            "Prefix cache hits",
            "Share of prompt tokens that an engine had cached. Low though clients share prefixes: "
            "dispatch.prefixAware sends requests where their prefix is.",
            [
                Query(
                    f"{_engine_rate('prefix_cache_hits_total').expr}"
                    f" / ({_engine_rate('prefix_cache_queries_total').expr} > 0)",
                    _NAME,
                )
            ],
            unit="percentunit",
            top=1.0,
        ),
    ]


def _by_instance(metric: str) -> Query:
    """A gauge of the router, by instance."""
    return Query(f"max by (instance) (fulcrum_router_instance_{metric}{{{_CHOSEN}}})", "{{instance}}")


def _engine(metric: str) -> Query:
    """A gauge of vLLM itself, by instance."""
    return Query(f"max by (instance, role) (vllm:{metric}{{{_CHOSEN}}})", _NAME)


def _engine_rate(metric: str) -> Query:
    """How often a counter of vLLM is raised in a second, by instance."""
    return Query(f"sum by (instance, role) (rate(vllm:{metric}{{{_CHOSEN}}}[{RATE}]))", _NAME)
