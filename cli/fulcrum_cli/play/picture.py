"""Takes the picture of a run as it is now, for the view. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fulcrum_cli.play.frame import Counts, Decision, Frame, InstanceRow
from fulcrum_cli.play.recorder import Flip, Recorder
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.state import InstanceState, RouterState
from fulcrum_core.values import Role
from fulcrum_simulator.client import Ending, Tally, latencies

WINDOW_S = 10.0
_TOLD = ("refuse", "advise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What changes from one picture to the next and is not observed from the service."""

    elapsed_s: float
    clock_s: float
    load: str
    load_phase: str
    rate_rps: float | None
    selected: int
    notice: str
    began_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is known of the service."""

    service: PDService
    instances: Mapping[str, PDInstance]
    state: RouterState | None
    recorder: Recorder
    decisions: Sequence[Mapping[str, Any]]
    lateness_p99_ms: float | None
    away: tuple[str, ...] = ()
    """Parts that do not answer, in words."""


def take(
    sight: Sight, tally: Tally, moment: Moment, *, endpoint: str, ends_s: float | None, seed: int
) -> Frame:
    """The picture of this moment."""
    spec, recorder = sight.service.spec, sight.recorder
    recent = tally.since(moment.clock_s - WINDOW_S)
    return Frame(
        service=sight.service.metadata.name,
        model=spec.model,
        endpoint=endpoint,
        mode=spec.autoscaling.mode.value,
        seed=seed,
        elapsed_s=moment.elapsed_s,
        ends_s=ends_s,
        load=moment.load,
        load_phase=moment.load_phase,
        rate_rps=moment.rate_rps,
        slo=spec.slo.slo(),
        instances=_rows(sight),
        selected=moment.selected,
        counts=_counts(tally),
        recent=latencies(recent),
        attainment=_share(tally.met, len(tally.outcomes)),
        attainment_recent=_share(sum(outcome.met(tally.slo) for outcome in recent), len(recent)),
        wanted=_split(recorder.roles.values()),
        had=_split(_had(sight)),
        flips_to_prefill=recorder.flips_to(Role.PREFILL),
        flips_to_decode=recorder.flips_to(Role.DECODE),
        ack_p99_ms=recorder.ack_p99_ms(),
        lateness_p99_ms=sight.lateness_p99_ms,
        decisions=_told(recorder.flips, sight.decisions, moment.began_at_s),
        notice=moment.notice,
        away=sight.away,
    )


def _rows(sight: Sight) -> tuple[InstanceRow, ...]:
    loads = {state.name: state for state in sight.state.instances} if sight.state else {}
    return tuple(
        _row(name, instance, sight.recorder, loads.get(name)) for name, instance in sight.instances.items()
    )


def _row(name: str, instance: PDInstance, recorder: Recorder, load: InstanceState | None) -> InstanceRow:
    status = instance.status
    row = InstanceRow(
        name=name,
        role=recorder.roles.get(name),
        phase=status.phase,
        band=tuple(recorder.bands.get(name, ())),
        marks=frozenset(recorder.marks.get(name, ())),
        restarts=status.restarts,
    )
    if load is None:
        return row
    return replace(
        row,
        prefill_queued_s=load.prefill_queued_s,
        decode_tokens=load.decode_tokens,
        decode_requests=load.decode_requests,
        kv_usage=load.kv_usage,
        missed_probes=load.missed_probes,
    )


def _counts(tally: Tally) -> Counts:
    ended = tally.ended
    return Counts(
        offered=tally.offered,
        ok=ended[Ending.OK],
        failed=ended[Ending.FAILED],
        broken=ended[Ending.BROKEN],
        wrong=ended[Ending.WRONG],
        in_flight=tally.in_flight,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _split(roles: Iterable[Role]) -> tuple[int, int]:
    listed = list(roles)
    return listed.count(Role.PREFILL), listed.count(Role.DECODE)


def _had(sight: Sight) -> list[Role]:
    """The roles by which the router dispatches to instances that serve."""
    if sight.state is None:
        return []
    return [state.role for state in sight.state.instances if state.serving]


def _told(
    flips: Sequence[Flip], decisions: Sequence[Mapping[str, Any]], began_at_s: float
) -> tuple[Decision, ...]:
    """Flips, and those that the autoscaler refused or only advised, by time; of a repeated word the last."""
    told = [
        Decision(flip.at_s - began_at_s, f"{flip.instance} → {flip.to}  {flip.reason}", flip.to)
        for flip in flips
    ]
    others: dict[str, Decision] = {}
    for decision in decisions:
        if decision.get("action") in _TOLD:
            text = f"{decision['action']}: {decision.get('reason', '')}"
            others[str(decision.get("to"))] = Decision(float(decision["at_s"]) - began_at_s, text)
    return tuple(sorted((*told, *others.values()), key=lambda decision: decision.at_s))
