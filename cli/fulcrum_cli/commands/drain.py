"""`fulcrum drain`: no new work for an instance, by a person's word, until that is taken back."""

import asyncio

from fulcrum_cli.assignment.wait import Sight, check_stands, look, look_until, phase_words
from fulcrum_cli.assignment.write import Written, cordon
from fulcrum_cli.target.connection import Connection, connected
from fulcrum_cli.target.instance_service import service_of
from fulcrum_cli.target.target import Asked, choose_target
from fulcrum_cli.terminal.program import program_name
from fulcrum_core.api.pdinstance import DRAINED
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Phase

SETTLE_S = 10.0
"""Grace on top of the drain's own time: for the operator to say so."""


def run(asked: Asked, instance: str, *, wait: bool, undo: bool) -> int:
    """Cordons the instance, or takes that back; 1 if somebody waited in vain."""
    if undo and wait:
        raise InvalidInput("--wait", "with --undo", "is for a drain: taking it back needs no wait")
    line, done = asyncio.run(_drain(asked, instance, wait=wait, undo=undo))
    print(line)
    return 0 if done or not wait else 1


async def _drain(asked: Asked, instance: str, *, wait: bool, undo: bool) -> tuple[str, bool]:
    async with connected(choose_target(asked), of_instance=instance) as there:
        service = await service_of(there, instance)
        written = await cordon(
            there.store,
            service.metadata.name,
            instance,
            namespace=there.namespace,
            reason="drained by command",
            cordoned=not undo,
        )
        words = _words(written, undo=undo)
        done = True
        if wait:
            end, done = await _wait(there, service, written)
            words = f"{words}; {end}"
        return f"{instance}: {words} ({there.words})", done


def _words(written: Written, *, undo: bool) -> str:
    if undo:
        return "takes new work again" if written.changed else "was not cordoned: nothing written"
    if not written.changed:
        entry = written.before
        return f"was cordoned already by {entry.cordoner} ({entry.why_cordoned}): nothing written"
    back = f"{program_name()} drain {written.instance} --undo"
    return f"cordoned, gets no new work; `{back}` takes it back"


async def _wait(there: Connection, service: PDService, written: Written) -> tuple[str, bool]:
    """Until nothing of its requests is left, as the operator or the router says."""
    patience_s = service.spec.drain.timeout + SETTLE_S
    (_, seen), done = await look_until(
        lambda: _drained(there, written), lambda looked: looked[0], timeout_s=patience_s
    )
    if not done:
        return f"not drained within {patience_s:g} s, {phase_words(seen)}", False
    return "gone" if seen.instance is None else "drained, no request is left on it", True


async def _drained(there: Connection, written: Written) -> tuple[bool, Sight]:
    seen = await look(there, written)
    if seen.instance is None:
        return True, seen
    check_stands(seen, written)
    status = seen.instance.status
    told = status.phase is Phase.DRAINING and status.message.endswith(DRAINED)
    return told or await _empty(there, written), seen


async def _empty(there: Connection, written: Written) -> bool:
    """Whether the router has applied the word and nothing is on the instance; no router: not known."""
    state = await there.router_state()
    if state is None or state.generation < written.generation:
        return False
    ledgers = [ledger for ledger in state.instances if ledger.name == written.instance]
    return all(ledger.at_rest(since_s=state.acknowledged_at_s) for ledger in ledgers)
