"""Engine servers as processes over loopback: hand-offs right and wrong, deaths, drains and faults.

Every claim is one that the real engine makes true as well; a control plane under test relies on them.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from fulcrum_core.profiles import load_profile
from fulcrum_simulator.text import output_text, prompt_digest

MODEL = "tiny"
BLOCK = 16
BLOCKS = 64
DEADLINE_S = 8.0
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Server:
    """One engine server process."""

    process: subprocess.Popen[str]
    url: str
    port: int
    side_channel_port: int

    def kill(self) -> None:
        """Make sure that it is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()


Start = Callable[..., Server]


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with quick steps and so few blocks that they are soon reused."""
    profile = load_profile("laptop").model_dump() | {
        "name": "quick",
        "t0": 0.002,
        "d1": 1e-5,
        "b": 1.25e-4,
        "weight_bytes": 100_000_000,
        "block_size": BLOCK,
        "kv_capacity_tokens": BLOCK * BLOCKS,
        "handshake_s": 0.01,
        "startup_s": 0.0,
    }
    path = tmp_path_factory.mktemp("profile") / "quick.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


def launch(profile: Path | str, *arguments: str) -> subprocess.Popen[str]:
    """An engine server process that may not be ready yet, or never be."""
    command = [sys.executable, "-m", "fulcrum_simulator.server", "--name", "a", "--model", MODEL]
    return subprocess.Popen(
        [*command, "--profile", str(profile), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ready(process: subprocess.Popen[str]) -> Server:
    """The server once it printed its ready line."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    line = process.stdout.readline() if readable else ""
    assert line.startswith("ready "), (line, process.poll())
    ports = json.loads(line.removeprefix("ready "))
    return Server(process, f"http://127.0.0.1:{ports['port']}", ports["port"], ports["side_channel_port"])


