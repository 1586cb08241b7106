"""Compares the router's CPU per request with vllm-router's, in one interleaved run over mock engines.

    ROUTER_BENCH=DIR python bench/router.py [--rounds N] [--secs S] [--scenarios ns,s16] [--against CHECKOUT]
                                            [--compiled]

DIR is a folder outside of this repository with the harness: bench.py, mockvllm.c and loadgen.c. The two C
programs are compiled, and vllm-router is installed with pip, once, in a cache folder.

Scenarios are the harness's: `ns` sends short prompts for one token on 32 connections; `s16` streams 16 tokens
on 64 connections. A run counts only if the mock engines got as many decode requests with KV transfer
parameters as prefill requests (up to 128 are in flight at the end), none recomputed and none invalid, and no
client got an error.

With `--against` the other system is the router of another checkout that has a `.venv`: before and after a
change, in one run. With `--compiled` the data path of this checkout is compiled first (`tools/compiled`).

Printed is the median, over the rounds, of the ratio of CPU per request in a round, and its range. Two builds
of one version of Python differ by a sixth: the image's is optimised from profiles (`make PYTHON=…` takes
another).

Exit code 2 without DIR. Exit code 1 if no round of a scenario is valid, or if the ratio in `ns` is not below
0.5 (vllm-router) or 1.03 (other checkout). Other scenarios are only printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.compiled.build import compile_packages

VLLM_ROUTER_PACKAGE = "vllm-router==0.1.17"
FULCRUM = "fulcrum"
PREFILL, DECODE = (7701, 7702), (7703, 7704)
CPU_RATIO_MAX, BAR_AGAINST = 0.5, 1.03
"""Highest accepted ratio to vllm-router, and to another checkout."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what is missing, run, and print the table; return the exit code."""
    options = _parser().parse_args(arguments)
    harness = find_harness()
    if harness is None:
        return 2
    cache = find_cache()
    build_programs(harness, cache)
    compiled = compile_packages() if options.compiled else None
    ours = describe_fulcrum(Path(sys.executable), port=7901, compiled=compiled)
    other = {}
    if options.against is None:
        _install_vllm_router(cache)
        other["vllm-router"] = _describe_vllm_router(cache)
    else:
        other["other checkout"] = describe_fulcrum(
            options.against.absolute() / ".venv" / "bin" / "python", port=7801
        )
    results = _run(harness, cache, options, {FULCRUM: ours, **other})
    return _report(results, *other, bar=CPU_RATIO_MAX if options.against is None else BAR_AGAINST)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=7, help="runs of each system and scenario (%(default)s)"
    )
    parser.add_argument("--secs", type=float, default=4.0, help="seconds of a run (%(default)s)")
    parser.add_argument("--scenarios", default="ns", help="of the harness, by commas (%(default)s)")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another checkout, in place of vllm-router"
    )
    parser.add_argument("--compiled", action="store_true", help="compile the data path of this checkout")
    return parser


def find_harness() -> Path | None:
    """Return the folder that ROUTER_BENCH names; None after an error message if it is not the harness."""
    folder = os.environ.get("ROUTER_BENCH")
    if folder and (Path(folder) / "bench.py").is_file():
        return Path(folder)
    print(f"error: ROUTER_BENCH ({folder or 'nothing'}) is not a folder with bench.py", file=sys.stderr)
    return None


