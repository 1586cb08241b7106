"""Decides who may call the live page's server. Pure.

Pages of other sites in the user's browser, and other users of this machine, can send requests to the server.
Three checks refuse them:

* Host must be a loopback name. Another name means DNS rebinding, in which a foreign page's name resolves to
  127.0.0.1. Any port is allowed, so that a port forwarded by ssh works.
* Origin and Sec-Fetch-Site, which browsers set, must name this page; they may be missing.
* The token is a secret that other users of this machine do not know. It is in the address after `#`, which
  browsers do not send to servers.

`server` asks before each response.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names under which a browser may call the server."""
_OWN_SITES = frozenset({"same-origin", "none"})

PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response: the page loads nothing from elsewhere, and no other page may show or read it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is refused, with its HTTP status."""

    status: int
    reason: str


def check_host(headers: Mapping[str, str]) -> Refused | None:
    """Refuse a request whose Host is not a name of this machine; None: it is allowed."""
    try:
        name = urlsplit(f"//{headers.get('Host', '')}").hostname
    except ValueError:
        name = None
    if name not in LOOPBACK_NAMES:
        return Refused(421, "the Host header is not a name of this machine")
    return None


def check_call(headers: Mapping[str, str], *, token: str) -> Refused | None:
    """Refuse a request to `/api/` unless its Host, its origin and its token are right; None: they are."""
    if refused := check_host(headers):
        return refused
    origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
    if origin is not None and origin != f"http://{headers.get('Host', '')}":
        return Refused(403, "the call comes from a page of another origin")
    if site is not None and site not in _OWN_SITES:
        return Refused(403, "the call comes from a page of another site")
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    given_bytes = given.encode(errors="surrogateescape")  # bytes that are not UTF-8 were read so
    if scheme.lower() != "bearer" or not secrets.compare_digest(given_bytes, token.encode()):
        return Refused(401, "the token is missing or wrong; open the address that the command printed")
    return None
