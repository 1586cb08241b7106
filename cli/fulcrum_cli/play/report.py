"""The figures of a run, as JSON for programs and as a summary for people. Pure.

`session` computes them at the end, and the command `play` prints them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fulcrum_cli.play.engine_lateness import TOO_SLOW_MS
from fulcrum_cli.play.recorder import RecordedFlip, Recorder
from fulcrum_cli.terminal.output import format_seconds
from fulcrum_core.formatting import format_count
from fulcrum_core.values import Role
from fulcrum_simulator.client import LoadReport, TierCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of a finished run.

    `started_at_s` is the start of the load in unix time; `at_s` in the JSON is seconds since then.
    """

    load: str
    mode: str
    seed: int
    instances: int
    engine: str
    """Type of the engines: `Simulated` or `vLLM`."""
    started_at_s: float
    duration_s: float
    requests: LoadReport
    recorder: Recorder
    lateness_p99_ms: float | None
    notes: tuple[str, ...] = ()
    flips_failure: str = ""
    """Why --flips stopped early; "" if it did not. Only the command prints it."""

    @property
    def too_slow(self) -> bool:
        """Whether the machine was too slow for the latencies to be those of the engine model."""
        return self.lateness_p99_ms is not None and self.lateness_p99_ms > TOO_SLOW_MS

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        requests = self.requests
        return {
            "load": self.load,
            "mode": self.mode,
            "seed": self.seed,
            "engine": self.engine,
            "duration_s": round(self.duration_s, 3),
            "requests": {
                "offered": requests.offered,
                "ok": requests.ok,
                "refused": requests.refused,
                "failed": requests.failed,
                "broken": requests.broken,
                "wrong": requests.wrong,
                "in_flight": requests.in_flight,
                "broken_silently": requests.broken_silently,
                "connection_waits": requests.connection_waits,
                "output_tokens": requests.output_tokens,
                "reasons": requests.reasons,
            },
            "attainment": _round(requests.attainment),
            "tiers": {name: _tier_as_json(counts) for name, counts in requests.tiers.items()},
            "tiers_by_first_refusal": _list_by_first_refusal(requests.tiers),
            "latencies": {name: _round(value) for name, value in asdict(requests.latencies).items()},
            "sent_late_p99_ms": _round(_to_ms(requests.sent_late_p99_s)),
            "flips": [_flip_as_json(flip, since_s=self.started_at_s) for flip in self.recorder.flips],
            "flip_ack_p99_ms": self.recorder.ack_p99_ms(),
            "roles_over_time": {
                name: "".join(role_history)
                for name, role_history in sorted(self.recorder.role_histories.items())
            },
            "engine_lateness_p99_ms": _round(self.lateness_p99_ms),
            "machine_too_slow": self.too_slow,
            "notes": list(self.notes),
        }

    def as_text(self) -> str:
        """Return the summary for people."""
        requests, latencies = self.requests, self.requests.latencies
        to_prefill, to_decode = (self.recorder.flips_to(role) for role in (Role.PREFILL, Role.DECODE))
        lines = [
            f"{self.load}, mode {self.mode}, {format_count(self.instances, 'instance')} ({self.engine}), "
            f"{self.duration_s:.0f} s, seed {self.seed}",
            f"requests    {requests.offered} offered = {requests.ok} ok + {requests.failed} failed "
            f"+ {requests.broken} broken + {requests.wrong} wrong{self._format_rest()}",
            f"attainment  {_format_percent(requests.attainment)} of the requests offered met TTFT and TPOT",
            f"TTFT        {_format_seconds(latencies.ttft_p50_s)} p50, "
            f"{_format_seconds(latencies.ttft_p99_s)} p99",
            f"TPOT        {_format_seconds(latencies.tpot_p50_s)} p50, "
            f"{_format_seconds(latencies.tpot_p99_s)} p99",
            *(_format_tier(name, counts) for name, counts in requests.tiers.items()),
            f"flips       {to_prefill} to Prefill, {to_decode} to Decode{self._format_acknowledgement()}",
            *(f"note        {note}" for note in self._list_notes()),
        ]
        return "\n".join(lines)

    def _format_rest(self) -> str:
        """Describe the refused requests, and those that were still in flight when the user quit."""
        refused = f" + {self.requests.refused} refused" if self.requests.refused else ""
        return refused + (f" + {self.requests.in_flight} in flight" if self.requests.in_flight else "")

    def _format_acknowledgement(self) -> str:
        p99_ms = self.recorder.ack_p99_ms()
        return "" if p99_ms is None else f", acknowledged by the router in {p99_ms:.1f} ms (p99)"

    def _list_notes(self) -> list[str]:
        notes = [f"{count} × {reason}" for reason, count in self.requests.reasons.items()]
        if self.requests.connection_waits:
            waiting = format_count(self.requests.connection_waits, "request")
            notes.append(f"{waiting} waited for a connection of the load generator: its limit was reached")
        notes.extend(self.notes)
        if self.lateness_p99_ms is not None:
            notes.append(f"engine steps were {self.lateness_p99_ms:.1f} ms late (p99)")
        if self.too_slow:
            notes.append(
                "MACHINE TOO SLOW: the latencies are caused by this machine, not by the engine model"
            )
        return notes


def _tier_as_json(counts: TierCounts) -> dict[str, Any]:
    return {
        "offered": counts.offered,
        "ok": counts.ok,
        "refused": counts.refused,
        "attainment": _round(counts.attainment),
        "tokens_within_slo": counts.met_tokens,
    }


def _list_by_first_refusal(tiers: Mapping[str, TierCounts]) -> list[str]:
    refused_s = {name: counts.first_refused_s for name, counts in tiers.items()}
    return [name for _, name in sorted((at_s, name) for name, at_s in refused_s.items() if at_s is not None)]


def _format_tier(name: str, counts: TierCounts) -> str:
    return (
        f"{name:11} {counts.offered} offered, {counts.ok} ok, {counts.refused} refused, "
        f"attainment {_format_percent(counts.attainment)}"
    )


def _flip_as_json(flip: RecordedFlip, *, since_s: float) -> dict[str, Any]:
    return {
        "instance": flip.instance,
        "from": flip.from_role.value,
        "to": flip.to.value,
        "at_s": round(flip.at_s - since_s, 3),
        "reason": flip.reason,
        "by": flip.by,
        "ack_ms": flip.ack_ms,
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _to_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _format_percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _format_seconds(seconds: float | None) -> str:
    return "–" if seconds is None else format_seconds(seconds)
