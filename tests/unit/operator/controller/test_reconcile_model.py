"""What a pass writes of a model: what was read at once, and nothing while it stays."""

from dataclasses import dataclass, replace

import pytest

from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_operator.controller.reconcile import ServiceKey, reconcile
from fulcrum_operator.plan.observed import Reading
from tests.unit.operator.builders import NOW_S
from tests.unit.operator.controller.test_reconcile import KEY, World
from tests.unit.operator.controller.test_reconcile import world as world  # a fixture
from tests.unit.operator.plan.test_model import LLAMA, VLLM, key_of


@dataclass
class Reader:
    """Somebody who reads models, and what came of it."""

    says: Reading | None = None

    def reading(self, key: ServiceKey) -> Reading | None:
        assert key == KEY
        return self.says

    def answers(self, attempt: int = 1, **fields: object) -> None:
        told = {"key": key_of(), "attempt": attempt, "born_s": NOW_S, **fields}
        self.says = Reading(**told)  # type: ignore[arg-type]  # of a test's own fields


@pytest.fixture
def reader(world: World) -> Reader:
    made = Reader()
    world.cluster = replace(world.cluster, models=made)
    return made


async def known(world: World) -> ModelStatus:
    """What the status says of the model."""
    found = (await world.service()).status.model
    assert found is not None
    return found


async def test_what_was_read_is_written_at_once_and_the_first_instances_have_it(
    world: World, reader: Reader
) -> None:
    await world.up(**VLLM)
    assert await world.instances() == {}, "they wait"
    reader.answers(facts=LLAMA)
    await world.passes()
    assert await known(world) == ModelStatus(key=key_of(), facts=LLAMA, attempts=1, at=NOW_S)
    facts = {name: i.spec.model_facts for name, i in (await world.instances()).items()}
    assert facts == {"chat-0": LLAMA, "chat-1": LLAMA}


async def test_an_hour_after_a_model_was_read_nothing_was_written(world: World, reader: Reader) -> None:
    await world.up(**VLLM)
    reader.answers(facts=LLAMA)
    await world.passes()
    reader.says = None
    world.engines.come_up()
    await world.passes()
    world.clock.at_s += 10  # counts may have waited for their turn
    await world.passes()
    before = await world.version()
    for _ in range(60):
        world.clock.at_s += 60
        await reconcile(KEY, world.cluster)
    assert await world.version() == before


async def test_a_model_that_is_away_for_an_hour_is_written_with_each_try_and_rolls_nothing(
    world: World, reader: Reader
) -> None:
    await world.up(**VLLM)
    reader.answers(error="no such file")
    await world.passes()
    world.engines.come_up()
    await world.passes()
    before, tries = await world.instances(), 1
    for _ in range(120):
        world.clock.at_s += 30
        wanted_s = await reconcile(KEY, world.cluster)
        assert wanted_s is not None
        assert wanted_s <= 600
        last = await known(world)
        if world.clock.at_s >= last.at + min(600, 60 * 2 ** (last.attempts - 1)):
            reader.answers(attempt=(tries := last.attempts + 1), error="no such file")
    assert 9 <= tries <= 10, "after 1, 2, 4 and 8 minutes, then every ten"
    reader.answers(attempt=(await known(world)).attempts + 1, facts=LLAMA)
    await world.passes()
    assert (await known(world)).facts == LLAMA
    specs = {name: i.spec for name, i in (await world.instances()).items()}
    assert specs == {name: i.spec for name, i in before.items()}
