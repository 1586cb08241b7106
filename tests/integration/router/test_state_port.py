"""Who is refused at the state port: over HTTP, since a caller sends any bytes as its token."""

import pytest
from aiohttp.test_utils import TestServer

from fulcrum_cluster.clock import SystemClock
from fulcrum_core.errors import StoreUnavailable
from fulcrum_router.control.auth import Authenticator, ServiceAccountAuthenticator, SharedTokenAuthenticator
from fulcrum_router.control.state_port import make_app
from fulcrum_router.router import Router
from tests.integration.router.fake_engines import send_raw


async def _read_no_keys(path: str) -> object:
    raise StoreUnavailable(path)


AUTHENTICATORS: dict[str, Authenticator] = {
    "shared token": SharedTokenAuthenticator("secret"),
    "ServiceAccounts": ServiceAccountAuthenticator(_read_no_keys, [], clock=SystemClock()),
}


async def read_status(authenticator: Authenticator, path: str, authorization: bytes) -> int:
    """Status of the response to a request with this header."""
    lines = (b"GET %b HTTP/1.1" % path.encode(), b"host: x", b"authorization: %b" % authorization)
    request = b"\r\n".join((*lines, b"connection: close", b"", b""))
    async with TestServer(make_app(Router(), authenticator)) as server:
        assert server.port is not None
        return int((await send_raw(server.port, request)).split(b" ", 2)[1])


@pytest.mark.parametrize("path", ["/state", "/flip-requests?after=0&timeout_s=0"])
@pytest.mark.parametrize("kind", AUTHENTICATORS)
@pytest.mark.parametrize(
    "authorization", [b"Bearer s\xffcret", b"Bearer \xed\xa0\x80", b"\xff", b"Bearer secret\xff", b"Bearer "]
)
async def test_an_authorization_of_any_bytes_is_refused(kind: str, path: str, authorization: bytes) -> None:
    assert await read_status(AUTHENTICATORS[kind], path, authorization) == 401


async def test_the_shared_token_is_accepted() -> None:
    assert await read_status(AUTHENTICATORS["shared token"], "/state", b"Bearer secret") == 200
