"""Replays recorded states of the live page: at what time it is, how fast it goes, and the page's buttons.

`fulcrum web --replay` runs it; `server` calls `run_action`.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_core.errors import InvalidInput

SPEEDS = (1, 4, 16, 64)
SEND_S = 0.5
"""Seconds between two states that are sent."""
_AT_S_MAX = 1e12
_NO_RECORDING = "is not a recording of fulcrum"
_FIELDS = {
    **dict.fromkeys(("service", "namespace", "model", "mode", "source"), str),
    **dict.fromkeys(("slo", "rates", "ttft", "tpot"), dict),
    **dict.fromkeys(("tiles", "flows", "tiers", "desired", "actual", "decisions", "unavailable"), list),
    **dict.fromkeys(("waiting", "flips"), int),
}
"""What the page needs of a state to show it, with its type in JSON; see `page_model`."""


class Replay:
    """The states of one file, and the position in them. Positions are seconds from the first state on."""

    def __init__(self, lines: Sequence[bytes], path: Path) -> None:
        self._lines, self._path = lines, path
        times_s = [self._read_time(line) for line in lines]
        self._positions_s = [at_s - times_s[0] for at_s in times_s]
        if any(a > b for a, b in zip(self._positions_s, self._positions_s[1:], strict=False)):
            raise InvalidInput("--replay", path, "has states that are not in order")
        self.position_s = 0.0
        self.playing = True
        self.speed = SPEEDS[0]

    @property
    def duration_s(self) -> float:
        """Seconds from the first state to the last one."""
        return self._positions_s[-1]

    def advance(self, passed_s: float) -> None:
        """Move on by the time that has passed; at the end the replay stops."""
        if self.playing:
            self.position_s = min(self.position_s + passed_s * self.speed, self.duration_s)
            self.playing = self.position_s < self.duration_s

    def read_state(self) -> dict[str, Any]:
        """Return the state at the position, with the position, and without the buttons of its run."""
        line = self._lines[bisect_right(self._positions_s, self.position_s) - 1]
        state: dict[str, Any] = orjson.loads(line)
        replay = {
            "position_s": round(self.position_s, 1),
            "duration_s": round(self.duration_s, 1),
            "playing": self.playing,
            "speed": self.speed,
            "speeds": SPEEDS,
        }
        source = f"{state['source']}, replay of {self._path.name}"
        return {**state, "source": source, "controls": None, "replay": replay}

    async def run_action(self, action: Mapping[str, Any]) -> str:
        """Carry out an action of the page's buttons; return what happened.

        Raises:
            InvalidInput: if the action is unknown.
        """
        match action:
            case {"action": "play"}:
                if self.position_s >= self.duration_s:
                    self.position_s = 0.0
                self.playing = True
                return ""
            case {"action": "pause"}:
                self.playing = False
                return ""
            case {"action": "seek", "position_s": int() | float() as position_s}:
                self.position_s = min(max(0.0, float(position_s)), self.duration_s)
                return ""
            case {"action": "speed", "speed": int() as speed} if speed in SPEEDS:
                self.speed = speed
                return ""
        raise InvalidInput("action", str(action.get("action"))[:40], "is unknown, or a field is missing")

    async def run(self, broadcast: Broadcast) -> None:
        """Send states while a page is open, until cancelled."""
        while True:
            await broadcast.wait_opened()
            broadcast.send(orjson.dumps(self.read_state()))
            await asyncio.sleep(SEND_S)
            self.advance(SEND_S)

    def _read_time(self, line: bytes) -> float:
        """Return the time of a state, which the page can show.

        Raises:
            InvalidInput: if it is no state.
        """
        try:
            state = orjson.loads(line)
            at_s = state["at_s"]
            is_state = all(isinstance(state[name], kind) for name, kind in _FIELDS.items())
        except (ValueError, TypeError, LookupError) as error:
            raise InvalidInput("--replay", self._path, _NO_RECORDING) from error
        if not is_state or not isinstance(at_s, int | float) or not 0 <= at_s <= _AT_S_MAX:
            raise InvalidInput("--replay", self._path, _NO_RECORDING)
        return float(at_s)
