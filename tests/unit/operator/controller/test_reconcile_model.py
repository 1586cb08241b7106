"""A reconcile writes a model's facts at once, and nothing while they stay the same."""

from dataclasses import dataclass, replace

import pytest

from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.reconcile import reconcile
from fulcrum_operator.plan.observed import ModelReadAttempt
from tests.unit.operator.builders import NOW_S
from tests.unit.operator.controller.test_reconcile import KEY, World
from tests.unit.operator.controller.test_reconcile import world as world  # a fixture
from tests.unit.operator.plan.test_model import LLAMA, VLLM, model_key_of


@dataclass
class FakeModelReader:
    """A `ModelReader` that returns `result`."""

    result: ModelReadAttempt | None = None

    def reading(self, key: ServiceKey) -> ModelReadAttempt | None:
        assert key == KEY
        return self.result

    def report(self, attempt: int = 1, **fields: object) -> None:
        attempt_fields = {"key": model_key_of(), "attempt": attempt, "started_s": NOW_S, **fields}
        self.result = ModelReadAttempt(**attempt_fields)  # type: ignore[arg-type]  # of a test's own fields


@pytest.fixture
def reader(world: World) -> FakeModelReader:
    fake = FakeModelReader()
    world.context = replace(world.context, models=fake)
    return fake


async def model_status(world: World) -> ModelStatus:
    """The model in the service's status."""
    found = (await world.service()).status.model
    assert found is not None
    return found


async def test_model_facts_are_written_at_once_and_given_to_the_first_instances(
    world: World, reader: FakeModelReader
) -> None:
    await world.up(**VLLM)
    assert await world.instances() == {}, "instances wait for the model's facts"
    reader.report(facts=LLAMA)
    await world.reconcile_until_stable()
    assert await model_status(world) == ModelStatus(
        key=model_key_of(), config_excerpt=LLAMA, attempts=1, at=NOW_S
    )
    facts = {name: i.spec.config_excerpt for name, i in (await world.instances()).items()}
    assert facts == {"chat-0": LLAMA, "chat-1": LLAMA}


async def test_a_known_model_causes_no_write_for_an_hour(world: World, reader: FakeModelReader) -> None:
    await world.up(**VLLM)
    reader.report(facts=LLAMA)
    await world.reconcile_until_stable()
    reader.result = None
    world.engines.become_ready()
    await world.reconcile_until_stable()
    world.clock.at_s += 10  # a status in which only counts changed is written at most every 10 s
    await world.reconcile_until_stable()
    before = await world.version()
    for _ in range(60):
        world.clock.at_s += 60
        await reconcile(KEY, world.context)
    assert await world.version() == before


async def test_an_unreadable_model_is_retried_with_backoff_and_rolls_no_instance(
    world: World, reader: FakeModelReader
) -> None:
    await world.up(**VLLM)
    reader.report(error="no such file")
    await world.reconcile_until_stable()
    world.engines.become_ready()
    await world.reconcile_until_stable()
    before, tries = await world.instances(), 1
    for _ in range(120):
        world.clock.at_s += 30
        requeue_after_s = await reconcile(KEY, world.context)
        assert requeue_after_s is not None
        assert requeue_after_s <= 600
        last = await model_status(world)
        if world.clock.at_s >= last.at + min(600, 60 * 2 ** (last.attempts - 1)):
            reader.report(attempt=(tries := last.attempts + 1), error="no such file")
    assert 9 <= tries <= 10, "after 1, 2, 4 and 8 minutes, then every ten"
    reader.report(attempt=(await model_status(world)).attempts + 1, facts=LLAMA)
    await world.reconcile_until_stable()
    assert (await model_status(world)).config_excerpt == LLAMA
    specs = {name: i.spec for name, i in (await world.instances()).items()}
    assert specs == {name: i.spec for name, i in before.items()}
