"""A whole run on this machine: up, hurt, down, and nothing left."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fulcrum_cli.local import Commands, Life, LocalOptions, LocalRun, StartFailed, find_runs, run_local
from fulcrum_cluster.client import open_store
from fulcrum_core.api import PDInstance, PDService, Resource, parse_object
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Phase

TINY = (sys.executable, str(Path(__file__).parent / "tiny_program.py"))
STAND_INS = Commands(
    engine=lambda _instance, _around: Life(command=TINY),
    router=lambda _around, port, _state_port: (*TINY, "--port", str(port)),
    autoscaler=lambda _around, port, _state: (*TINY, "--port", str(port)),
)
REAL_ENGINES = Commands(router=STAND_INS.router, autoscaler=STAND_INS.autoscaler)
DEADLINE_S = 30.0


def manifest(**spec: Any) -> list[Resource]:
    """A service `chat` of two instances."""
    given = {"model": "m", "instances": 2, **spec}
    return [
        parse_object(
            {
                "apiVersion": "fulcrum.dev/v1alpha1",
                "kind": "PDService",
                "metadata": {"name": "chat"},
                "spec": given,
            }
        )
    ]


@pytest.fixture(autouse=True)
def runs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs of this test lie, away from those of the user."""
    folder = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def alive(pids: dict[str, int]) -> list[str]:
    """Names of those that run; one that has ended and whom nobody has asked about (a zombie) does not."""
    return [name for name, pid in pids.items() if state_of(pid) not in ("gone", "Z")]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


@contextlib.asynccontextmanager
async def serving(
    commands: Commands = STAND_INS, objects: list[Resource] | None = None
) -> AsyncIterator[LocalRun]:
    """A run in which every instance serves."""
    async with run_local(objects or manifest(), LocalOptions(port=0), commands=commands) as run:
        async with asyncio.timeout(DEADLINE_S):
            await run.serving()
        yield run


async def changed(run: LocalRun, holds: Callable[[PDInstance], bool]) -> PDInstance:
    """Waits until this holds for chat-0; returns what it then is."""
    listing = await run.store.list(PDInstance, namespace="default")
    async with asyncio.timeout(DEADLINE_S):
        async with contextlib.aclosing(
            run.store.watch(PDInstance, namespace="default", since=listing.resource_version)
        ) as events:
            async for event in events:
                if (
                    event.object is not None
                    and event.object.metadata.name == "chat-0"
                    and holds(event.object)
                ):
                    return event.object
    raise AssertionError("the watch ended")


async def test_a_run_serves_and_leaves_nothing(runs: Path) -> None:
    async with serving() as run:
        pids = run.pids()
        assert sorted(alive(pids)) == ["autoscaler", "chat-0", "chat-1", "router"]
    assert (alive(pids), list(runs.glob("fulcrum-*/*"))) == ([], [])


async def test_other_terminals_find_a_run_and_its_store() -> None:
    async with serving() as run:
        (found,) = find_runs()
        async with open_store(found.store) as store:
            instances = (await store.list(PDInstance, namespace=found.namespace)).items
        assert (found, found.pid, [instance.status.phase for instance in instances]) == (
            run.info,
            os.getpid(),
            [Phase.SERVING, Phase.SERVING],
        )
    assert find_runs() == ()


