"""The router's state port, as the autoscaler reads it.

Every way in which a router may not answer (gone, slow, refusing the token, speaking nonsense) is one error:
the autoscaler can do nothing about any of them but hold.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Protocol, TypeVar

import httpx
from pydantic import ValidationError

from fulcrum_core.state import FlipWanted, RouterState

M = TypeVar("M", RouterState, FlipWanted)

_PATIENCE_S = 1.0
"""How much longer than asked for the router may take before it counts as gone."""


class RouterAway(Exception):
    """The router did not answer, or with what is no answer."""


class RouterPort(Protocol):
    """What the loop needs of a router."""

    async def state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        """Its state once it has applied the generation, or after `timeout_s` what it has; or `RouterAway`."""
        ...

    async def flip_wanted(self, *, after: int, timeout_s: float) -> FlipWanted | None:
        """The first flip wanted after number `after`; None if none came in `timeout_s`; or `RouterAway`."""
        ...


class FileToken(httpx.Auth):
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


class HttpRouter:
    """A router's state port over HTTP. `url` is where it is, if the client has no base address."""

    def __init__(self, client: httpx.AsyncClient, url: str = "") -> None:
        self._client, self._url = client, url.rstrip("/")

    async def state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        """See `RouterPort`."""
        answer = await self._get("/state", {"min_generation": min_generation}, timeout_s)
        return _parse(RouterState, answer)

    async def flip_wanted(self, *, after: int, timeout_s: float) -> FlipWanted | None:
        """See `RouterPort`."""
        answer = await self._get("/flip-wanted", {"after": after}, timeout_s)
        return None if answer.status_code == httpx.codes.NO_CONTENT else _parse(FlipWanted, answer)

    async def _get(self, path: str, query: dict[str, int], timeout_s: float) -> httpx.Response:
        params = {**query, "timeout_s": timeout_s}
        try:
            answer = await self._client.get(self._url + path, params=params, timeout=timeout_s + _PATIENCE_S)
        except httpx.HTTPError as error:
            raise RouterAway(f"{path}: {type(error).__name__}") from error
        if not answer.is_success:
            raise RouterAway(f"{path}: status {answer.status_code}")
        return answer


def open_router(url: str, *, token: str) -> httpx.AsyncClient:
    """A client for `HttpRouter`, to be closed by the caller."""
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False)


def open_routers(token: Path) -> httpx.AsyncClient:
    """A client for the `HttpRouter`s of many services, to be closed by the caller."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=10)
    return httpx.AsyncClient(auth=FileToken(token), limits=limits, trust_env=False)


def _parse(model: type[M], answer: httpx.Response) -> M:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise RouterAway(f"{model.__name__} cannot be read: {error.error_count()} errors") from error
