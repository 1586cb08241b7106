"""No header and no guessed key gives a caller who is not trusted another tenant or tier."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_router.access.callers import CallerRefused, CallerRules
from tests.unit.router.access.caller_builders import PREMIUM_KEY, rules, settings

AUTH = {"apiKeys": {"secretName": "keys"}, "trustedProxies": ["10.0.0.0/8"]}
SETTINGS = settings(AUTH)
NAMES = st.sampled_from(
    [b"x-customer-tier", b"x-tenant-id", b"authorization", b"x-forwarded-for", b"forwarded", b"x-real-ip"]
)
DIGEST = hashlib.sha256(PREMIUM_KEY).hexdigest().encode()
VALUES = st.one_of(
    st.sampled_from([b"premium", b"acme", b"10.0.0.1", b"for=10.0.0.1", DIGEST, PREMIUM_KEY[:-1]]),
    st.binary(max_size=40),
).flatmap(lambda value: st.sampled_from([value, b"Bearer " + value, b"bearer  " + value + b"\0"]))
STRANGERS = st.ip_addresses().map(str).filter(lambda text: not text.startswith(("10.", "::ffff:a")))


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> CallerRules:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "acme").write_bytes(DIGEST)
    return rules(folder)[0]


@given(headers=st.dictionaries(NAMES, VALUES), peer=STRANGERS)
def test_no_forged_header_or_key_is_accepted(
    callers: CallerRules, headers: dict[bytes, bytes], peer: str
) -> None:
    with pytest.raises(CallerRefused):
        callers.identify(SETTINGS, headers, peer)


@given(headers=st.dictionaries(NAMES, VALUES), peer=STRANGERS)
def test_no_header_changes_what_a_key_says(
    callers: CallerRules, headers: dict[bytes, bytes], peer: str
) -> None:
    with_key = {**headers, b"authorization": b"Bearer " + PREMIUM_KEY}
    caller = callers.identify(SETTINGS, with_key, peer)
    assert (caller.tier.name, caller.tenant) == ("premium", "acme")
