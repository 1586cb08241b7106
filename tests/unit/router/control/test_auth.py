"""Authentication at the state port, with ServiceAccount tokens signed by keys of this module."""

import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from fulcrum_core.errors import StoreUnavailable
from fulcrum_core.router_state import STATE_PORT_AUDIENCE
from fulcrum_router.control.auth import (
    CLOCK_LEEWAY_S,
    KEY_MAX_AGE_S,
    KEY_REFRESH_INTERVAL_S,
    ServiceAccountAuthenticator,
    SharedTokenAuthenticator,
    Unauthorized,
)
from fulcrum_router.control.background_task import background_task
from tests.clocks import LoopClock, ManualClock
from tests.waiting import advance

ISSUER = "https://kubernetes.default.svc"
OPERATOR = "system:serviceaccount:fulcrum:operator"
NOW_S = 1_800_000_000.0
RSA = {name: rsa.generate_private_key(public_exponent=65537, key_size=2048) for name in ("one", "two")}
EC = ec.generate_private_key(ec.SECP256R1())


class FakeApiServer:
    """The paths of an API server that hold its issuer and keys."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.unavailable = False
        self.key_reads = 0

    async def get_raw(self, path: str) -> Any:
        if self.unavailable:
            raise StoreUnavailable("unavailable")
        if path == "/.well-known/openid-configuration":
            return {"issuer": ISSUER}
        assert path == "/openid/v1/jwks"
        self.key_reads += 1
        return {"keys": [_jwk(name) for name in self.names]}


def _jwk(name: str) -> dict[str, Any]:
    if name == "ec":
        return {**json.loads(ECAlgorithm.to_jwk(EC.public_key())), "kid": name, "alg": "ES256"}
    return {**json.loads(RSAAlgorithm.to_jwk(RSA[name].public_key())), "kid": name, "alg": "RS256"}


def token(key: str = "one", *, kid: str | None = None, algorithm: str = "RS256", **changes: Any) -> str:
    claims = {
        "iss": ISSUER,
        "aud": [STATE_PORT_AUDIENCE],
        "sub": OPERATOR,
        "exp": NOW_S + 600,
        "nbf": NOW_S - 1,
        **changes,
    }
    signing: Any = EC if key == "ec" else RSA[key]
    kept = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(kept, signing, algorithm=algorithm, headers={"kid": kid or key})


def make_authenticator(server: FakeApiServer, clock: ManualClock) -> ServiceAccountAuthenticator:
    return ServiceAccountAuthenticator(server.get_raw, [OPERATOR], clock=clock)


async def try_authenticate(authenticator: ServiceAccountAuthenticator, given: str) -> str:
    """Return "accepted" or the reason of the refusal."""
    try:
        await authenticator.authenticate(given)
    except Unauthorized as error:
        return str(error)
    return "accepted"


async def test_a_valid_token_is_accepted_and_keys_are_read_once() -> None:
    server = FakeApiServer("one", "ec")
    authenticator = make_authenticator(server, ManualClock(NOW_S))
    given = [token(), token("ec", algorithm="ES256"), token()]
    assert [await try_authenticate(authenticator, one) for one in given] == ["accepted"] * 3
    assert server.key_reads == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        pytest.param(
            token(sub="system:serviceaccount:fulcrum:other"),
            "may not call the state port",
            id="another account",
        ),
        pytest.param(token(aud=["https://kubernetes.default.svc"]), "Audience", id="another audience"),
        pytest.param(token(iss="https://elsewhere"), "issuer", id="another cluster"),
        pytest.param(token(exp=NOW_S - CLOCK_LEEWAY_S - 1), "the token has expired", id="expired"),
        pytest.param(token(nbf=NOW_S + CLOCK_LEEWAY_S + 1), "is not valid yet", id="not valid yet"),
        pytest.param(token(exp=None), "exp", id="without an expiry"),
        pytest.param(token(sub=None), "sub", id="without a subject"),
        pytest.param(token("two", kid="one"), "ignature", id="signed with another key than it names"),
        pytest.param(
            token("two"), "a key that the API server does not list", id="signed with an unknown key"
        ),
        pytest.param("", "a ServiceAccount token", id="empty"),
        pytest.param("a.b.c", "a ServiceAccount token", id="not a token"),
        pytest.param(
            jwt.encode(
                {"sub": OPERATOR, "aud": STATE_PORT_AUDIENCE},
                key="",
                algorithm="none",
                headers={"kid": "one"},
            ),
            "a ServiceAccount token",
            id="not signed",
        ),
        pytest.param(
            jwt.encode({"sub": OPERATOR}, key="x" * 64, algorithm="HS256", headers={"kid": "one"}),
            "a ServiceAccount token",
            id="signed with a shared secret",
        ),
    ],
)
async def test_an_invalid_token_is_refused_with_its_reason(given: str, reason: str) -> None:
    assert reason in await try_authenticate(
        make_authenticator(FakeApiServer("one"), ManualClock(NOW_S)), given
    )


@pytest.mark.looptime
async def test_a_key_that_the_api_server_withdrew_is_refused_after_a_minute() -> None:
    server = FakeApiServer("one", "two")
    authenticator = ServiceAccountAuthenticator(server.get_raw, [OPERATOR], clock=LoopClock(NOW_S))
    async with background_task(authenticator.keep_keys_fresh, name="keys", failures={}):
        await advance(1.0)
        server.names = ("two",)
        assert await try_authenticate(authenticator, token()) == "accepted"
        await advance(KEY_MAX_AGE_S)
        assert "does not list" in await try_authenticate(authenticator, token())
        assert await try_authenticate(authenticator, token("two")) == "accepted"


async def test_a_token_that_is_not_ascii_is_refused() -> None:
    refused = await try_authenticate(make_authenticator(FakeApiServer("one"), ManualClock(NOW_S)), "\udcff")
    assert refused == "the bearer token is not a JSON Web Token"


async def test_known_keys_stay_valid_during_an_api_server_outage() -> None:
    server, clock = FakeApiServer("one"), ManualClock(NOW_S)
    authenticator = make_authenticator(server, clock)
    await authenticator.refresh_keys()
    server.unavailable = True
    clock.at_s += 3 * KEY_REFRESH_INTERVAL_S
    assert await try_authenticate(authenticator, token()) == "accepted"
    assert "does not list" in await try_authenticate(authenticator, token("two"))
    assert await try_authenticate(authenticator, token()) == "accepted"


async def test_a_new_key_is_found_and_unknown_keys_cause_at_most_one_read_per_interval() -> None:
    server, clock = FakeApiServer("one"), ManualClock(NOW_S)
    authenticator = make_authenticator(server, clock)
    assert await try_authenticate(authenticator, token()) == "accepted"
    server.names = ("two",)
    for _ in range(10):
        assert "does not list" in await try_authenticate(authenticator, token("two"))
    assert server.key_reads == 1
    clock.at_s += KEY_REFRESH_INTERVAL_S
    assert await try_authenticate(authenticator, token("two")) == "accepted"
    assert "does not list" in await try_authenticate(authenticator, token()), "a key that was withdrawn"
    assert server.key_reads == 2


@pytest.mark.parametrize(
    ("given", "accepted"),
    [("secret", True), ("secre", False), ("", False), ("sécret", False), ("s\udcffcret", False)],
)
async def test_only_the_exact_shared_token_is_accepted(given: str, accepted: bool) -> None:
    try:
        await SharedTokenAuthenticator("secret").authenticate(given)
    except Unauthorized:
        assert not accepted
    else:
        assert accepted


def test_the_tokens_of_this_module_are_expired_by_the_real_clock() -> None:
    assert abs(time.time() - NOW_S) > CLOCK_LEEWAY_S, "the injected clock decides, not the machine's"
