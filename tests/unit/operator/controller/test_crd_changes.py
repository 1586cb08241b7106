"""Upgraded CRDs are noticed within seconds, by small requests and only while fields are missing."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from fulcrum_core.api import PDPool
from fulcrum_core.errors import InvalidInput, StoreUnavailable
from fulcrum_operator.controller.crd_changes import CHECK_INTERVAL_S, CrdChanges
from fulcrum_operator.controller.missing_fields import MissingFields
from tests.waiting import advance

pytestmark = pytest.mark.looptime

GROUP = "apis/fulcrum.dev/v1alpha1"
WRITTEN = {"spec": {"a": 1}}


@dataclass
class OperatorOnCrds:
    """An operator that writes one field of pools at each reconcile, on CRDs of a schema that can change."""

    has_field: bool = False
    schema: str = "1"
    available: bool = True
    requests: int = 0
    reconciles: int = 0
    writes: bool = True
    fields: MissingFields = field(default_factory=MissingFields)

    async def get_raw(self, path: str) -> Any:
        assert path == "/openapi/v3"
        self.requests += 1
        if not self.available:
            raise StoreUnavailable("away")
        return json.dumps(
            {"paths": {GROUP: {"serverRelativeURL": f"/openapi/v3/{GROUP}?hash={self.schema}"}}}
        )

    def reconcile_all(self) -> None:
        self.reconciles += 1
        if not self.writes or self.fields.prune(PDPool, WRITTEN) != WRITTEN:
            return
        if self.has_field:
            self.fields.note_accepted(PDPool, WRITTEN)
        else:
            self.fields.note(PDPool, InvalidInput("spec.a", "x", "is not a field"))

    def start(self) -> "asyncio.Task[None]":
        changes = CrdChanges(self.fields, self, self.reconcile_all)
        return asyncio.get_running_loop().create_task(changes.run())


async def test_nothing_is_requested_while_no_field_is_missing() -> None:
    operator = OperatorOnCrds(has_field=True)
    running = operator.start()
    await advance(100 * CHECK_INTERVAL_S)
    running.cancel()
    assert (operator.requests, operator.reconciles) == (0, 0)


async def test_unchanged_crds_cost_a_request_at_a_time_and_no_reconciles_after_the_first() -> None:
    operator = OperatorOnCrds()
    operator.reconcile_all()
    running = operator.start()
    await advance(3.5 * CHECK_INTERVAL_S)
    first, causes = operator.reconciles, operator.fields.causes()
    assert causes
    await advance(100 * CHECK_INTERVAL_S)
    running.cancel()
    assert (operator.reconciles, operator.requests) == (first, 103)
    assert operator.fields.causes() == causes


async def test_upgraded_crds_end_the_cause_and_services_are_reconciled_once_more() -> None:
    operator = OperatorOnCrds()
    operator.reconcile_all()
    running = operator.start()
    await advance(10.5 * CHECK_INTERVAL_S)
    operator.has_field, operator.schema = True, "2"
    reconciles = operator.reconciles
    await advance(2 * CHECK_INTERVAL_S)
    running.cancel()
    assert (operator.fields.causes(), operator.reconciles) == ((), reconciles + 2)


async def test_an_api_server_that_publishes_its_schema_before_it_uses_it_is_tried_twice() -> None:
    operator = OperatorOnCrds()
    operator.reconcile_all()
    running = operator.start()
    await advance(10.5 * CHECK_INTERVAL_S)
    operator.schema = "2"
    await advance(CHECK_INTERVAL_S)
    assert operator.fields.causes()
    operator.has_field = True
    await advance(CHECK_INTERVAL_S)
    running.cancel()
    assert operator.fields.causes() == ()


async def test_crds_that_are_upgraded_while_the_api_server_is_away_are_noticed_afterwards() -> None:
    operator = OperatorOnCrds()
    operator.reconcile_all()
    running = operator.start()
    await advance(10.5 * CHECK_INTERVAL_S)
    operator.available = False
    await advance(2 * CHECK_INTERVAL_S)
    operator.available, operator.has_field, operator.schema = True, True, "2"
    await advance(CHECK_INTERVAL_S)
    running.cancel()
    assert operator.fields.causes() == ()


async def test_a_field_that_is_not_written_now_is_named_until_the_crds_are_upgraded() -> None:
    operator = OperatorOnCrds()
    operator.reconcile_all()
    operator.writes = False
    running = operator.start()
    await advance(100.5 * CHECK_INTERVAL_S)
    assert operator.fields.causes()
    operator.schema = "2"
    await advance(2 * CHECK_INTERVAL_S)
    running.cancel()
    assert operator.fields.causes() == ()