@pytest.fixture
def start(profile_file: Path) -> Iterator[Start]:
    """Starts servers; none outlives the test."""
    servers: list[Server] = []

    def start_one(*arguments: str) -> Server:
        servers.append(ready(launch(profile_file, *arguments)))
        return servers[-1]

    yield start_one
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def pair(profile_file: Path) -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode instance that tests share and leave as they found them."""
    processes = [launch(profile_file), launch(profile_file)]
    servers = [ready(process) for process in processes]
    yield servers[0], servers[1]
    for server in servers:
        server.kill()


class Client:
    """The calls that the tests make."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def post(self, server: Server, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        async with self._session.post(server.url + path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def complete(self, server: Server, prompt: str, tokens: int, **fields: Any) -> dict[str, Any]:
        """A completion that must be answered with 200."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, **fields}
        status, answer = await self.post(server, "/v1/completions", body)
        assert status == 200, answer
        return answer

    async def text(self, server: Server, prompt: str, tokens: int, **fields: Any) -> str:
        answer = await self.complete(server, prompt, tokens, **fields)
        text: str = answer["choices"][0]["text"]
        return text

    async def prefill(self, server: Server, prompt: str) -> dict[str, Any]:
        """What P hands over."""
        answer = await self.complete(server, prompt, 1, kv_transfer_params=PREFILL_ONLY)
        handoff: dict[str, Any] = answer["kv_transfer_params"]
        return handoff

    async def stream(self, server: Server, path: str, body: dict[str, Any]) -> list[str]:
        """The data of every event of a streamed answer."""
        async with self._session.post(
            server.url + path, json={"model": MODEL, "stream": True, **body}
        ) as answer:
            assert answer.status == 200
            raw = (await answer.read()).decode()
        assert raw.endswith("\n\n")
        events = raw.removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]

    async def metric(self, server: Server, name: str, label: str = "") -> float:
        """The value of one series."""
        async with self._session.get(server.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{") and label in line
        )

    async def stats(self, server: Server) -> dict[str, Any]:
        async with self._session.get(server.url + "/simulator/stats") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def runs(self, server: Server) -> bool:
        """Whether one request runs there."""
        return bool((await self.stats(server))["running"] == 1)

    async def health(self, server: Server) -> int:
        async with self._session.get(server.url + "/health") as answer:
            return answer.status

    async def fault(self, server: Server, kind: str, **fields: Any) -> None:
        status, answer = await self.post(server, "/simulator/fault", {"kind": kind, **fields})
        assert (status, answer) == (200, {"kind": kind})

    async def idle(self, server: Server) -> None:
        """Returns once the server holds nothing."""
        await eventually(lambda: self._is_idle(server))

    async def _is_idle(self, server: Server) -> bool:
        stats = await self.stats(server)
        return (stats["running"], stats["waiting"], stats["kv_usage"], stats["leases"]) == (0, 0, 0, 0)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """An HTTP client that opens a connection for each call."""
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
        yield Client(session)


async def eventually(claim: Callable[[], Any], limit_s: float = DEADLINE_S) -> None:
    """Waits until the claim holds; fails at the limit."""
    deadline_s = time.monotonic() + limit_s
    while not await claim():
        assert time.monotonic() < deadline_s, "did not come true in time"
        await asyncio.sleep(0.01)


async def exit_code(server: Server, limit_s: float = DEADLINE_S) -> int:
    """The code with which the process ends within the limit."""

    async def ended() -> bool:
        return server.process.poll() is not None

    await eventually(ended, limit_s)
    return int(server.process.returncode)


def prompt_of(name: str, tokens: int = 100) -> str:
    """A prompt of that many tokens, unlike any of another name from its first byte on."""
    return (f"{name} " * tokens * 4)[: tokens * 4]


def answer_to(prompt: str, tokens: int) -> str:
    """The right text."""
    return output_text(prompt_digest(prompt.encode()), tokens)


async def fill_cache(client: Client, server: Server, name: str) -> None:
    """Writes every free block again."""
    for part in range(2):
        await client.complete(server, prompt_of(f"{name} {part}", BLOCK * BLOCKS - 50), 1)


class TestHandoff:
    async def test_decode_continues_the_prompt_that_was_prefilled_elsewhere(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prompt = prompt_of("handed over")
        before = await client.metric(d, "vllm:nixl_bytes_transferred_sum")
        handoff = await client.prefill(p, prompt)
        assert handoff.pop("remote_prefill_cached_tokens") == 0
        answer = await client.complete(d, prompt, 8, kv_transfer_params=handoff)
        assert answer["choices"][0]["text"] == answer_to(prompt, 8)
        assert answer["usage"] == {
            "prompt_tokens": 100,
            "total_tokens": 108,
            "completion_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 100},
        }
        moved = await client.metric(d, "vllm:nixl_bytes_transferred_sum") - before
        assert moved == 7 * BLOCK * 16384
        await client.idle(p)
        await client.idle(d)

    async def test_the_answer_of_a_prefill_leg_has_the_fields_of_the_real_engine(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, _ = pair
        handoff = await client.prefill(p, prompt_of("fields"))
        request_id = handoff["remote_request_id"]
        assert request_id.startswith("cmpl-")
        assert handoff == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[*handoff["remote_block_ids"][0]]],
            "remote_engine_id": (await client.stats(p))["engine_id"],
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": p.side_channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 100,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }
        assert len(handoff["remote_block_ids"][0]) == 7
        await client.fault(p, "expire_leases")
        await client.idle(p)

    async def test_with_the_key_left_in_the_usage_says_what_the_prefill_instance_had_cached(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prompt = prompt_of("key left in")
        handoff = await client.prefill(p, prompt)
        answer = await client.complete(d, prompt, 2, kv_transfer_params=handoff)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert answer["choices"][0]["text"] == answer_to(prompt, 2)

    async def test_another_prompt_of_the_same_length_continues_what_was_prefilled(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        seen, told = prompt_of("seen by p"), prompt_of("told to d")
        handoff = await client.prefill(p, seen)
        assert await client.text(d, told, 6, kv_transfer_params=handoff) == answer_to(seen, 6)

    async def test_wrong_block_ids_give_wrong_text_with_status_200(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prompt, other = prompt_of("right blocks"), prompt_of("other blocks")
        handoff, wrong = await client.prefill(p, prompt), await client.prefill(p, other)
        mixed = handoff | {"remote_block_ids": wrong["remote_block_ids"]}
        assert await client.text(d, prompt, 6, kv_transfer_params=mixed) == answer_to(other, 6)
        await client.fault(p, "expire_leases")

    async def test_blocks_that_do_not_exist_are_computed_again(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        prompt = prompt_of("no such blocks")
        handoff = await client.prefill(p, prompt)
        handoff["remote_block_ids"] = [[BLOCKS + i for i in range(7)]]
        assert await client.text(d, prompt, 6, kv_transfer_params=handoff) == answer_to(prompt, 6)
        await client.fault(p, "expire_leases")

    async def test_an_expired_lease_is_harmless_until_the_blocks_are_reused(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        expired = await client.metric(p, "vllm:nixl_num_kv_expired_reqs_total")
        late = await client.metric(p, "vllm:nixl_num_notifications_after_expiry_total")
        failed = await client.metric(d, "vllm:nixl_num_failed_transfers_total")
        lucky, unlucky = prompt_of("expired only"), prompt_of("expired, reused")
        handoff = await client.prefill(p, lucky)
        await client.fault(p, "expire_leases")
        assert await client.text(d, lucky, 6, kv_transfer_params=handoff) == answer_to(lucky, 6)
        handoff = await client.prefill(p, unlucky)
        await client.fault(p, "expire_leases")
        await fill_cache(client, p, "someone else's")
        text = await client.text(d, unlucky, 6, kv_transfer_params=handoff)
        assert text != answer_to(unlucky, 6)
        assert await client.metric(p, "vllm:nixl_num_kv_expired_reqs_total") == expired + 2
        assert await client.metric(p, "vllm:nixl_num_notifications_after_expiry_total") == late + 2
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == failed

    async def test_a_lease_runs_out_by_itself(self, client: Client, start: Start) -> None:
        p = start("--lease-s", "0.2")
        await client.prefill(p, prompt_of("left behind"))
        await client.idle(p)
        assert await client.metric(p, "vllm:nixl_num_kv_expired_reqs_total") == 1

    async def test_roles_swap_without_a_word_to_the_engines(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        a, b = pair
        for number, (p, d) in enumerate([(a, b), (b, a), (a, b)]):
            prompt = prompt_of(f"swap {number}")
            handoff = await client.prefill(p, prompt)
            assert await client.text(d, prompt, 4, kv_transfer_params=handoff) == answer_to(prompt, 4)

    async def test_a_killed_prefill_instance_costs_a_recompute(self, client: Client, start: Start) -> None:
        p, d = start(), start()
        warm, cold = prompt_of("warm the pair"), prompt_of("too late")
        await client.text(d, warm, 2, kv_transfer_params=await client.prefill(p, warm))
        handoff = await client.prefill(p, cold)
        p.kill()
        began_s = time.monotonic()
        assert await client.text(d, cold, 6, kv_transfer_params=handoff) == answer_to(cold, 6)
        assert time.monotonic() - began_s < 1.0
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == 1

    async def test_an_unknown_peer_that_does_not_answer_costs_five_seconds(
        self, client: Client, start: Start
    ) -> None:
        p, d = start(), start()
        prompt = prompt_of("never met")
        handoff = await client.prefill(p, prompt)
        del handoff["remote_prefill_cached_tokens"]
        p.kill()
        began_s = time.monotonic()
        answer = await client.complete(d, prompt, 6, kv_transfer_params=handoff)
        assert 4.9 < time.monotonic() - began_s < 6.5
        assert answer["choices"][0]["text"] == answer_to(prompt, 6)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == 1


class TestDeath:
    async def test_a_malformed_hand_off_kills_the_engine_with_exit_code_0(
        self, client: Client, start: Start
    ) -> None:
        server = start()
        body = {"model": MODEL, "prompt": "x" * 400, "kv_transfer_params": {"do_remote_prefill": True}}
        status, answer = await client.post(server, "/v1/completions", body)
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        assert await client.health(server) == 503
        assert await exit_code(server, 1.5) == 0

    async def test_fewer_blocks_than_the_prompt_needs_kill_the_engine(
        self, client: Client, start: Start
    ) -> None:
        p, d = start(), start()
        handoff = await client.prefill(p, prompt_of("short", 96))
        body = {"model": MODEL, "prompt": prompt_of("short", 97), "kv_transfer_params": handoff}
        assert (await client.post(d, "/v1/completions", body))[0] == 500
        assert await exit_code(d, 1.5) == 0

    async def test_parameters_without_a_request_id_hang_until_the_client_leaves_which_kills_the_engine(
        self, client: Client, start: Start
    ) -> None:
        p, d = start(), start()
        prompt = prompt_of("no id")
        handoff = await client.prefill(p, prompt)
        del handoff["remote_request_id"]
        hanging = asyncio.ensure_future(client.text(d, prompt, 4, kv_transfer_params=handoff))

        async def waits() -> bool:
            return bool((await client.stats(d))["waiting"] == 1)

        await eventually(waits)
        assert await client.text(d, "another request", 2) == answer_to("another request", 2)
        assert not hanging.done()
        hanging.cancel()
        assert await exit_code(d, 2.0) == 0

    async def test_a_stream_under_way_is_told_that_the_engine_died(
        self, client: Client, start: Start
    ) -> None:
        server = start()
        long = asyncio.ensure_future(
            client.stream(server, "/v1/completions", {"prompt": "a long one", "max_tokens": 900})
        )

        await eventually(lambda: client.runs(server))
        body = {"model": MODEL, "prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}
        await client.post(server, "/v1/completions", body)
        events = await long
        assert json.loads(events[-2])["error"]["code"] == 500
        assert events[-1] == "[DONE]"

    async def test_a_server_dies_with_its_parent(self, profile_file: Path) -> None:
        program = (
            "import subprocess, sys\n"
            "child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
            "print(child.pid, child.stdout.readline(), flush=True)\n"
        )
        command = [sys.executable, "-m", "fulcrum_simulator.server", "--name", "a", "--model", MODEL]
        parent = subprocess.run(
            [sys.executable, "-c", program, *command, "--profile", str(profile_file)],
            capture_output=True,
            text=True,
            check=True,
        )
        child = int(parent.stdout.split()[0])

        async def gone() -> bool:
            return not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()

        await eventually(gone)


class TestClientGone:
    async def test_a_stream_whose_client_left_frees_its_blocks(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        aborted = await client.metric(server, "vllm:request_success_total", 'finished_reason="abort"')
        body = {"prompt": "a very long answer", "max_tokens": 900}
        stream = asyncio.ensure_future(client.stream(server, "/v1/completions", body))

        await eventually(lambda: client.runs(server))
        stream.cancel()
        await client.idle(server)
        now = await client.metric(server, "vllm:request_success_total", 'finished_reason="abort"')
        assert now == aborted + 1

    async def test_a_hand_off_whose_client_left_frees_the_blocks_of_the_prefill_instance(
        self, client: Client, start: Start
    ) -> None:
        p, d = start(), start("--lease-s", "30")
        prompt = prompt_of("left in the middle")
        handoff = await client.prefill(p, prompt)
        await client.fault(d, "hang")
        pulling = asyncio.ensure_future(client.text(d, prompt, 500, kv_transfer_params=handoff))
        await client.fault(d, "none")

        async def begun() -> bool:
            stats = await client.stats(d)
            return bool(stats["running"] or stats["waiting"])

        await eventually(begun)
        pulling.cancel()
        await client.idle(d)
        await client.idle(p)
        assert await client.metric(p, "vllm:nixl_num_kv_expired_reqs_total") == 0


class TestShutdown:
    async def test_draining_finishes_what_runs_and_answers_new_requests_with_abort(
        self, client: Client, start: Start
    ) -> None:
        server = start("--shutdown-timeout", "10")
        long = asyncio.ensure_future(client.text(server, "finish this", 400))

        await eventually(lambda: client.runs(server))
        server.process.send_signal(signal.SIGTERM)

        async def refuses() -> bool:
            answer = await client.complete(server, "refused", 4)
            return bool(answer["choices"][0]["finish_reason"] == "abort")

        await eventually(refuses)
        refused = await client.complete(server, "refused", 4, kv_transfer_params=PREFILL_ONLY)
        assert refused["choices"][0]["text"] == ""
        assert refused["kv_transfer_params"] is None
        assert await client.health(server) == 200
        assert await long == answer_to("finish this", 400)
        assert await exit_code(server) == 0

    async def test_blocks_stay_readable_while_draining(self, client: Client, start: Start) -> None:
        p, d = start("--shutdown-timeout", "10"), start()
        prompt = prompt_of("read while draining")
        handoff = await client.prefill(p, prompt)
        p.process.send_signal(signal.SIGTERM)
        assert await client.text(d, prompt, 4, kv_transfer_params=handoff) == answer_to(prompt, 4)
        assert await exit_code(p) == 0
        assert await client.metric(d, "vllm:nixl_num_failed_transfers_total") == 0

    async def test_without_a_timeout_what_runs_is_aborted_and_the_process_ends_within_a_second(
        self, client: Client, start: Start
    ) -> None:
        server = start()
        long = asyncio.ensure_future(client.complete(server, "cut short", 900))

        async def under_way() -> bool:
            return await client.metric(server, "vllm:generation_tokens_total") > 5

        await eventually(under_way)
        server.process.send_signal(signal.SIGTERM)
        answer = await long
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert answer_to("cut short", 900).startswith(choice["text"])
        assert await exit_code(server, 1.0) == 0

    async def test_a_drain_that_takes_too_long_never_answers_and_ends_when_the_client_leaves(
        self, client: Client, start: Start
    ) -> None:
        server = start("--shutdown-timeout", "0.2")
        long = asyncio.ensure_future(client.complete(server, "never answered", 1000))

        await eventually(lambda: client.runs(server))
        server.process.send_signal(signal.SIGTERM)
        done, _ = await asyncio.wait([long], timeout=0.6)
        assert not done
        assert server.process.poll() is None
        long.cancel()
        assert await exit_code(server, 2.0) == 0


class TestFaults:
    async def test_die_ends_the_process_at_once(self, client: Client, start: Start) -> None:
        server = start()
        await client.fault(server, "die")
        assert await exit_code(server, 1.0) == 1

    async def test_hang_answers_nothing_and_goes_on_after_none(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        await client.fault(server, "hang")
        calls = [
            asyncio.ensure_future(client.health(server)),
            asyncio.ensure_future(client.text(server, "waits", 2)),
        ]
        done, _ = await asyncio.wait(calls, timeout=0.3)
        assert not done
        await client.fault(server, "none")
        assert await asyncio.gather(*calls) == [200, answer_to("waits", 2)]

    async def test_slow_stretches_every_step(self, client: Client, pair: tuple[Server, Server]) -> None:
        server, _ = pair
        took_s = []
        for fields in ({"kind": "none"}, {"kind": "slow", "factor": 10}):
            await client.post(server, "/simulator/fault", fields)
            began_s = time.monotonic()
            await client.text(server, f"timed {fields['kind']}", 20)
            took_s.append(time.monotonic() - began_s)
        await client.fault(server, "none")
        assert took_s[1] > 4 * took_s[0]
        assert took_s[1] > 20 * 0.02

    async def test_refuse_answers_503_and_stays_healthy(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        await client.fault(server, "refuse")
        status, answer = await client.post(server, "/v1/completions", {"model": MODEL, "prompt": "no"})
        assert (status, answer["error"]["code"], await client.health(server)) == (503, 503, 200)
        await client.fault(server, "none")
        assert await client.text(server, "yes", 2) == answer_to("yes", 2)

    async def test_abort_draining_answers_like_an_engine_after_sigterm(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        server, _ = pair
        await client.fault(server, "abort_draining")
        answer = await client.complete(server, "no", 4)
        events = await client.stream(server, "/v1/chat/completions", {"messages": [{"content": "no"}]})
        await client.fault(server, "none")
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "abort")
        assert [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]] == [None, "abort"]

    async def test_fail_transfers_fails_as_many_pulls_as_told(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        p, d = pair
        await client.fault(d, "fail_transfers", count=2)
        cached = []
        for number in range(3):
            prompt = prompt_of(f"failing {number}")
            handoff = await client.prefill(p, prompt)
            del handoff["remote_prefill_cached_tokens"]
            answer = await client.complete(d, prompt, 2, kv_transfer_params=handoff)
            assert answer["choices"][0]["text"] == answer_to(prompt, 2)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 100]
        await client.fault(p, "expire_leases")

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"kind": "melt"}, "fault.kind (melt) is not one of die, hang, slow, refuse"),
            ({"kind": "slow"}, "fault.factor (None) is not a number above 0"),
            ({"kind": "slow", "factor": -1}, "fault.factor (-1) is not a number above 0"),
            ({"kind": "fail_transfers", "count": 0}, "fault.count (0) is not a whole number"),
            ({"kind": "hang", "for_s": 3}, "fault.for_s (3) is not a field of fault hang"),
        ],
    )
    async def test_a_bad_fault_is_refused_in_one_line(
        self, client: Client, pair: tuple[Server, Server], body: dict[str, Any], message: str
    ) -> None:
        status, answer = await client.post(pair[0], "/simulator/fault", body)
        assert status == 400
        assert answer["error"]["message"].startswith(message)


class TestAnswers:
    async def test_a_stream_has_one_event_a_token_then_usage_then_done(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        body = {"prompt": "stream this", "max_tokens": 5, "stream_options": {"include_usage": True}}
        *tokens, usage, done = await client.stream(pair[0], "/v1/completions", body)
        chunks = [json.loads(event)["choices"][0] for event in tokens]
        assert "".join(chunk["text"] for chunk in chunks) == answer_to("stream this", 5)
        assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, None, "length"]
        assert json.loads(usage)["choices"] == []
        assert json.loads(usage)["usage"]["completion_tokens"] == 5
        assert done == "[DONE]"

    async def test_a_prompt_seen_before_is_cached_up_to_its_last_block(
        self, client: Client, pair: tuple[Server, Server]
    ) -> None:
        prompt = prompt_of("seen before")
        first = await client.complete(pair[0], prompt, 1)
        second = await client.complete(pair[0], prompt, 1)
        salted = await client.complete(pair[0], prompt, 1, cache_salt="fresh")
        assert [
            answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second, salted)
        ] == [0, 96, 0]

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            pytest.param({"prompt": "x", "model": "other"}, 404, id="another model"),
            pytest.param({"prompt": ""}, 400, id="an empty prompt"),
            pytest.param({}, 400, id="no prompt"),
            pytest.param(
                {"prompt": "x" * 4 * BLOCK * BLOCKS}, 400, id="a prompt longer than the model takes"
            ),
            pytest.param({"prompt": "x", "max_tokens": 0}, 400, id="no tokens wanted"),
            pytest.param({"prompt": "x", "max_tokens": 10_000}, 400, id="more tokens than fit"),
            pytest.param({"prompt": "x", "max_tokens": "many"}, 400, id="tokens that are no number"),
            pytest.param({"prompt": "x", "n": 2}, 400, id="two choices"),
            pytest.param({"prompt": "x", "kv_transfer_params": [1]}, 400, id="parameters that are no object"),
            pytest.param({"prompt": "x", "stream_options": {}}, 400, id="stream options without a stream"),
        ],
    )
    async def test_a_bad_request_is_refused_with_an_error_object(
        self, client: Client, pair: tuple[Server, Server], body: dict[str, Any], status: int
    ) -> None:
        got, answer = await client.post(pair[0], "/v1/completions", {"model": MODEL, **body})
        assert (got, answer["error"]["code"]) == (status, status)
        assert set(answer["error"]) == {"message", "type", "param", "code"}

    @pytest.mark.parametrize("params", [{}, {"unknown": 1}, {"do_remote_prefill": False}, None])
    async def test_harmless_parameters_mean_a_plain_request(
        self, client: Client, pair: tuple[Server, Server], params: dict[str, Any] | None
    ) -> None:
        answer = await client.complete(pair[0], "plain", 2, kv_transfer_params=params)
        assert (answer["choices"][0]["text"], answer["kv_transfer_params"]) == (answer_to("plain", 2), None)


class TestBadStart:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            pytest.param(["--port", "70000"], "--port (70000) is not between 0 and 65535", id="port"),
            pytest.param(["--lease-s", "0"], "--lease-s (0.0) must be positive", id="lease"),
            pytest.param(["--flavour", "x"], "unrecognized arguments: --flavour x", id="argument"),
            pytest.param(["--profile", "none"], "profile (none) is not one of", id="profile"),
        ],
    )
    def test_bad_arguments_end_with_one_line_and_code_2(
        self, profile_file: Path, arguments: list[str], message: str
    ) -> None:
        process = launch(profile_file, *arguments)
        out, errors = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, out, errors.count("\n")) == (2, "", 1)
        assert errors.startswith(f"error: {message}")

    def test_a_port_in_use_ends_with_one_line_and_code_2(
        self, profile_file: Path, pair: tuple[Server, Server]
    ) -> None:
        port = pair[0].port
        process = launch(profile_file, "--port", str(port))
        out, errors = process.communicate(timeout=DEADLINE_S)
        expected = f"error: --port (127.0.0.1:{port}) cannot be bound: {os.strerror(98).lower()}\n"
        assert (process.returncode, out, errors) == (2, "", expected)
