"""The figures of a run: as JSON for programs, in a few lines for people. Pure."""

from dataclasses import asdict, dataclass
from typing import Any

from fulcrum_cli.play.recorder import Flip, Recorder
from fulcrum_cli.play.view import TOO_SLOW_MS, short_s
from fulcrum_core.spelling import format_count
from fulcrum_core.values import Role
from fulcrum_simulator.client import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """All that a run leaves. In the JSON, times count from `began_at_s`, the load's start in unix time."""

    load: str
    mode: str
    seed: int
    instances: int
    began_at_s: float
    lasted_s: float
    requests: Report
    recorder: Recorder
    lateness_p99_ms: float | None
    notes: tuple[str, ...] = ()
    stuck: str = ""
    """Why the flips asked for ended before their number; "" if they did not."""

    @property
    def too_slow(self) -> bool:
        """Whether the machine, and not the model, made the latencies."""
        return self.lateness_p99_ms is not None and self.lateness_p99_ms > TOO_SLOW_MS

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        requests = self.requests
        return {
            "load": self.load,
            "mode": self.mode,
            "seed": self.seed,
            "lasted_s": round(self.lasted_s, 3),
            "requests": {
                "offered": requests.offered,
                "ok": requests.ok,
                "failed": requests.failed,
                "broken": requests.broken,
                "wrong": requests.wrong,
                "in_flight": requests.in_flight,
                "broken_silently": requests.broken_silently,
                "held_back": requests.held_back,
                "output_tokens": requests.output_tokens,
                "reasons": requests.reasons,
            },
            "attainment": _rounded(requests.attainment),
            "latencies": {name: _rounded(value) for name, value in asdict(requests.latencies).items()},
            "sent_late_ms_p99": _rounded(_ms(requests.sent_late_p99_s)),
            "flips": [self._flip(flip) for flip in self.recorder.flips],
            "flip_ack_ms_p99": self.recorder.ack_p99_ms(),
            "roles_over_time": {name: "".join(band) for name, band in sorted(self.recorder.bands.items())},
            "engine_lateness_ms_p99": _rounded(self.lateness_p99_ms),
            "machine_too_slow": self.too_slow,
            "notes": list(self.notes),
        }

    def _flip(self, flip: Flip) -> dict[str, Any]:
        return {
            "instance": flip.instance,
            "from": flip.origin.value,
            "to": flip.to.value,
            "at_s": round(flip.at_s - self.began_at_s, 3),
            "reason": flip.reason,
            "by": flip.by,
            "ack_ms": flip.ack_ms,
        }

    def as_text(self) -> str:
        """The summary for people."""
        requests, latencies = self.requests, self.requests.latencies
        to_prefill, to_decode = (self.recorder.flips_to(role) for role in (Role.PREFILL, Role.DECODE))
        lines = [
            f"{self.load}, mode {self.mode}, {format_count(self.instances, 'instance')}, "
            f"{self.lasted_s:.0f} s, seed {self.seed}",
            f"requests    {requests.offered} offered = {requests.ok} ok + {requests.failed} failed "
            f"+ {requests.broken} broken + {requests.wrong} wrong{self._left()}",
            f"attainment  {_percent(requests.attainment)} of the requests offered met TTFT and TPOT",
            f"TTFT        {_seconds(latencies.ttft_p50_s)} p50, {_seconds(latencies.ttft_p99_s)} p99",
            f"TPOT        {_seconds(latencies.tpot_p50_s)} p50, {_seconds(latencies.tpot_p99_s)} p99",
            f"flips       {to_prefill} to Prefill, {to_decode} to Decode{self._acknowledged()}",
            *(f"note        {note}" for note in self._notes()),
        ]
        return "\n".join(lines)

    def _left(self) -> str:
        """What somebody did not wait for."""
        return f" + {self.requests.in_flight} not waited for" if self.requests.in_flight else ""

    def _acknowledged(self) -> str:
        p99_ms = self.recorder.ack_p99_ms()
        return "" if p99_ms is None else f", acknowledged by the router in {p99_ms:.1f} ms (p99)"

    def _notes(self) -> list[str]:
        notes = [f"{count} × {reason}" for reason, count in self.requests.reasons.items()]
        if self.requests.held_back:
            held = format_count(self.requests.held_back, "request")
            notes.append(f"{held} waited for a connection: the limit was reached")
        notes.extend(self.notes)
        if self.lateness_p99_ms is not None:
            notes.append(f"engine steps were noticed {self.lateness_p99_ms:.1f} ms late (p99)")
        if self.too_slow:
            notes.append("MACHINE TOO SLOW: latencies are this machine's and not the model's")
        return notes


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else short_s(seconds)
