"""A reconcile writes a changed KVTransferVerified condition at once, and nothing while it stays the same."""

from typing import Any

import pytest

from fulcrum_core.api import PDService
from fulcrum_core.router_state import PairState, RouterState
from fulcrum_operator.controller.reconcile import reconcile
from tests.unit.operator.builders import router
from tests.unit.operator.controller.test_reconcile import KEY, ServiceUnderTest
from tests.unit.operator.controller.test_reconcile import under_test as under_test  # a fixture


def state_with_reason(reason: str, count: int = 1) -> RouterState:
    pair = PairState(
        prefill="chat-0",
        decode="chat-1",
        verified=count,
        recomputed=count,
        unknown=0,
        verified_age_s=float(count),
        handshake_s=0.1,
        transfer_s_per_1k_tokens=0.01 * count,
        last_reason=reason,
    )
    return router().model_copy(update={"pairs": (pair,)})


async def verdict(under_test: ServiceUnderTest) -> tuple[str, str]:
    service: Any = await under_test.store.get(PDService, KEY.name, namespace=KEY.namespace)
    return next((c.status, c.reason) for c in service.status.conditions if c.type == "KVTransferVerified")


async def test_an_hour_of_verified_kv_transfers_is_written_once(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=4)
    under_test.clock.at_s += 10
    under_test.router.state = state_with_reason("Verified")
    await under_test.reconcile_until_stable()
    found, before = await verdict(under_test), await under_test.version()
    for number in range(60):
        under_test.clock.at_s += 60
        under_test.router.state = state_with_reason("Verified", count=number)
        assert await reconcile(KEY, under_test.context) == pytest.approx(10.0)
    assert (found, await under_test.version()) == (("True", "Verified"), before)


async def test_a_changed_kv_transfer_condition_is_written_at_once(under_test: ServiceUnderTest) -> None:
    await under_test.up(instances=4)
    written = []
    for reason in ("Verified", "HandshakeFailed", "Verified"):
        under_test.clock.at_s += 10
        under_test.router.state = state_with_reason(reason)
        await under_test.reconcile_until_stable()
        written.append(await verdict(under_test))
    assert written == [("True", "Verified"), ("False", "HandshakeFailed"), ("True", "Verified")]
