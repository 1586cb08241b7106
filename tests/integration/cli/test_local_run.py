"""A local run serves, survives killed programs, and leaves no process or file when it ends."""

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

from fulcrum_cli.local.program_commands import ProgramCommands
from fulcrum_cli.local.run import LocalRun, LocalRunOptions, run_local
from fulcrum_cli.local.run_folder import find_runs
from fulcrum_cli.local.supervised_process import ProcessSpec, StartFailed
from fulcrum_cluster.client import open_store
from fulcrum_core.api import PDInstance, PDService, Resource
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import Phase
from tests.objects import make_object
from tests.waiting import wait_until

TINY = (sys.executable, str(Path(__file__).parent / "tiny_program.py"))
FAKE_PROGRAMS = ProgramCommands(
    engine=lambda _instance, _context: ProcessSpec(command=TINY),
    router=lambda _shared, ports: (*TINY, "--port", str(ports["port"])),
    autoscaler=lambda _shared, port, _state: (*TINY, "--port", str(port)),
)
ENGINE_SERVERS = ProgramCommands(router=FAKE_PROGRAMS.router, autoscaler=FAKE_PROGRAMS.autoscaler)
DEADLINE_S = 30.0


def manifest(**spec: Any) -> list[Resource]:
    """A service `chat` of two instances."""
    return [make_object(PDService, "chat", {"model": "m", "instances": 2, **spec})]


@pytest.fixture(autouse=True)
def runs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for the runs of a test, apart from the user's."""
    folder = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def running(pids: dict[str, int]) -> list[str]:
    """Names of the processes that run; a zombie does not."""
    return [name for name, pid in pids.items() if state_of(pid) not in ("gone", "Z")]


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


@contextlib.asynccontextmanager
async def serving(
    commands: ProgramCommands = FAKE_PROGRAMS, objects: list[Resource] | None = None
) -> AsyncIterator[LocalRun]:
    """Bring up a run and wait until every instance serves."""
    async with run_local(objects or manifest(), LocalRunOptions(port=0), commands=commands) as run:
        async with asyncio.timeout(DEADLINE_S):
            await run.wait_serving()
        yield run


async def wait_for_instance(run: LocalRun, condition: Callable[[PDInstance], bool]) -> PDInstance:
    """Wait until the condition is true for chat-0; returns the instance."""
    listing = await run.store.list(PDInstance, namespace="default")
    async with asyncio.timeout(DEADLINE_S):
        async with contextlib.aclosing(
            run.store.watch(PDInstance, namespace="default", since=listing.resource_version)
        ) as events:
            async for event in events:
                if (
                    event.object is not None
                    and event.object.metadata.name == "chat-0"
                    and condition(event.object)
                ):
                    return event.object
    raise AssertionError("the watch ended")


async def test_a_run_serves_and_leaves_no_process_or_file(runs: Path) -> None:
    async with serving() as run:
        pids = run.pids()
        assert sorted(running(pids)) == ["autoscaler", "chat-0", "chat-1", "router"]
    assert (running(pids), list(runs.glob("fulcrum-*/*"))) == ([], [])


async def test_a_run_is_found_by_other_terminals_with_its_store() -> None:
    async with serving() as run:
        (found,) = find_runs()
        async with open_store(found.store_address) as store:
            instances = (await store.list(PDInstance, namespace=found.namespace)).items
        assert (found, found.pid, [instance.status.phase for instance in instances]) == (
            run.info,
            os.getpid(),
            [Phase.SERVING, Phase.SERVING],
        )
    assert find_runs() == ()


