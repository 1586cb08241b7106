"""Dashboard Instances: role, load and health of each instance. `__main__` calls `build`."""

from tools.dashboards.panels import ROLE_COLORS, Panel, build_dashboard, heat_map, lines, timeline
from tools.dashboards.queries import SELECTOR, Query, largest

_PREFILL, _DECODE = (
    f'max by (instance) (fulcrum_router_instance_serving{{{SELECTOR},role="{role}"}})'
    for role in ("prefill", "decode")
)


def build() -> str:
    """Build the JSON of the dashboard."""
    rows = [("State", _state()), ("Load", _load()), ("Health", _health())]
    return build_dashboard("Instances", "Who serves, and who is slow?", rows)


def _state() -> list[Panel]:
    return [
        timeline(
            "Roles",
            "Role of each instance over time; other: it serves as both, or takes no new work. "
            "Stripes that alternate: see "
            "FulcrumFlapping.",
            Query(f"{_PREFILL} * 1 or {_DECODE} * 2", "{{instance}}"),
            names=[("other", "grey"), *ROLE_COLORS.items()],
        ),
        timeline(
            "Ejected",
            "An instance that the router sends nothing: it fails, is slow or does not respond. See its log.",
            largest("router_instance_ejected", "instance"),
            names=[("serves", "green"), ("ejected", "red")],
        ),
    ]


def _load() -> list[Panel]:
    return [
        heat_map(
            "KV cache use by instance",
            "As the router last read it. One busy row: a long request, or requests that share a prefix. "
            "All rows busy: more decode instances.",
            largest("router_instance_kv_usage_ratio", "instance"),
            unit="percentunit",
            steps=[(None, "#1b3a57"), (0.25, "#2f6f9f"), (0.5, "#7aa6c2"), (0.75, "orange"), (0.9, "red")],
        ),
        lines(
            "Prefill work queued",
            "Predicted seconds until an instance has done its prompts. One line far above the "
            "others: it is slow.",
            [largest("router_instance_prefill_queued_seconds", "instance")],
            unit="s",
        ),
        lines(
            "Decode legs",
            "Requests that an instance generates output for. Uneven lines: KV is full somewhere, or "
            "one is slow.",
            [largest("router_instance_decode_legs", "instance")],
        ),
        lines(
            "KV tokens of decode legs",
            "Prompt and output so far. Near the capacity, engines preempt: more decode instances.",
            [largest("router_instance_decode_tokens", "instance")],
        ),
        lines(
            "Pending transfers",
            "Prompts that are computed and not fetched. A line that only grows: decode cannot reach "
            "this instance.",
            [largest("router_instance_pending_transfers", "instance")],
        ),
    ]


def _health() -> list[Panel]:
    return [
        lines(
            "Share of failed legs",
            "Near 1: the engine fails. All near 1: look at what the clients send.",
            [largest("router_instance_error_ratio", "instance")],
            unit="percentunit",
            top=1.0,
        ),
        lines(
            "Drift of prefill predictions",
            "Predicted by measured time. Below 1: slower than its pool; half of it deserves a look "
            "at the node.",
            [largest("router_instance_prefill_drift_ratio", "instance")],
        ),
        lines(
            "KV cache use (engine)",
            "vLLM's own figure. At 1, requests wait in the engine or are preempted.",
            [_engine("kv_cache_usage_perc")],
            unit="percentunit",
            top=1.0,
        ),
        lines(
            "Waiting in engines",
            "vLLM's own figure. Waiting in decode: more decode instances, or a longer wait for KV.",
            [_engine("num_requests_waiting")],
        ),
    ]


def _engine(metric: str) -> Query:
    """A gauge of vLLM itself, by instance."""
    return Query(f"max by (instance, role) (vllm:{metric}{{{SELECTOR}}})", "{{role}} {{instance}}")
