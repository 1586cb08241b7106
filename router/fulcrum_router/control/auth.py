"""Authenticate the callers of the state port: by a shared token (local run) or as ServiceAccounts (cluster).

In a cluster, callers send a ServiceAccount token that the kubelet renews. It is verified here with public
keys of the API server that are read in advance, every `KEY_MAX_AGE_S`, and when a token names an unknown key.
So the state can be read while the API server is unreachable, and no secret is shared or stored. `state_port`
asks for every request; clients of the service are identified in `access`.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

import structlog

from fulcrum_core.errors import FulcrumError
from fulcrum_core.ports import Clock
from fulcrum_core.router_state import STATE_PORT_AUDIENCE

log = structlog.get_logger()

CLOCK_LEEWAY_S = 10.0
"""Difference between the clocks of two machines that is tolerated in a token's times, in seconds."""
KEY_REFRESH_INTERVAL_S = 5.0
"""Shortest time between two reads of the keys, however many tokens name an unknown key, in seconds."""
KEY_MAX_AGE_S = 60.0
"""Seconds after which the keys are read again. A withdrawn key is accepted until then, or until the API
server responds again."""

_JWKS = "/openid/v1/jwks"
_DISCOVERY = "/.well-known/openid-configuration"
_ALGORITHMS = ("RS256", "ES256", "ES384", "ES512")


class Unauthorized(Exception):
    """The caller may not call the state port; the text is the reason."""


class Authenticator(Protocol):
    """Decides who may call the state port."""

    async def authenticate(self, token: str) -> None:
        """Accept the bearer of `token`.

        Raises:
            Unauthorized: if the bearer may not call the state port.
        """
        ...


class SharedTokenAuthenticator:
    """Accepts every caller that sends one given token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def authenticate(self, token: str) -> None:
        """See `Authenticator`."""
        if not hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token):
            raise Unauthorized("a bearer token is required")


class ServiceAccountAuthenticator:
    """Accepts ServiceAccounts by name, with tokens for the audience of the state port.

    Args:
        get_raw: Reads a path of the API server.
        subjects: `system:serviceaccount:NAMESPACE:NAME` of each account that may call.
        clock: Time for the expiry of tokens and the interval of key reads.
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
        """See `Authenticator`. The keys last read are used while the API server is unreachable."""
        claims = await self._verify_token(token)
        now_s = self._clock.now_s()
        if not _read_time_claim(claims, "exp") > now_s - CLOCK_LEEWAY_S:
            raise Unauthorized("the token has expired")
        if _read_time_claim(claims, "nbf", default=0.0) > now_s + CLOCK_LEEWAY_S:
            raise Unauthorized("the token is not valid yet")
        if claims.get("sub") not in self._subjects:
            raise Unauthorized(f"{claims.get('sub')} may not call the state port")

    async def keep_keys_fresh(self) -> None:
        """Read the keys again and again, until cancelled."""
        while True:
            await self.refresh_keys()
            await asyncio.sleep(KEY_MAX_AGE_S)

    async def refresh_keys(self) -> None:
        """Read issuer and keys, unless they were read just now; if that fails, the known ones stay in use."""
        async with self._refresh_lock:
            now_s = self._clock.monotonic_s()
            if self._refreshed_at_s is not None and now_s - self._refreshed_at_s < KEY_REFRESH_INTERVAL_S:
                return
            self._refreshed_at_s = now_s
            try:
                discovery, keys = await self._get_raw(_DISCOVERY), await self._get_raw(_JWKS)
                self._issuer, self._keys = _read_issuer(discovery), _read_keys(keys)
            except (FulcrumError, ValueError) as error:
                log.warning(
                    "cannot read the API server's keys; using those read before",
                    reason=str(error),
                    known=len(self._keys),
                )

    async def _verify_token(self, token: str) -> Mapping[str, Any]:
        """Return the claims of a token that the API server signed for the state port's audience."""
        import jwt  # 10 MB that a local run never needs

        if not token.isascii():
            raise Unauthorized("the bearer token is not a JSON Web Token")
        try:
            header = jwt.get_unverified_header(token)
            name = str(header.get("kid"))
            if name not in self._keys:
                await self.refresh_keys()
            if name not in self._keys:
                raise Unauthorized("the token is signed with a key that the API server does not list")
            claims: Mapping[str, Any] = jwt.decode(
                token,
                self._keys[name],
                algorithms=_ALGORITHMS,
                audience=STATE_PORT_AUDIENCE,
                issuer=self._issuer,
                options={"require": ["exp", "sub", "aud", "iss"], "verify_exp": False, "verify_nbf": False},
            )
        except jwt.PyJWTError as error:
            raise Unauthorized(
                f"a ServiceAccount token for {STATE_PORT_AUDIENCE} is required: {error}"
            ) from error
        return claims


def _read_keys(response: Any) -> dict[str, Any]:
    """Keys by id, without those of unknown types."""
    import jwt

    keys: dict[str, Any] = {}
    for entry in _read_field(response, "keys", list):
        try:
            keys[str(entry["kid"])] = jwt.PyJWK.from_dict(entry)
        except (jwt.PyJWTError, KeyError, TypeError):
            continue
    if not keys:
        raise ValueError(f"{_JWKS} lists no usable key")
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
        raise Unauthorized(f"the token's {name} is not a time")
    return float(value)
