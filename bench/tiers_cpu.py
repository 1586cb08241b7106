"""What tiers cost the router: CPU a request with all of it on, against all of it off.

Two routers over the same eight fake engines get blocks of requests in turn, as fast as they serve. Off:
no tiers, mode Direct, admission Off, no API keys. On: three tiers with weights, a reserve and rate limits,
mode Queue, admission Enforce, prefix-aware dispatch, and an API key for each of 100 tenants. The requests
are the same: streams with prompts of 4 KiB, three quarters of which all requests of a tenant have in common,
and with 28 tokens, the mean answer of the recorded workload with the shortest ones (Azure Code).

    python bench/tiers_cpu.py [--rounds N] [--tokens N] [--compiled]

Exit code 1 if a request costs more than 1.25 times the CPU with all of it on, or if less than 95 % is served.
With `--compiled` the routers' data path is compiled, as in the image.
What a router does each second costs the same, so that a machine that is busy with other work shows more.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import aiohttp
import uvloop

from fulcrum_cli.terminal.logs import log_warnings_to_stderr
from fulcrum_cluster.process import die_with_parent
from fulcrum_core.values import AdmissionMode, OverloadAction
from fulcrum_router import server
from fulcrum_router.options import RouterOptions, parse_options
from fulcrum_router.policy.tiers.admission import TierAdmission
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_router.router import Router
from fulcrum_router.settings import AccessSettings, Tier
from tests.integration.router.fake_engines import (
    PROMPT,
    FakeEngine,
    ResponseWriter,
    make_kv_transfer_params,
    send_source_name,
)
from tests.integration.router.measured_router import read_cpu_s
from tools.compiled.build import compile_packages

BAR = 1.25
SERVED_MIN = 0.95
ENGINES, CONCURRENCY, BLOCK_S, TENANTS = 8, 16, 1.0, 100
SHARED_BYTES, OWN_BYTES = 3 * 1024, 1024
"""Of a prompt: what it has in common with others of its tenant, and the rest."""
USAGE = {
    "prompt_tokens": (SHARED_BYTES + OWN_BYTES) // 4,
    "prompt_tokens_details": {"cached_tokens": SHARED_BYTES // 4},
}
TIERS = "premium", "standard", "free"
ON = "on"


@dataclass
class BenchRouter:
    """One router process, and the processor time of a request in each block, in seconds."""

    name: str
    process: subprocess.Popen[str]
    port: int
    costs_s: list[float]
    sent: int = 0
    served: int = 0


@contextmanager
def run_router(name: str, ports: list[int], compiled: Path | None, keys: Path) -> Iterator[BenchRouter]:
    """Run a router over engines at these ports; `compiled`: a folder with its packages compiled."""
    half = len(ports) // 2
    static = [f"{role}=" + ",".join(f"127.0.0.1:{port}" for port in some)
              for role, some in (("prefill", ports[:half]), ("decode", ports[half:]))]  # fmt: skip
    command = [sys.executable, __file__, "--router", name, "--api-keys", str(keys), "--static", *static]
    folders = [str(compiled or ""), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield BenchRouter(name, process, json.loads(process.stdout.readline())["port"], [])
        finally:
            process.terminate()


@contextmanager
def keys_of_tenants() -> Iterator[Path]:
    """Yield a folder with a key of each tenant, as a Secret has them."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(TENANTS):
            digest = hashlib.sha256(make_key(number).encode()).hexdigest()
            Path(folder, f"tenant-{number}").write_text(f"{digest}\n", encoding="utf-8")
        yield Path(folder)


def make_key(tenant: int) -> str:
    """The API key of a tenant."""
    return f"key-of-tenant-{tenant}"


