"""Carries out the buttons of the live page in `play`: change the load; flip, drain or kill an instance.

`web.server` calls it. With `fulcrum web` the page has no such buttons. `commands.play` hands it to the page's
server.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from fulcrum_cli.assignment.writes import flip_instance, set_cordon
from fulcrum_cli.option_values import parse_choice
from fulcrum_cli.play.loads import list_shapes
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.ports import Store
from fulcrum_core.values import Role


class PlaySession(Protocol):
    """The part of a session that the page changes."""

    started: bool

    @property
    def load_name(self) -> str:
        """Shape of the load, or name of the trace."""

    @property
    def too_slow(self) -> bool:
        """Whether latencies are caused by this machine, not by the engine model."""

    def change_load(self, shape: str) -> None:
        """Replace the load; `InvalidInput` if that is not possible."""

    def kill(self, instance: str) -> None:
        """Kill an engine; `KeyError` if the instance has none."""


class PageControls:
    """Carries out the actions of the page's buttons."""

    def __init__(self, session: PlaySession, store: Store, service: PDService) -> None:
        self._session, self._store = session, store
        self._service, self._namespace = service.metadata.name, service.metadata.namespace
        self._shapes = list_shapes(service.spec.qos_tiers)

    def read_state(self) -> Mapping[str, Any]:
        """Return the loads to choose from, the current one, and whether this machine is too slow."""
        return {
            "loads": self._shapes,
            "load": self._session.load_name,
            "started": self._session.started,
            "too_slow": self._session.too_slow,
        }

    async def run_action(self, action: Mapping[str, Any]) -> str:
        """Carry out an action; return what happened.

        Raises:
            FulcrumError: if the action is unknown or refused.
        """
        match action:
            case {"action": "load", "load": str(shape)} if shape in self._shapes:
                self._session.change_load(shape)
                return f"load changed to {shape}"
            case {"action": "flip", "instance": str(instance), "to": str(to)}:
                role = parse_choice("to", to, Role, Role.PREFILL, Role.DECODE)
                return await self._flip(instance, role)
            case {"action": "drain" | "undrain" as name, "instance": str(instance)}:
                return await self._set_cordon(instance, cordoned=name == "drain")
            case {"action": "kill", "instance": str(instance)}:
                return self._kill(instance)
        raise InvalidInput("action", str(action.get("action"))[:40], "is unknown, or a field is missing")

    async def _flip(self, instance: str, to: Role) -> str:
        write = await flip_instance(
            self._store, self._service, instance, to, namespace=self._namespace, reason="by the live page"
        )
        return f"{instance} → {to}" if write.changed else f"{instance} already has the role {to}"

    async def _set_cordon(self, instance: str, *, cordoned: bool) -> str:
        await set_cordon(
            self._store,
            self._service,
            instance,
            namespace=self._namespace,
            reason="drained by the live page",
            cordoned=cordoned,
        )
        return f"{instance} gets no new requests" if cordoned else f"{instance} gets new requests again"

    def _kill(self, instance: str) -> str:
        try:
            self._session.kill(instance)
        except KeyError:
            raise InvalidInput("instance", instance, "has no running engine") from None
        return f"{instance} killed"
