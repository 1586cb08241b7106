"""The router's state port, as the autoscaler reads it.

Every way in which a router may not answer (gone, slow, refusing the token, speaking nonsense) is one error:
the autoscaler can do nothing about any of them but hold.
"""

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


class HttpRouter:
    """A router's state port over HTTP."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

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
            answer = await self._client.get(path, params=params, timeout=timeout_s + _PATIENCE_S)
        except httpx.HTTPError as error:
            raise RouterAway(f"{path}: {type(error).__name__}") from error
        if not answer.is_success:
            raise RouterAway(f"{path}: status {answer.status_code}")
        return answer


def open_router(url: str, *, token: str) -> httpx.AsyncClient:
    """A client for `HttpRouter`, to be closed by the caller."""
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"}, trust_env=False)


def _parse(model: type[M], answer: httpx.Response) -> M:
    try:
        return model.model_validate_json(answer.content)
    except ValidationError as error:
        raise RouterAway(f"{model.__name__} cannot be read: {error.error_count()} errors") from error
