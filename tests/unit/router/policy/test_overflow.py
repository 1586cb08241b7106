"""Overflow: which prompts CPU instances compute beside accelerators, and that the others never notice."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import AdmissionMode, EngineIdentity, Role
from fulcrum_router.policy import Candidates, TransferPairs
from fulcrum_router.policy.dispatch import DispatchReason
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext, LocalPrefillReason
from fulcrum_router.policy.overflow import CPU_QUEUE_MAX_S, IN_TIME_SHARE, LONG_PROMPT_TOKENS, choose_overflow
from tests.unit.router.builders import IDENTITY, SLO, FakeFleet, instance, work

LONG = LONG_PROMPT_TOKENS + 1_000
GPU = PrefillModel(c0=0.0, c1=1e-5, c2=0.0)
"""A long prompt takes 0.06 s of the second that its objective allows."""
CPU = PrefillModel(c0=0.0, c1=1e-4, c2=0.0)
"""A long prompt takes 0.6 s."""
OTHER_ATTENTION = replace(IDENTITY, attention="CPU_ATTN")


def gpu(name: str, *, queued_s: float = 0.0, decoding: int = 0) -> InstanceRecord:
    made = instance(name, queued_s=queued_s, decoding=decoding)
    made.prefill_model, made.decode_model = GPU, DecodeModel(intercept=0.01, slope=1e-6)
    return made


def cpu(
    name: str = "c1",
    *,
    queued_s: float = 0.0,
    role: Role = Role.PREFILL,
    identity: EngineIdentity | None = IDENTITY,
    model: PrefillModel = CPU,
) -> InstanceRecord:
    made = instance(name, role=role, queued_s=queued_s, identity=identity)
    made.on_cpu, made.prefill_model = True, model
    return made


def start(*instances: InstanceRecord, tokens: int = LONG) -> tuple[Journey[InstanceRecord], Action]:
    context: JourneyContext[InstanceRecord] = JourneyContext(FakeFleet(instances), TransferPairs())
    context.waiting_room.prefill_ahead_s = 0.5
    journey = Journey(context, work(tokens))
    return journey, journey.begin(0.0)


@pytest.mark.parametrize(
    ("instances", "ends_at_s", "tokens", "lower", "found"),
    [
        pytest.param([cpu()], 1.1, LONG, False, "c1", id="accelerators are late, the CPU is in time"),
        pytest.param([cpu()], 0.9, LONG, False, None, id="accelerators are in time"),
        pytest.param([cpu()], math.inf, LONG, False, "c1", id="no accelerator is left"),
        pytest.param([cpu()], 1.1, 1_000, False, None, id="a short prompt of the highest tier"),
        pytest.param([cpu()], 1.1, 1_000, True, "c1", id="a short prompt of a lower tier"),
        pytest.param([cpu(queued_s=0.3)], 1.1, LONG, False, None, id="behind other work it is late"),
        pytest.param([cpu(queued_s=0.6)], 1.1, 1_000, True, None, id="a queue is not made longer"),
        pytest.param([cpu(), cpu("c2")], 1.1, LONG, False, "c1", id="equal: by name"),
        pytest.param([cpu(queued_s=0.1), cpu("c2")], 1.1, LONG, False, "c2", id="the one that ends first"),
    ],
)
def test_a_cpu_takes_what_accelerators_compute_too_late_and_it_in_time(
    *, instances: list[InstanceRecord], ends_at_s: float, tokens: int, lower: bool, found: str | None
) -> None:
    chosen = choose_overflow(
        instances, work(tokens), now_s=0.0, ends_at_s=ends_at_s, start_s=0.05, is_lower_tier=lower
    )
    assert (chosen and chosen.name) == found


@given(st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.integers(1, 20_000), st.floats(0.0, 0.5), st.booleans())
def test_no_prompt_that_accelerators_end_in_time_goes_to_a_cpu_nor_one_that_it_ends_late(
    ends_at_s: float, queued_s: float, tokens: int, start_s: float, lower: bool
) -> None:
    made = cpu(queued_s=queued_s)
    chosen = choose_overflow(
        [made], work(tokens), now_s=0.0, ends_at_s=ends_at_s, start_s=start_s, is_lower_tier=lower
    )
    if chosen is not None:
        assert ends_at_s + start_s > SLO.ttft_s
        assert queued_s <= CPU_QUEUE_MAX_S
        assert queued_s + CPU.ttft_s(tokens) <= IN_TIME_SHARE * (SLO.ttft_s - start_s)


@pytest.mark.parametrize(
    ("names", "lists"),
    [
        pytest.param("p d c", (["p"], ["d"], ["c"]), id="beside accelerators"),
        pytest.param("c", (["c"], [], []), id="a service of CPUs only: as any other"),
    ],
)
def test_cpu_instances_beside_accelerators_get_no_other_work(
    names: str, lists: tuple[list[str], list[str], list[str]]
) -> None:
    candidates = Candidates([cpu(name) if name == "c" else gpu(name) for name in names.split()])
    found = (candidates.prefill, candidates.decode, candidates.overflow)
    assert tuple([i.name for i in listed] for listed in found) == lists


def test_a_prompt_that_a_cpu_computes_is_decoded_by_an_accelerator() -> None:
    journey, action = start(gpu("p1", queued_s=2.0), gpu("d1"), cpu())
    assert (action, journey.prefill_instance and journey.prefill_instance.name) == (Action.SEND_PREFILL, "c1")
    assert journey.dispatch_reason is DispatchReason.OVERFLOW
    action = journey.prefill_responded(0.6, lease_from_s=0.6, has_params=True)
    assert (action, journey.decode_instance and journey.decode_instance.name) == (Action.SEND_DECODE, "d1")


def test_a_cpu_decodes_what_no_accelerator_can_fetch() -> None:
    journey, action = start(gpu("p1", queued_s=2.0), gpu("d1"), cpu(identity=OTHER_ATTENTION, role=Role.BOTH))
    assert (action, journey.decode_instance and journey.decode_instance.name) == (Action.SEND_DECODE, "c1")
    assert journey.local_prefill_reason is LocalPrefillReason.CPU_POOL
    assert journey.decode_failed(0.1, Failure.CLOSED) is Action.WAIT, "it waits with the others"


def test_a_prompt_that_accelerators_compute_in_time_stays_there() -> None:
    journey, _ = start(gpu("p1"), gpu("d1"), cpu())
    assert journey.prefill_instance is not None
    assert journey.prefill_instance.name == "p1"


def test_a_cpu_takes_no_prompt_that_decode_has_no_room_for() -> None:
    """That of 40,000 tokens takes the 50 ms of the objective."""
    journey, action = start(gpu("p1", queued_s=2.0), gpu("d1", decoding=35_000), cpu())
    assert (action, journey.prefill_instance) == (Action.WAIT, None)


def test_prompts_on_cpus_are_admitted_and_counted() -> None:
    fleet = FakeFleet([gpu("p1", queued_s=2.0), gpu("d1"), cpu()])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.admission.mode = AdmissionMode.ENFORCE
    actions = [Journey(context, work(LONG)).begin(0.0) for _ in range(2)]
    counts = context.prompts
    assert actions == [Action.SEND_PREFILL, Action.FAIL], "the second one is late everywhere"
    assert (counts.prompts, counts.tokens, counts.overflow_prompts, counts.overflow_tokens) == (
        1,
        LONG,
        1,
        LONG,
    )
