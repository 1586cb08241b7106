"""Tenant and tier of a request: by key, by trusted headers, or neither."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fulcrum_router.access.callers import CallerRefused
from tests.unit.router.access.caller_builders import BATCH_KEY, PREMIUM_KEY, rules, settings

KEYS = {"apiKeys": {"secretName": "keys"}}
PROXIES = {"trustedProxies": ["10.0.0.0/8", "fd00::/8"]}
PROXY, STRANGER = "10.1.2.3", "11.0.0.1"
UNTRUSTED = b"x-fulcrum-tier: %b; ignored=untrusted\r\n"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    lines = ((PREMIUM_KEY, "main"), (BATCH_KEY, "batch"))
    content = "\n".join(f"{hashlib.sha256(key).hexdigest()} {name}" for key, name in lines)
    (tmp_path / "acme").write_text(content)
    return tmp_path


def bearer(key: bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key}


TIER, TENANT = b"x-customer-tier", b"x-tenant-id"
CASES: list[tuple[str, dict[str, Any] | None, dict[bytes, bytes], str, tuple[str, str, bytes]]] = [
    ("nobody asks", None, {}, STRANGER, ("default", "", b"")),
    ("an open door trusts the tier", None, {TIER: b"free"}, STRANGER, ("free", "", b"")),
    ("an open door trusts the tenant", None, {TENANT: b"globex"}, STRANGER, ("standard", "globex", b"")),
    (
        "of two tiers of a tenant the first counts",
        None,
        {TENANT: b"acme"},
        STRANGER,
        ("premium", "acme", b""),
    ),
    (
        "a misspelt tier is reported",
        None,
        {TIER: b"premum", TENANT: b"globex"},
        STRANGER,
        ("standard", "globex", b"x-fulcrum-tier: standard; ignored=unknown\r\n"),
    ),
    ("a proxy names the tenant", PROXIES, {TENANT: b"acme"}, PROXY, ("premium", "acme", b"")),
    ("a proxy's tier precedes", PROXIES, {TENANT: b"acme", TIER: b"free"}, PROXY, ("free", "acme", b"")),
    ("an IPv6 proxy", PROXIES, {TIER: b"free"}, "fd00::1", ("free", "", b"")),
    ("a proxy on a dual-stack socket", PROXIES, {TIER: b"free"}, "::ffff:10.0.0.1", ("free", "", b"")),
    (
        "a stranger's headers",
        PROXIES,
        {TIER: b"free", TENANT: b"a"},
        STRANGER,
        ("default", "", UNTRUSTED % b"default"),
    ),
    ("a stranger without headers", PROXIES, {}, STRANGER, ("default", "", b"")),
    ("a key's tenant", KEYS, bearer(PREMIUM_KEY), STRANGER, ("premium", "acme", b"")),
    ("a key's own tier precedes its tenant's", KEYS, bearer(BATCH_KEY), STRANGER, ("free", "acme", b"")),
    (
        "a key and a forged tier",
        KEYS,
        {**bearer(BATCH_KEY), TIER: b"premium"},
        STRANGER,
        ("free", "acme", UNTRUSTED % b"free"),
    ),
    ("a proxy needs no key", KEYS | PROXIES, {TENANT: b"globex"}, PROXY, ("standard", "globex", b"")),
    (
        "a proxy that names nobody sends a key",
        KEYS | PROXIES,
        bearer(BATCH_KEY),
        PROXY,
        ("free", "acme", b""),
    ),
]


@pytest.mark.parametrize(
    ("auth", "headers", "peer", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_tenant_and_tier_are_found(
    secret: Path,
    auth: dict[str, Any] | None,
    headers: dict[bytes, bytes],
    peer: str,
    expected: tuple[str, str, bytes],
) -> None:
    caller = rules(secret)[0].identify(settings(auth), headers, peer)
    assert (caller.tier.name, caller.tenant, caller.header_lines) == expected


@pytest.mark.parametrize(
    ("auth", "headers", "peer", "expected"),
    [
        pytest.param(KEYS, {}, STRANGER, (401, {"missing": 1}), id="no key"),
        pytest.param(KEYS, bearer(b"guess"), STRANGER, (401, {"unknown": 1}), id="a guess"),
        pytest.param(
            KEYS, {b"authorization": b"Basic " + PREMIUM_KEY}, STRANGER, (401, {"unknown": 1}), id="Basic"
        ),
        pytest.param(KEYS | PROXIES, {}, PROXY, (401, {"missing": 1}), id="a proxy that names nobody"),
        pytest.param(
            KEYS | PROXIES, {TENANT: b""}, PROXY, (401, {"missing": 1}), id="a proxy without a tenant"
        ),
        pytest.param(PROXIES, {TENANT: b"a" * 254}, PROXY, (400, {}), id="a tenant too long"),
    ],
)
def test_callers_are_refused(
    secret: Path,
    auth: dict[str, Any],
    headers: dict[bytes, bytes],
    peer: str,
    expected: tuple[int, dict[str, int]],
) -> None:
    callers, counters = rules(secret)
    with pytest.raises(CallerRefused) as refused:
        callers.identify(settings(auth), headers, peer)
    assert (refused.value.status, counters.refused_callers) == expected


def test_dropped_headers_are_counted_by_name(secret: Path) -> None:
    callers, counters = rules(secret)
    for headers in ({TIER: b"free"}, {TIER: b"x", TENANT: b"y"}):
        callers.identify(settings(PROXIES), headers, STRANGER)
    assert counters.dropped_headers == {"x-customer-tier": 2, "x-tenant-id": 1}


FORGERIES = 10_000


def forge(rng: random.Random) -> Iterator[tuple[dict[bytes, bytes], str]]:
    """Headers and addresses that look like those of a trusted caller, and are not."""
    for _ in range(FORGERIES):
        key = bytearray(rng.choice((PREMIUM_KEY, BATCH_KEY)))
        place = rng.randrange(len(key))
        key[place] = (key[place] + rng.randrange(1, 256)) % 256
        real = rng.choice((PREMIUM_KEY, BATCH_KEY))
        presented = rng.choice(
            (bytes(key), real[:-1], real + b"0", real.upper(), hashlib.sha256(real).hexdigest().encode(), b"")
        )
        scheme = rng.choice((b"Bearer ", b"bearer ", b"Bearer  "))
        sent = rng.choice((scheme + presented, b"Basic " + real, b"Bearer" + real, real))
        headers = {
            b"authorization": sent,
            TIER: rng.choice((b"premium", b"free", b" premium", b"premium,free", b"\xff")),
            TENANT: rng.choice((b"acme", b"globex", b"acme ", b"ACME", b"a" * 300)),
            b"x-forwarded-for": b"10.1.2.3",
        }
        peer = rng.choice(
            ("11.0.0.1", "9.255.255.255", "::ffff:11.0.0.1", "fe80::1", "::1", "", "10.0.0.1.x")
        )
        yield headers, peer


def test_no_forged_header_or_key_is_accepted(secret: Path) -> None:
    callers, _ = rules(secret)
    keys, proxies = settings(KEYS | PROXIES), settings(PROXIES)
    accepted = 0
    for headers, peer in forge(random.Random(1)):
        with pytest.raises(CallerRefused):
            callers.identify(keys, headers, peer)
        caller = callers.identify(proxies, headers, peer)
        accepted += (caller.tier.name, caller.tenant) != ("default", "")
    assert accepted == 0
