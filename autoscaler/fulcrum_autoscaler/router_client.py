"""The router's state port, as the autoscaler reads it.

Every way in which a router may not answer (gone, slow, refusing the token, speaking nonsense) is one error:
the autoscaler can do nothing about any of them but hold.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Protocol, TypeVar

import httpx
from pydantic import ValidationError

from fulcrum_core.router_state import FlipRequest, RouterState

M = TypeVar("M", RouterState, FlipRequest)

_RESPONSE_MARGIN_S = 1.0
"""How much longer than asked for the router may take before it counts as gone."""


class RouterUnavailable(Exception):
    """The router did not answer, or with what is no answer."""


class RouterClient(Protocol):
    """What the loop needs of a router."""

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        """Its state once it has applied the generation, or after `timeout_s` what it has; or
        `RouterUnavailable`."""
        ...

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        """The first flip wanted after number `after`; None if none came in `timeout_s`; or
        `RouterUnavailable`."""
        ...


class TokenFileAuth(httpx.Auth):
    """A bearer token that somebody keeps fresh in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send what stands in the file now; a token that cannot be read is a router that does not answer."""
        try:
            token = self.path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise httpx.RequestError(f"{self.path} cannot be read: {error.strerror}") from error
        request.headers["authorization"] = f"Bearer {token}"
        yield request


class HttpRouterClient:
    """A router's state port over HTTP. `url` is where it is, if the client has no base address."""

    def __init__(self, client: httpx.AsyncClient, url: str = "") -> None:
        self._client, self._url = client, url.rstrip("/")

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        """See `RouterClient`."""
        response = await self._get("/state", {"min_generation": min_generation}, timeout_s)
        return _parse_response(RouterState, response)

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        """See `RouterClient`."""
        response = await self._get("/flip-requests", {"after": after}, timeout_s)
        return (
            None if response.status_code == httpx.codes.NO_CONTENT else _parse_response(FlipRequest, response)
        )

    async def _get(self, path: str, query: dict[str, int], timeout_s: float) -> httpx.Response:
        params = {**query, "timeout_s": timeout_s}
        try:
            response = await self._client.get(
                self._url + path, params=params, timeout=timeout_s + _RESPONSE_MARGIN_S
            )
        except httpx.HTTPError as error:
            raise RouterUnavailable(f"{path}: {type(error).__name__}") from error
        if not response.is_success:
            raise RouterUnavailable(f"{path}: status {response.status_code}")
        return response


def open_http_client(url: str, *, token: str) -> httpx.AsyncClient:
    """A client for `HttpRouterClient`, to be closed by the caller."""
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False)


def open_http_client_for_all(token_file: Path) -> httpx.AsyncClient:
    """A client for the `HttpRouterClient`s of many services, to be closed by the caller."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=10)
    return httpx.AsyncClient(auth=TokenFileAuth(token_file), limits=limits, trust_env=False)


def _parse_response(model: type[M], response: httpx.Response) -> M:
    try:
        return model.model_validate_json(response.content)
    except ValidationError as error:
        raise RouterUnavailable(f"{model.__name__} cannot be read: {error.error_count()} errors") from error