async def test_a_run_removes_folders_of_killed_runs(runs: Path) -> None:
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    (runs / f"fulcrum-{os.getuid()}" / f"old-{ended.pid}-beef").mkdir(parents=True)
    async with serving() as run:
        assert list(runs.glob("fulcrum-*/*")) == [Path(run.info.run_dir)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can create a file of another user")
async def test_a_run_folder_owned_by_another_user_is_refused(
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


async def test_a_given_run_folder_keeps_the_logs_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    own = tmp_path_factory.mktemp("own")
    async with run_local(manifest(), LocalRunOptions(port=0, run_dir=own), commands=FAKE_PROGRAMS) as run:
        await run.wait_serving()
        with pytest.raises(InvalidInput, match="is used by another run"):
            async with run_local(manifest(), LocalRunOptions(port=0, run_dir=own), commands=FAKE_PROGRAMS):
                pass
    assert sorted(path.name for path in own.iterdir()) == [
        "autoscaler.log",
        "chat-0.log",
        "chat-1.log",
        "router.log",
    ]


async def test_the_token_file_is_readable_by_its_owner_alone() -> None:
    async with serving() as run:
        path = Path(run.info.token_file)
        assert (stat.S_IMODE(path.stat().st_mode), len(run.info.token) >= 32) == (0o600, True)


async def test_a_service_of_engine_servers_serves_and_ends_without_processes() -> None:
    async with serving(ENGINE_SERVERS) as run:
        pids = run.pids()
        found = await run.wait_serving()
        roles = {instance.metadata.name: instance.status.role for instance in found}
        assert roles == {"chat-0": "Prefill", "chat-1": "Decode"}
    assert running(pids) == []


async def test_a_killed_engine_loses_its_endpoint_and_serves_again_on_another_port() -> None:
    async with serving(ENGINE_SERVERS) as run:
        before = (await run.store.get(PDInstance, "chat-0", namespace="default")).status.endpoint
        run.kill("chat-0")
        failed = await wait_for_instance(run, lambda i: i.status.phase is Phase.FAILED)
        again = await wait_for_instance(run, lambda i: i.status.phase is Phase.SERVING)
        assert (failed.status.endpoint, again.status.restarts, again.status.endpoint != before) == (
            None,
            1,
            True,
        )


async def test_a_killed_router_restarts_on_its_ports() -> None:
    async with serving() as run:
        address = run.info.router_url
        first = run.pids()["router"]
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            while run.pids().get("router") in (None, first) or run.info.router_url != address:
                await run.wait_change()
            service = await _wait_for_endpoint(run, address)
        assert service.status.endpoint == address


async def test_a_killed_autoscaler_restarts_on_its_port() -> None:
    async with serving() as run:
        host, port = run.info.autoscaler_url.removeprefix("http://").rsplit(":", 1)
        first = run.pids()["autoscaler"]
        os.kill(first, signal.SIGKILL)

        async def restarted() -> bool:
            pid = run.pids().get("autoscaler")
            return pid not in (None, first) and await _is_listening(host, int(port))

        await wait_until(restarted, "a new autoscaler listens on the old port", timeout_s=DEADLINE_S)


async def _is_listening(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def _wait_for_endpoint(run: LocalRun, address: str) -> PDService:
    while True:
        service = await run.store.get(PDService, "chat", namespace="default")
        if service.status.endpoint == address:
            return service
        await run.wait_change()


@pytest.mark.parametrize(
    ("objects", "rule"),
    [
        pytest.param(
            manifest(engine={"profile": "/nowhere/x.yaml"}),
            "profile (/nowhere/x.yaml) cannot be read: no such file or directory",
            id="a missing profile",
        ),
        pytest.param(
            manifest(qosTiers=["gold"]),
            "PDService chat spec.qosTiers[0] (gold) is not the name of a QoSTier in this manifest",
            id="a missing tier",
        ),
        pytest.param(
            manifest(router={"auth": {"apiKeys": {"secretName": "chat-keys"}}}),
            "PDService chat spec.router.auth.apiKeys.secretName (chat-keys) is not on this machine: "
            "`fulcrum up --api-keys FOLDER` names a folder with the same files",
            id="API keys without a folder",
        ),
        pytest.param(
            [], "PDService (none) must be exactly one: a local run serves one PDService", id="no service"
        ),
    ],
)
async def test_bad_input_is_refused_before_anything_starts(
    objects: list[Resource], rule: str, runs: Path
) -> None:
    with pytest.raises(InvalidInput) as refused:
        async with run_local(objects, LocalRunOptions(port=0), commands=FAKE_PROGRAMS):
            pass
    assert (str(refused.value), list(runs.iterdir())) == (rule, [])


async def test_a_port_in_use_is_refused_before_anything_starts(runs: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidInput) as refused:
            async with run_local(manifest(), LocalRunOptions(port=port), commands=FAKE_PROGRAMS):
                pass
    taken = "cannot be listened on at 127.0.0.1: address already in use"
    rule = f"port ({port}) {taken}; --port 0 takes a free one"
    assert (str(refused.value), list(runs.iterdir())) == (rule, [])


@pytest.mark.parametrize("program", ["router", "autoscaler"])
async def test_a_program_that_fails_to_start_ends_the_whole_run(program: str, runs: Path) -> None:
    refuses = (*TINY, "--refuse", "--port (1) is taken")
    commands = (
        replace(FAKE_PROGRAMS, router=lambda *_: refuses)
        if program == "router"
        else replace(FAKE_PROGRAMS, autoscaler=lambda *_: refuses)
    )
    with pytest.raises(StartFailed) as failed:
        async with run_local(manifest(), LocalRunOptions(port=0), commands=commands):
            pass
    assert str(failed.value) == f"{program} does not start: exit code 2: --port (1) is taken"
    assert list(runs.glob("fulcrum-*/*")) == []
    assert children() == []


def children() -> list[str]:
    """Process ids of this process' children that run `tiny_program.py`."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
    return [
        pid for pid in listed if "tiny_program" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    ]


async def test_an_engine_that_cannot_start_is_reported() -> None:
    refuses = (*TINY, "--refuse", "--model (m) is unknown")
    commands = replace(FAKE_PROGRAMS, engine=lambda *_: ProcessSpec(command=refuses))
    async with run_local(manifest(instances=1), LocalRunOptions(port=0), commands=commands) as run:
        with pytest.raises(StartFailed) as failed:
            await run.wait_serving()
    assert str(failed.value) == "engine chat-0 does not start: exit code 2: --model (m) is unknown"


SCRIPT = """
import asyncio, json, signal, sys
from fulcrum_core.api import parse_object
from fulcrum_cli.local.run import LocalRunOptions, run_local

async def main():
    objects = [parse_object(json.loads(sys.argv[1]))]
    async with run_local(objects, LocalRunOptions(port=0)) as run:
        await run.wait_serving()
        print("pids", json.dumps(run.pids()), flush=True)
        await asyncio.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with SIGINT ignored
try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


async def read_pids(output: asyncio.StreamReader) -> dict[str, int]:
    """Read the process ids from the script's output."""
    async for line in output:
        keyword, _, rest = line.decode().partition(" ")
        if keyword == "pids":
            pids: dict[str, int] = json.loads(rest)
            return pids
    raise AssertionError("the script ended without printing its process ids")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_a_signal_that_ends_the_run_ends_all_of_its_processes(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, json.dumps(manifest(engine={"type": "Simulated"})[0].dump())),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            pids = await read_pids(process.stdout)
        process.send_signal(number)
        async with asyncio.timeout(DEADLINE_S):
            code = await process.wait()
        await wait_until(lambda: not running(pids), "all processes have ended", timeout_s=DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert (sorted(pids), code) == (
        ["autoscaler", "chat-0", "chat-1", "router"],
        130 if number is signal.SIGINT else -signal.SIGKILL,
    )
