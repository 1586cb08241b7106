"""Builds the frame that `fulcrum play` draws in the terminal and writes with `--snapshot`. Pure.

The live page (`play --web`) does not use it: `web.page_model` builds the page. `session` asks for a frame for
each drawing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fulcrum_autoscaler.policy.decisions import DecisionAction
from fulcrum_cli.play.frame import DecisionLine, Frame, InstanceRow, RequestCounts, TierRow
from fulcrum_cli.play.loads import TIERS, list_shapes
from fulcrum_cli.play.recorder import RecordedFlip, Recorder
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import InstanceState, RouterState
from fulcrum_core.values import Role
from fulcrum_simulator.client import LoadOutcome, LoadResults, OutcomeKind, summarize_latencies

RECENT_WINDOW_S = 10.0
"""Seconds over which recent latencies and attainment are computed."""
_SHOWN_ACTIONS = (DecisionAction.REFUSE, DecisionAction.ADVISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """State of the run itself: time, load and user interface."""

    elapsed_s: float
    """Seconds since the load started."""
    clock_s: float
    """Now, on the clock of the load's results."""
    load: str
    load_phase: str
    rate_rps: float | None
    selected: int
    notice: str
    started_at_s: float
    """Unix time at which the load started; before that, the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceObservation:
    """State of the service, as far as it was observed."""

    service: PDService
    instances: Mapping[str, PDInstance]
    state: RouterState | None
    recorder: Recorder
    decisions: Sequence[Mapping[str, Any]]
    lateness_p99_ms: float | None
    unavailable: tuple[str, ...] = ()
    """Components that do not respond, as text with the time since: `router for 3 s`."""


def build_frame(
    observation: ServiceObservation,
    results: LoadResults,
    progress: RunProgress,
    *,
    endpoint: str,
    duration_s: float | None,
    seed: int,
) -> Frame:
    """Build the frame for the current time."""
    spec, recorder = observation.service.spec, observation.recorder
    recent = results.since(progress.clock_s - RECENT_WINDOW_S)
    return Frame(
        service=observation.service.metadata.name,
        model=f"{spec.model}, simulated" if spec.engine.is_simulated else spec.model,
        endpoint=endpoint,
        mode=spec.autoscaling.mode.value,
        seed=seed,
        elapsed_s=progress.elapsed_s,
        duration_s=duration_s,
        load=progress.load,
        load_phase=progress.load_phase,
        rate_rps=progress.rate_rps,
        slo=spec.slo.to_slo(),
        instances=_instance_rows(observation),
        selected=progress.selected,
        counts=_request_counts(results),
        has_tiers=TIERS in list_shapes(spec.qos_tiers),
        tiers=_tier_rows(results, recent),
        recent=summarize_latencies(recent),
        attainment=_share(results.slo_met, len(results.outcomes)),
        attainment_recent=_share(sum(outcome.meets(results.slo) for outcome in recent), len(recent)),
        desired_split=_count_split(recorder.roles.values()),
        actual_split=_count_split(_dispatch_roles(observation)),
        flips_to_prefill=recorder.flips_to(Role.PREFILL),
        flips_to_decode=recorder.flips_to(Role.DECODE),
        ack_p99_ms=recorder.ack_p99_ms(),
        lateness_p99_ms=observation.lateness_p99_ms,
        decisions=_decision_lines(recorder.flips, observation.decisions, progress.started_at_s),
        notice=progress.notice,
        unavailable=observation.unavailable,
    )


def _instance_rows(observation: ServiceObservation) -> tuple[InstanceRow, ...]:
    loads = {state.name: state for state in observation.state.instances} if observation.state else {}
    return tuple(
        _instance_row(name, instance, observation.recorder, loads.get(name))
        for name, instance in observation.instances.items()
    )


def _instance_row(
    name: str, instance: PDInstance, recorder: Recorder, load: InstanceState | None
) -> InstanceRow:
    status = instance.status
    row = InstanceRow(
        name=name,
        role=recorder.roles.get(name),
        phase=status.phase,
        role_history=tuple(recorder.role_histories.get(name, ())),
        flip_marks=frozenset(recorder.flip_marks.get(name, ())),
        restarts=status.restarts,
    )
    if load is None:
        return row
    return replace(
        row,
        prefill_queued_s=load.prefill_queued_s,
        decode_tokens=load.decode_tokens,
        decode_legs=load.decode_legs,
        kv_usage=load.kv_usage,
        missed_probes=load.missed_probes,
    )


def _request_counts(results: LoadResults) -> RequestCounts:
    by_kind = results.by_kind
    return RequestCounts(
        offered=results.offered,
        ok=by_kind[OutcomeKind.OK],
        failed=by_kind[OutcomeKind.FAILED],
        broken=by_kind[OutcomeKind.BROKEN],
        wrong=by_kind[OutcomeKind.WRONG],
        in_flight=results.in_flight,
        refused=by_kind[OutcomeKind.REFUSED],
    )


def _tier_rows(results: LoadResults, recent: Sequence[LoadOutcome]) -> tuple[TierRow, ...]:
    rows = []
    for name, counts in sorted(results.tiers.items(), key=lambda item: item[1].offered):
        met = [outcome.meets(results.slo) for outcome in recent if outcome.tier == name]
        ended = _share(counts.met, counts.ended)
        rows.append(TierRow(name, counts.offered, counts.refused, ended, _share(sum(met), len(met))))
    return tuple(rows)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _count_split(roles: Iterable[Role]) -> tuple[int, int]:
    listed = list(roles)
    return listed.count(Role.PREFILL), listed.count(Role.DECODE)


def _dispatch_roles(observation: ServiceObservation) -> list[Role]:
    """Return the roles that the router uses now for dispatch, of the instances that it calls serving.

    They may be older than the roles of the assignment.
    """
    if observation.state is None:
        return []
    return [state.role for state in observation.state.instances if state.serving]


def _decision_lines(
    flips: Sequence[RecordedFlip], decisions: Sequence[Mapping[str, Any]], started_at_s: float
) -> tuple[DecisionLine, ...]:
    """Return flips, and the last refused or advised flip to each role, in order of time."""
    flip_lines = [
        DecisionLine(flip.at_s - started_at_s, f"{flip.instance} → {flip.to}  {flip.reason}", flip.to)
        for flip in flips
    ]
    others: dict[str, DecisionLine] = {}
    for decision in decisions:
        if decision.get("action") in _SHOWN_ACTIONS:
            text = f"{decision['action']}: {decision.get('reason', '')}"
            others[str(decision.get("to"))] = DecisionLine(float(decision["at_s"]) - started_at_s, text)
    return tuple(sorted((*flip_lines, *others.values()), key=lambda decision: decision.at_s))
