"""Callers of a router over HTTP: API keys, trusted proxies, and headers that are dropped."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fulcrum_core.networks import parse_network
from fulcrum_router.access import api_keys as api_keys_module
from fulcrum_router.access.api_keys import ApiKeys
from fulcrum_router.settings import AccessSettings, ServiceSettings
from tests.integration.router.fake_engines import (
    DEADLINE_S,
    FakeEngine,
    RunningRouter,
    build_post,
    run_router,
    settings_with_short_timeouts,
)
from tests.waiting import wait_until

BODY = b'{"model": "m", "prompt": "hello"}'
KEY = "authorization: Bearer premium-key"
LOCAL = parse_network("127.0.0.0/8")


def settings(*, requires_key: bool = False, proxies: tuple[Any, ...] = ()) -> ServiceSettings:
    plain = settings_with_short_timeouts()
    access = AccessSettings(requires_key=requires_key, trusted_networks=proxies)
    return replace(plain, access=access, tiers_by_tenant={"acme": plain.tiers["premium"]})


def write_key(folder: Path, key: bytes = b"premium-key") -> None:
    (folder / "acme").write_text(hashlib.sha256(key).hexdigest())


def set_keys(world: RunningRouter, folder: Path) -> ApiKeys:
    keys = world.router.callers.api_keys = ApiKeys(folder)
    keys.read()
    return keys


async def send(
    world: RunningRouter, *lines: str, path: str = "/v1/completions"
) -> tuple[int, dict[str, str]]:
    """Status and headers of the response to one request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
    writer.write(build_post(BODY, *lines, path=path))
    async with asyncio.timeout(DEADLINE_S):
        line, *lines_read = (await reader.readuntil(b"\r\n\r\n")).decode()[:-4].split("\r\n")
    writer.close()
    return int(line.split()[1]), dict(line.split(": ", 1) for line in lines_read)


async def test_a_request_needs_a_valid_key_and_gets_its_tenants_tier(tmp_path: Path) -> None:
    write_key(tmp_path)
    async with run_router(FakeEngine("p1"), FakeEngine("d1"), settings=settings(requires_key=True)) as world:
        set_keys(world, tmp_path)
        refused = [
            await send(world, *lines, path=path)
            for lines, path in (
                ((), "/v1/completions"),
                (("authorization: Bearer guess",), "/v1/completions"),
                ((), "/v1/embeddings"),
            )
        ]
        served, _ = await send(world, KEY, "x-customer-tier: default")
        assert ([(status, headers["www-authenticate"]) for status, headers in refused], served) == (
            [(401, "Bearer")] * 3,
            200,
        )
        assert {n: t.offered for n, t in world.router.counters.tiers.items()} == {"premium": 1}
        assert [len(e.requests) for e in world.engines.values()] == [1, 1]
        await wait_until(world.ledgers_are_empty, "the request has ended")
        counted = world.router.counters.tenants.list_counts(0.0)
        assert [(tenant, result) for tenant, result, count in counted if count] == [("acme", "met")]


async def test_engines_never_see_a_key(tmp_path: Path) -> None:
    write_key(tmp_path)
    async with run_router(FakeEngine("p1"), FakeEngine("d1"), settings=settings(requires_key=True)) as world:
        set_keys(world, tmp_path)
        await send(world, KEY, "x-tenant-id: other")
        seen = {name for e in world.engines.values() for r in e.requests for name in r.headers}
        assert not seen & {"authorization", "x-tenant-id", "x-customer-tier"}


@pytest.mark.parametrize(
    ("proxies", "expected"),
    [((), ("default", "default; ignored=untrusted", 1)), ((LOCAL,), ("premium", None, 0))],
    ids=["a stranger", "a trusted proxy"],
)
async def test_headers_count_only_from_a_trusted_proxy(
    proxies: tuple[Any, ...], expected: tuple[str, str | None, int]
) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1"), settings=settings(proxies=proxies)) as world:
        _, headers = await send(world, "x-customer-tier: premium")
        counters = world.router.counters
        (tier,) = counters.tiers
        assert (tier, headers.get("x-fulcrum-tier"), counters.dropped_headers["x-customer-tier"]) == expected


@pytest.mark.parametrize("name", ["x-customer-tier", "x-tenant-id", "authorization"])
async def test_a_repeated_identity_is_refused(name: str) -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        assert (await send(world, f"{name}: a", f"{name}: b"))[0] == 400


async def test_a_misspelt_tier_is_told_in_the_response() -> None:
    async with run_router(FakeEngine("p1"), FakeEngine("d1")) as world:
        status, headers = await send(world, "x-customer-tier: premum")
        assert (status, headers["x-fulcrum-tier"]) == (200, "default; ignored=unknown")


async def test_a_revoked_key_is_refused_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys_module, "RELOAD_INTERVAL_S", 0.01)
    write_key(tmp_path)
    async with run_router(FakeEngine("p1"), FakeEngine("d1"), settings=settings(requires_key=True)) as world:
        keys = set_keys(world, tmp_path)
        watch = asyncio.create_task(keys.keep_fresh())
        before, _ = await send(world, KEY)
        write_key(tmp_path, b"another")
        await wait_until(lambda: keys.find(b"another") is not None, "the new key is known")
        after, _ = await send(world, KEY)
        watch.cancel()
        assert (before, after) == (200, 401)