async def test_a_run_removes_what_killed_ones_left(runs: Path) -> None:
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    (runs / f"fulcrum-{os.getuid()}" / f"old-{ended.pid}-beef").mkdir(parents=True)
    async with serving() as run:
        assert list(runs.glob("fulcrum-*/*")) == [Path(run.info.run_dir)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to somebody else")
async def test_a_link_that_somebody_else_made_is_no_folder_of_ours(
    runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    precious = tmp_path_factory.mktemp("home") / "notes-99999999-x"
    precious.mkdir()
    link = runs / f"fulcrum-{os.getuid()}"
    link.symlink_to(precious.parent)
    os.lchown(link, 65534, 65534)
    with pytest.raises(InvalidInput, match="belongs to another user"):
        async with serving():
            pass
    assert (find_runs(), precious.is_dir()) == ((), True)


async def test_a_folder_of_the_users_own_keeps_the_logs_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    own = tmp_path_factory.mktemp("own")
    async with run_local(manifest(), LocalOptions(port=0, run_dir=own), commands=STAND_INS) as run:
        await run.serving()
        with pytest.raises(InvalidInput, match="is used by another run"):
            async with run_local(manifest(), LocalOptions(port=0, run_dir=own), commands=STAND_INS):
                pass
    assert sorted(path.name for path in own.iterdir()) == [
        "autoscaler.log",
        "chat-0.log",
        "chat-1.log",
        "router.log",
    ]


async def test_the_token_is_for_its_owner_alone() -> None:
    async with serving() as run:
        path = Path(run.info.token_file)
        assert (stat.S_IMODE(path.stat().st_mode), len(run.info.token) >= 32) == (0o600, True)


async def test_a_service_with_real_engines_comes_up_and_goes_down() -> None:
    async with serving(REAL_ENGINES) as run:
        pids = run.pids()
        found = await run.serving()
        roles = {instance.metadata.name: instance.status.role for instance in found}
        assert roles == {"chat-0": "Prefill", "chat-1": "Decode"}
    assert alive(pids) == []


async def test_a_killed_engine_loses_its_endpoint_at_once_and_serves_again_elsewhere() -> None:
    async with serving(REAL_ENGINES) as run:
        before = (await run.store.get(PDInstance, "chat-0", namespace="default")).status.endpoint
        run.kill("chat-0")
        failed = await changed(run, lambda i: i.status.phase is Phase.FAILED)
        again = await changed(run, lambda i: i.status.phase is Phase.SERVING)
        assert (failed.status.endpoint, again.status.restarts, again.status.endpoint != before) == (
            None,
            1,
            True,
        )


async def test_a_killed_router_comes_back_at_its_address() -> None:
    async with serving() as run:
        address = run.info.router_url
        first = run.pids()["router"]
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while run.pids().get("router") in (None, first) or run.info.router_url != address:
                await run.changed()
            service = await _with_endpoint(run, address)
        assert service.status.endpoint == address


async def test_a_killed_autoscaler_comes_back_at_its_address() -> None:
    async with serving() as run:
        host, port = run.info.autoscaler_url.removeprefix("http://").rsplit(":", 1)
        first = run.pids()["autoscaler"]
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while run.pids().get("autoscaler") in (None, first) or not await _listens(host, int(port)):
                await asyncio.sleep(0.02)


async def _listens(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _with_endpoint(run: LocalRun, address: str) -> PDService:
    while True:
        service = await run.store.get(PDService, "chat", namespace="default")
        if service.status.endpoint == address:
            return service
        await run.changed()


@pytest.mark.parametrize(
    ("objects", "rule"),
    [
        pytest.param(
            manifest(engine={"profile": "/nowhere/x.yaml"}),
            "profile (/nowhere/x.yaml) cannot be read: no such file or directory",
            id="a profile that is not there",
        ),
        pytest.param(
            manifest(qosTiers=["gold"]),
            "PDService chat spec.qosTiers[0] (gold) is not the name of a QoSTier of this manifest",
            id="a tier that is not there",
        ),
        pytest.param([], "PDService (none) is not one: a local run serves exactly one", id="no service"),
    ],
)
async def test_bad_input_is_refused_before_anything_starts(
    objects: list[Resource], rule: str, runs: Path
) -> None:
    with pytest.raises(InvalidInput) as refused:
        async with run_local(objects, LocalOptions(port=0), commands=STAND_INS):
            pass
    assert (str(refused.value), list(runs.iterdir())) == (rule, [])


async def test_a_port_in_use_is_refused_before_anything_starts(runs: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidInput) as refused:
            async with run_local(manifest(), LocalOptions(port=port), commands=STAND_INS):
                pass
    taken = "cannot be listened on at 127.0.0.1: address already in use"
    rule = f"port ({port}) {taken}; --port 0 takes a free one"
    assert (str(refused.value), list(runs.iterdir())) == (rule, [])


@pytest.mark.parametrize("program", ["router", "autoscaler"])
async def test_a_program_that_refuses_half_way_leaves_nothing_started(program: str, runs: Path) -> None:
    refuses = (*TINY, "--refuse", "--port (1) is taken")
    commands = (
        replace(STAND_INS, router=lambda *_: refuses)
        if program == "router"
        else replace(STAND_INS, autoscaler=lambda *_: refuses)
    )
    with pytest.raises(StartFailed) as failed:
        async with run_local(manifest(), LocalOptions(port=0), commands=commands):
            pass
    assert str(failed.value) == f"{program} does not start: exit code 2: --port (1) is taken"
    assert list(runs.glob("fulcrum-*/*")) == []
    assert children() == []


def children() -> list[str]:
    """Processes of ours that have not ended."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    return [
        pid for pid in listed if "tiny_program" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    ]


async def test_an_engine_that_never_will_serve_is_told() -> None:
    refuses = (*TINY, "--refuse", "--model (m) is unknown")
    commands = replace(STAND_INS, engine=lambda *_: Life(command=refuses))
    async with run_local(manifest(instances=1), LocalOptions(port=0), commands=commands) as run:
        with pytest.raises(StartFailed) as failed:
            await run.serving()
    assert str(failed.value) == "engine chat-0 does not start: exit code 2: --model (m) is unknown"


SCRIPT = """
import asyncio, json, signal, sys
from fulcrum_core.api import parse_object
from fulcrum_cli.local import LocalOptions, run_local

async def main():
    objects = [parse_object(json.loads(sys.argv[1]))]
    async with run_local(objects, LocalOptions(port=0)) as run:
        await run.serving()
        print("pids", json.dumps(run.pids()), flush=True)
        await asyncio.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without
try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


async def told_pids(output: asyncio.StreamReader) -> dict[str, int]:
    """What the script says of its processes, among what it logs."""
    async for line in output:
        word, _, rest = line.decode().partition(" ")
        if word == "pids":
            told: dict[str, int] = json.loads(rest)
            return told
    raise AssertionError("the script ended without a word")


@pytest.mark.parametrize("word", [signal.SIGINT, signal.SIGKILL])
async def test_whatever_ends_the_run_ends_all_of_its_processes(word: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, json.dumps(manifest()[0].dump())),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            pids = await told_pids(process.stdout)
        process.send_signal(word)
        async with asyncio.timeout(DEADLINE_S):
            code = await process.wait()
            while alive(pids):
                await asyncio.sleep(0.01)
    finally:
        if process.returncode is None:
            process.kill()
    assert (sorted(pids), code) == (
        ["autoscaler", "chat-0", "chat-1", "router"],
        130 if word is signal.SIGINT else -signal.SIGKILL,
    )
