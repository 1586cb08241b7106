"""Notices within seconds that outdated CRDs were changed, so that missing fields are sent again.

Only while fields are missing, the list of the API server's schemas is read (10 KB): it has a hash of each.
Every client may read that list, while an operator of one namespace may not read CRDs. `leader` runs it. What
was missing is in `missing_fields`; CRDs are never written here.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Protocol

from fulcrum_core.api.meta import API_VERSION
from fulcrum_core.errors import FulcrumError
from fulcrum_operator.controller.missing_fields import MissingFields

CHECK_INTERVAL_S = 5.0
_SCHEMAS = "/openapi/v3"


class ServerFiles(Protocol):
    """What an API server responds at a path, as `ObjectApi.get_raw`."""

    async def get_raw(self, path: str) -> Any:
        """The server's response; the list of schemas is sent as text."""
        ...


class CrdChanges:
    """Has missing fields sent again after the schema of the kinds has changed.

    Args:
        missing_fields: The fields that the CRDs lack.
        server: The API server.
        reconcile_all: Called when fields are to be sent again, and when other fields are missing than before.
    """

    def __init__(
        self, missing_fields: MissingFields, server: ServerFiles, reconcile_all: Callable[[], None]
    ) -> None:
        self._missing_fields, self._server, self._reconcile_all = missing_fields, server, reconcile_all
        self._named = missing_fields.causes()
        self._schema: str | None = None
        """Last seen schema of the kinds; None: not seen since a field is missing."""
        self._retry_again, self._upgraded = False, False

    async def run(self) -> None:
        """Check from time to time, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self._check()

    async def _check(self) -> None:
        if self._missing_fields.causes():
            await self._retry_if_changed()
        else:
            self._schema = None
        if self._missing_fields.causes() != self._named:
            self._reconcile_all()
        self._named = self._missing_fields.causes()

    async def _retry_if_changed(self) -> None:
        """Have the fields sent again, twice: a schema may be published before it is in use.

        After an upgrade, fields that no write has any more are forgotten: the CRDs may have them now.
        """
        try:
            schema = _find_schema(await self._server.get_raw(_SCHEMAS))
        except FulcrumError:
            return
        changed = schema != self._schema
        if self._upgraded and not changed:
            self._missing_fields.forget_unsent()
        self._upgraded = changed and self._schema is not None
        if changed or self._retry_again:
            self._missing_fields.retry_all()
            self._reconcile_all()
        self._schema, self._retry_again = schema, changed


def _find_schema(listed: str) -> str:
    """The URL of our kinds' schema, which has its hash; empty if there is none."""
    try:
        return str(json.loads(listed)["paths"][f"apis/{API_VERSION}"]["serverRelativeURL"])
    except (ValueError, KeyError, TypeError):
        return ""
