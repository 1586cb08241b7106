"""What commands ask of a running service's autoscaler: its decisions, as it tells them."""

from collections.abc import Sequence
from typing import Any

import httpx

from fulcrum_core.errors import FulcrumError


class Unreachable(FulcrumError):
    """A part of the service does not answer."""


async def decisions(client: httpx.AsyncClient, url: str, *, limit: int) -> Sequence[dict[str, Any]]:
    """The autoscaler's last decisions, newest last.

    Raises:
        Unreachable: if it does not answer with a list.
    """
    try:
        answer = await client.get(f"{url}/decisions", params={"limit": limit}, timeout=2.0)
        answer.raise_for_status()
        listed = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unreachable(f"autoscaler ({url}) does not answer: {type(error).__name__}") from error
    if not isinstance(listed, list):
        raise Unreachable(f"autoscaler ({url}) does not answer with a list")
    return listed
