"""Candidates: what dispatch prepares once, so that a decision looks at each instance a few times only."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from fulcrum_core.values import Role
from fulcrum_router.fleet.instances import Fleet, Instance
from fulcrum_router.policy import Candidates, Dispatch, choose_decode, choose_prefill
from fulcrum_router.policy.instance_record import InstanceRecord
from tests.unit.router.builders import DECODE, IDENTITY, OTHER_MODEL, PREFILL, instance, work


class CountedInstance(InstanceRecord):
    """Counts the reads of its attributes."""

    reads: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name: str) -> Any:
        CountedInstance.reads[name] += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("groups", [1, 2, 32], ids=lambda groups: f"{groups} identity groups")
def test_a_decision_reads_each_instance_at_most_twice_whatever_the_groups(groups: int) -> None:
    roles = (Role.PREFILL, Role.DECODE)
    fleet: list[InstanceRecord] = []
    for number in range(64):
        fleet.append(CountedInstance(f"i{number:02}", PREFILL, DECODE))
        fleet[-1].role, fleet[-1].serving = roles[number % 2], True
        fleet[-1].identity = replace(IDENTITY, model=f"m{number // 2 % groups}")
    candidates, source = Candidates(fleet), fleet[0]
    for _ in range(2):  # the first decision for a source finds its fetchers
        CountedInstance.reads.clear()
        prefill = choose_prefill(candidates, work(100), now_s=0.0)
        decode = choose_decode(candidates, work(100), now_s=0.0, prefilled_on=source)
    assert isinstance(prefill, Dispatch)
    assert isinstance(decode, Dispatch)
    reads = CountedInstance.reads
    assert (reads["serving"], reads["role"], reads["identity"]) == (0, 1, 1), "these are prepared"
    assert max(reads.values()) <= len(fleet) + 1, "each of 64 instances, and the first decode instance twice"


def test_only_a_change_of_role_serving_identity_or_members_makes_new_candidates() -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.add(Instance(name))

    one = fleet["a"]
    one.set_endpoint("127.0.0.1", 9)

    def is_renewed_by(change: Callable[[], None]) -> bool:
        before = fleet.candidates
        change()
        return fleet.candidates is not before

    assert fleet.candidates is fleet.candidates
    assert is_renewed_by(lambda: one.assign(Role.DECODE)), "it serves now"
    assert not is_renewed_by(lambda: one.assign(Role.DECODE))
    assert is_renewed_by(lambda: one.set_role(Role.PREFILL))
    assert is_renewed_by(lambda: one.set_identity(IDENTITY))
    assert not is_renewed_by(lambda: one.learn_decode(tokens=1_000, itl_s=0.1))
    assert [i.name for i in fleet.candidates.prefill] == ["a"]
    fleet.keep_only(["b"])
    assert fleet.candidates.prefill == ()


def test_an_unknown_identity_can_fetch_from_all_and_all_from_it() -> None:
    fetchers = (instance("d1", identity=None), instance("d2"), instance("d3", identity=OTHER_MODEL))
    candidates = Candidates([*fetchers, instance("p1", identity=None), instance("p2")])
    names = (
        {i.name for i in candidates.list_fetchers(None)[0]},
        {i.name for i in candidates.list_fetchers(IDENTITY)[0]},
    )
    assert names == ({"d1", "d2", "d3"}, {"d1", "d2"})
    assert [i.name for i in candidates.prefill] == ["p1", "p2"]


def test_the_time_of_a_prompt_is_that_of_all_pools_together() -> None:
    """Two instances compute 1,000 tokens/s and two 250: 625 tokens/s in the mean, so 1,000 take 1.6 s."""
    slow = replace(PREFILL, c1=4e-3)
    fleet = [instance(f"p{n}", prefill=PREFILL if n < 2 else slow) for n in range(4)]
    for number, one in enumerate(fleet):
        one.pool = "fast" if number < 2 else "slow"
    found = [Candidates(order).predict_prefill_s(1_000) for order in (fleet, fleet[::-1], fleet[:2], [])]
    assert found == pytest.approx([1.6, 1.6, 1.0, 0.0])
