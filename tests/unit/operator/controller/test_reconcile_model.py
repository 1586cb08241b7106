"""A reconcile writes a model's facts at once, and nothing while they stay the same."""

from dataclasses import dataclass, replace

import pytest

from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.reconcile import reconcile
from fulcrum_operator.plan.observed import ModelReadAttempt
from tests.unit.operator.builders import NOW_S
from tests.unit.operator.controller.test_reconcile import KEY, ServiceUnderTest
from tests.unit.operator.controller.test_reconcile import under_test as under_test  # a fixture
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
def reader(under_test: ServiceUnderTest) -> FakeModelReader:
    fake = FakeModelReader()
    under_test.context = replace(under_test.context, models=fake)
    return fake


async def model_status(under_test: ServiceUnderTest) -> ModelStatus:
    """The model in the service's status."""
    found = (await under_test.service()).status.model
    assert found is not None
    return found


async def test_model_facts_are_written_at_once_and_given_to_the_first_instances(
    under_test: ServiceUnderTest, reader: FakeModelReader
) -> None:
    await under_test.up(**VLLM)
    assert await under_test.instances() == {}, "instances wait for the model's facts"
    reader.report(facts=LLAMA)
    await under_test.reconcile_until_stable()
    assert await model_status(under_test) == ModelStatus(
        key=model_key_of(), config_excerpt=LLAMA, attempts=1, at=NOW_S
    )
    facts = {name: i.spec.config_excerpt for name, i in (await under_test.instances()).items()}
    assert facts == {"chat-0": LLAMA, "chat-1": LLAMA}


async def test_a_known_model_causes_no_write_for_an_hour(
    under_test: ServiceUnderTest, reader: FakeModelReader
) -> None:
    await under_test.up(**VLLM)
    reader.report(facts=LLAMA)
    await under_test.reconcile_until_stable()
    reader.result = None
    under_test.engines.become_ready()
    await under_test.reconcile_until_stable()
    under_test.clock.at_s += 10  # a status in which only counts changed is written at most every 10 s
    await under_test.reconcile_until_stable()
    before = await under_test.version()
    for _ in range(60):
        under_test.clock.at_s += 60
        await reconcile(KEY, under_test.context)
    assert await under_test.version() == before


async def test_an_unreadable_model_is_retried_with_backoff_and_rolls_no_instance(
    under_test: ServiceUnderTest, reader: FakeModelReader
) -> None:
    await under_test.up(**VLLM)
    reader.report(error="no such file")
    await under_test.reconcile_until_stable()
    under_test.engines.become_ready()
    await under_test.reconcile_until_stable()
    before, tries = await under_test.instances(), 1
    for _ in range(120):
        under_test.clock.at_s += 30
        requeue_after_s = await reconcile(KEY, under_test.context)
        assert requeue_after_s is not None
        assert requeue_after_s <= 600
        last = await model_status(under_test)
        if under_test.clock.at_s >= last.at + min(600, 60 * 2 ** (last.attempts - 1)):
            reader.report(attempt=(tries := last.attempts + 1), error="no such file")
    assert 9 <= tries <= 10, "after 1, 2, 4 and 8 minutes, then every ten"
    reader.report(attempt=(await model_status(under_test)).attempts + 1, facts=LLAMA)
    await under_test.reconcile_until_stable()
    assert (await model_status(under_test)).config_excerpt == LLAMA
    specs = {name: i.spec for name, i in (await under_test.instances()).items()}
    assert specs == {name: i.spec for name, i in before.items()}
