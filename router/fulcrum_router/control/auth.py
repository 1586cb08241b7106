"""Who may read the state port: holders of a shared token (local run), or ServiceAccounts (cluster).

A cluster's callers send a token that the kubelet keeps fresh for them. It is checked here, offline, against
the API server's public keys: a state is read also while that is away, and no secret is shared or stored.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

import structlog

from fulcrum_core.errors import FulcrumError
from fulcrum_core.ports import Clock

log = structlog.get_logger()

AUDIENCE = "fulcrum.dev/router-state"
CLOCK_LEEWAY_S = 10.0
"""For clocks that differ."""
KEY_REFRESH_INTERVAL_S = 5.0
"""Keys are asked for at most so often, however many tokens name a key that nobody knows."""

_JWKS = "/openid/v1/jwks"
_DISCOVERY = "/.well-known/openid-configuration"
_ALGORITHMS = ("RS256", "ES256", "ES384", "ES512")


class Unauthorized(Exception):
    """This caller may not; the text says why."""


class Authenticator(Protocol):
    """Who may call."""

    async def authenticate(self, token: str) -> None:
        """`Unauthorized` unless the bearer of this token may call."""
        ...


class SharedTokenAuthenticator:
    """Everybody who knows one token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def authenticate(self, token: str) -> None:
        """See `Authenticator`."""
        if not hmac.compare_digest(token.encode(), self._token):
            raise Unauthorized("a bearer token is required")


class ServiceAccountAuthenticator:
    """ServiceAccounts by name, with tokens for this port's audience.

    Args:
        get_raw: Reads a path of the API server.
        subjects: `system:serviceaccount:NAMESPACE:NAME` of each that may call.
        clock: Says whether a token is over, and when keys were last asked for.
    """

    def __init__(
        self, get_raw: Callable[[str], Awaitable[Any]], subjects: Collection[str], *, clock: Clock
    ) -> None:
        self._get_raw, self._subjects, self._clock = get_raw, frozenset(subjects), clock
        self._keys: dict[str, Any] = {}
        self._issuer = ""
        self._refreshed_at_s: float | None = None
        self._refresh_lock = asyncio.Lock()

    async def authenticate(self, token: str) -> None:
        """See `Authenticator`. Keys once read stand while the API server is away."""
        claims = await self._verify_token(token)
        now_s = self._clock.now_s()
        if not _read_time_claim(claims, "exp") > now_s - CLOCK_LEEWAY_S:
            raise Unauthorized("the token is over")
        if _read_time_claim(claims, "nbf", default=0.0) > now_s + CLOCK_LEEWAY_S:
            raise Unauthorized("the token is not valid yet")
        if claims.get("sub") not in self._subjects:
            raise Unauthorized(f"{claims.get('sub')} is none of the callers")

    async def refresh_keys(self) -> None:
        """Read issuer and keys anew, unless that was done a moment ago; what is known stands if it fails."""
        async with self._refresh_lock:
            now_s = self._clock.monotonic_s()
            if self._refreshed_at_s is not None and now_s - self._refreshed_at_s < KEY_REFRESH_INTERVAL_S:
                return
            self._refreshed_at_s = now_s
            try:
                discovery, keys = await self._get_raw(_DISCOVERY), await self._get_raw(_JWKS)
                self._issuer, self._keys = _read_issuer(discovery), _read_keys(keys)
            except (FulcrumError, ValueError) as error:
                log.warning("keys of the API server not read", reason=str(error), known=len(self._keys))

    async def _verify_token(self, token: str) -> Mapping[str, Any]:
        """The claims of a token that the API server signed, for us."""
        import jwt  # 10 MB that a local run never needs

        try:
            header = jwt.get_unverified_header(token)
            name = str(header.get("kid"))
            if name not in self._keys:
                await self.refresh_keys()
            if name not in self._keys:
                raise Unauthorized("the token is signed with a key that the API server does not name")
            claims: Mapping[str, Any] = jwt.decode(
                token,
                self._keys[name],
                algorithms=_ALGORITHMS,
                audience=AUDIENCE,
                issuer=self._issuer,
                options={"require": ["exp", "sub", "aud", "iss"], "verify_exp": False, "verify_nbf": False},
            )
        except jwt.PyJWTError as error:
            raise Unauthorized(f"a ServiceAccount's token for {AUDIENCE} is required: {error}") from error
        return claims


def _read_keys(response: Any) -> dict[str, Any]:
    """Keys by their id; those of kinds that are not understood are passed over."""
    import jwt

    keys: dict[str, Any] = {}
    for entry in _read_field(response, "keys", list):
        try:
            keys[str(entry["kid"])] = jwt.PyJWK.from_dict(entry)
        except (jwt.PyJWTError, KeyError, TypeError):
            continue
    if not keys:
        raise ValueError(f"{_JWKS} names no key that can be used")
    return keys


def _read_issuer(response: Any) -> str:
    return str(_read_field(response, "issuer", str))


def _read_field(response: Any, name: str, kind: type) -> Any:
    value = response.get(name) if isinstance(response, Mapping) else None
    if not isinstance(value, kind):
        raise ValueError(f"the response has no {name}")
    return value


def _read_time_claim(claims: Mapping[str, Any], name: str, *, default: float | None = None) -> float:
    value = claims.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unauthorized(f"the token's {name} is no time")
    return float(value)