def make_body(number: int) -> bytes:
    """The body of a request."""
    shared = f"{number % TENANTS:016x}" * (SHARED_BYTES // 16)
    own = f"{number:016x}" * (OWN_BYTES // 16)
    return json.dumps({**PROMPT, "prompt": shared + own, "stream": True}).encode()


async def compute_prompt(response: ResponseWriter) -> None:
    """Script of a prefill leg; what its tenant has in common is in the prefix cache of every engine."""
    params = make_kv_transfer_params(response.engine)
    await response.json(200, {"choices": [{}], "usage": USAGE, "kv_transfer_params": params})


async def send_block(
    client: aiohttp.ClientSession, router: BenchRouter, numbers: Iterator[int]
) -> tuple[int, int]:
    """Send streams for some seconds; returns how many ended, and how many were served."""
    until_s, ended, served = time.monotonic() + BLOCK_S, 0, 0

    async def send() -> None:
        nonlocal ended, served
        while time.monotonic() < until_s:
            number = next(numbers)
            headers = {
                "authorization": f"Bearer {make_key(number % TENANTS)}",
                "content-type": "application/json",
            }
            url = f"http://127.0.0.1:{router.port}/v1/completions"
            async with client.post(url, data=make_body(number), headers=headers) as response:
                await response.read()
                ended += 1
                served += response.status == 200

    await asyncio.gather(*(send() for _ in range(CONCURRENCY)))
    return ended, served


async def check_key_is_needed(client: aiohttp.ClientSession, router: BenchRouter) -> None:
    """Check that the router has the settings of `turn_on`."""
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    async with client.post(url, data=make_body(0)) as response:
        assert response.status == 401, response.status


async def run(rounds: int, tokens: int, compiled: Path | None) -> int:
    """Measure and report; returns the exit code."""
    answer = send_source_name(tokens)
    engines = [FakeEngine(f"e{number}", compute_prompt, answer) for number in range(ENGINES)]
    servers = [await asyncio.start_server(engine.serve, "127.0.0.1", 0) for engine in engines]
    ports = [one.sockets[0].getsockname()[1] for one in servers]
    numbers = itertools.count()
    with (
        keys_of_tenants() as keys,
        run_router("off", ports, compiled, keys) as off,
        run_router(ON, ports, compiled, keys) as on,
    ):
        async with aiohttp.ClientSession() as client:
            await check_key_is_needed(client, on)
            for number in range(rounds + 1):  # the first round warms up
                for router in (off, on) if number % 2 else (on, off):
                    began_s = read_cpu_s(router.process.pid)
                    ended, served = await send_block(client, router, numbers)
                    if number:
                        router.costs_s.append((read_cpu_s(router.process.pid) - began_s) / ended)
                        router.sent, router.served = router.sent + ended, router.served + served
                for engine in engines:
                    engine.requests.clear()
        for one in servers:
            one.close()
        # The engines' connections end with the loop, which is no error here.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    return report(off, on)


def report(off: BenchRouter, on: BenchRouter) -> int:
    """Print the figures; returns the exit code."""
    for router in (off, on):
        print(
            f"{router.name:4} {1e6 * median(router.costs_s):7.1f} µs of CPU a request (median of "
            f"{len(router.costs_s)} blocks), {router.served} of {router.sent} requests served"
        )
    ratios = sorted(b / a for a, b in zip(off.costs_s, on.costs_s, strict=True))
    ratio, quarter = median(ratios), len(ratios) // 4
    is_met = ratio <= BAR and on.served >= SERVED_MIN * on.sent
    print(
        f"on / off {ratio:.3f} (median of the pairs; the middle half {ratios[quarter]:.3f} to "
        f"{ratios[-1 - quarter]:.3f}), bar {BAR} {'ok' if is_met else 'MISSED'}"
    )
    return int(not is_met)


# --- the router's process ------------------------------------------------------------------------------


def turn_on(router: Router) -> None:
    """Give a router API keys, prefix-aware dispatch, three tiers and all that these can have."""
    settings = router.settings
    assert settings is not None
    slo, patient = settings.default_tier.slo, TierAdmission(action=OverloadAction.QUEUE, max_queue_s=10.0)
    tiers = (
        Tier(TIERS[0], slo, -10, TierAdmission(sheddable=False), 10**9, Reserve(0.25, 10.0)),
        Tier(TIERS[1], slo, 0, patient, 10**9, weight=2),
        Tier(TIERS[2], slo, 0, TierAdmission(), 10**9),
    )
    changed = replace(
        settings,
        tiers={tier.name: tier for tier in tiers},
        tiers_by_tenant={f"tenant-{number}": tiers[number % len(tiers)] for number in range(TENANTS)},
        access=AccessSettings(requires_key=True),
        prefix_aware=True,
        admission=AdmissionMode.ENFORCE,
        prefill_ahead_s=0.5,
    )
    router.configure(changed, last_prefill_to_decode_s=None)


def serve_router(name: str, arguments: list[str]) -> None:
    """Run one router until it is ended."""
    configure = server.configure_statically

    def configure_all(router: Router, options: RouterOptions) -> None:
        configure(router, options)
        settings = router.settings
        assert settings is not None
        if name == ON:
            turn_on(router)
        else:
            router.configure(
                replace(settings, admission=AdmissionMode.OFF, prefill_ahead_s=math.inf, deflects=False),
                last_prefill_to_decode_s=None,
            )

    server.configure_statically = configure_all  # static routers have no store with tiers

    async def serve() -> None:
        def announce(**ports: int) -> None:
            print(json.dumps(ports), flush=True)

        await server.serve(parse_options(arguments), asyncio.Event(), announce=announce)

    die_with_parent()
    log_warnings_to_stderr()  # the ports alone go to standard output
    uvloop.run(serve())


def main() -> None:
    """Parse the arguments and run."""
    if sys.argv[1:2] == ["--router"]:
        serve_router(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each router (%(default)s)")
    parser.add_argument("--compiled", action="store_true", help="compile the routers' data path first")
    parser.add_argument("--tokens", type=int, default=28, help="of an answer (%(default)s)")
    given = parser.parse_args()
    compiled = compile_packages() if given.compiled else None
    sys.exit(asyncio.run(run(given.rounds, given.tokens, compiled)))


if __name__ == "__main__":
    main()