def find_cache() -> Path:
    """Return the folder in which compiled programs and installed peers are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fulcrum" / "bench-router"


def build_programs(harness: Path, cache: Path) -> Path:
    """Compile the C programs of the harness; returns their folder."""
    programs = cache / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("mockvllm", "loadgen"):
        source, program = harness / f"{name}.c", programs / name
        if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["cc", "-O2", "-w", "-o", program, source, "-lm"], check=True)
    return programs


def _install_vllm_router(cache: Path) -> None:
    peer = cache / "venv"
    if not (peer / "bin" / "vllm-router").exists():
        venv.create(peer, with_pip=True)
        subprocess.run(
            [peer / "bin" / "python", "-m", "pip", "install", "--quiet", VLLM_ROUTER_PACKAGE], check=True
        )


def _run(
    harness: Path, cache: Path, options: argparse.Namespace, systems: Mapping[str, Any]
) -> list[dict[str, Any]]:
    described, out = cache / "systems.py", cache / "results.json"
    described.write_text(f"SUTS = {dict(systems)!r}\n", encoding="utf-8")
    command = [
        *(
            sys.executable,
            str(harness / "bench.py"),
            "--config",
            str(described),
            "--logs",
            str(cache / "logs"),
        ),
        *("--suts", ",".join(systems), "--scen", options.scenarios, "--out", str(out)),
        *("--rounds", str(options.rounds), "--secs", str(options.secs)),
    ]
    subprocess.run(command, check=True, env={**os.environ, "BENCH_BIN": str(cache / "bin")})
    results: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return results


def describe_fulcrum(python: Path, *, port: int, compiled: Path | None = None) -> dict[str, Any]:
    """Describe to the harness the router of the checkout to which this interpreter's environment belongs.

    `compiled` is a folder with both packages compiled for this interpreter, which then run instead.
    """

    def endpoints(ports: Sequence[int]) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in ports)

    static = ["--static", f"prefill={endpoints(PREFILL)}", f"decode={endpoints(DECODE)}"]
    command = [str(python), "-m", "fulcrum_router", "--service", "mock", "--port", str(port), *static]
    environment = {"PYTHONPATH": str(compiled)} if compiled else {}
    return {"port": port, "cmd": [command], "env": environment}


def _describe_vllm_router(cache: Path) -> dict[str, Any]:
    def urls(flag: str, ports: Sequence[int]) -> list[str]:
        return [part for port in ports for part in (flag, f"http://127.0.0.1:{port}")]

    command = [
        *(str(cache / "venv" / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", "7801"),
        *("--prometheus-port", "27601", "--log-level", "warning", "--worker-startup-check-interval", "1"),
        *("--vllm-pd-disaggregation", "--policy", "round_robin"),
        *urls("--prefill", PREFILL),
        *urls("--decode", DECODE),
    ]
    return {"port": 7801, "cmd": [command]}


def _report(results: Sequence[dict[str, Any]], other: str, *, bar: float) -> int:
    """Print medians over the rounds in which both systems had a valid run; return the exit code."""
    meets_limit = True
    for scenario in dict.fromkeys(run["scen"] for run in results):
        ours, theirs = (
            [run for run in results if run["scen"] == scenario and run["sut"] == name]
            for name in (FULCRUM, other)
        )
        pairs = [pair for pair in zip(ours, theirs, strict=True) if all(map(_is_valid, pair))]
        if not pairs:
            print(f"error: no round of {scenario} is valid", file=sys.stderr)
            return 1
        for name, runs in zip((FULCRUM, other), zip(*pairs, strict=True), strict=True):
            cpu, rate = (statistics.median(run[key] for run in runs) for key in ("cpu_us_req", "rps"))
            print(f"{scenario:6} {name:14} {cpu:7.1f} us CPU a request, {rate:7.0f} requests/s")
        ratios = [own["cpu_us_req"] / peer["cpu_us_req"] for own, peer in pairs]
        ratio = statistics.median(ratios)
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(pairs)} of {len(ours)} rounds valid"
        print(f"{scenario:6} ratio          {ratio:7.2f} ({spread})")
        meets_limit = meets_limit and (scenario != "ns" or ratio < bar)
    return 0 if meets_limit else 1


def _is_valid(run: dict[str, Any]) -> bool:
    """Whether each prefill leg had a decode leg, nothing was recomputed and nothing was invalid."""
    seen: dict[str, int] = run["mock"]
    prefills, decodes = seen.get("prefill_leg_total", 0), seen.get("decode_remote_total", 0)
    wrong = sum(seen.get(name, 0) for name in ("decode_recompute_total", "bad_total", "plain_total"))
    return run["err"] == 0 and prefills > 0 and abs(prefills - decodes) <= 128 and wrong == 0


if __name__ == "__main__":
    sys.exit(main())
