"""Command line `fulcrum`, also `kubectl fulcrum`: declares the commands and their options.

The modules of a command are imported when it runs, so that `--help` is fast. A wrong option and every
`FulcrumError`, also that of a cluster that does not respond, end as one line on standard error and exit
code 2; Ctrl-C ends with exit code 130. Other exceptions are bugs and show a traceback.
"""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fulcrum_cli.program_name import program_name
from fulcrum_cli.terminal.printable import make_printable
from fulcrum_core.errors import FulcrumError, InvalidInput

app = typer.Typer(
    name="fulcrum",
    help="Adapt the split between prefill and decode instances to the load, while requests run.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    """Print the version and exit. `importlib.metadata` is slow, so it is imported only here."""
    if requested:
        from importlib.metadata import version

        print(f"{program_name()} {version('fulcrum')}")
        raise typer.Exit


@app.callback()
def global_options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Adapt the split between prefill and decode instances to the load, while requests run."""


ServiceArgument = Annotated[
    str | None, typer.Argument(help="Name of the service; optional if there is only one.")
]
InstanceArgument = Annotated[str, typer.Argument(help="Name of the instance.")]
OutputOption = Annotated[str | None, typer.Option("-o", "--output", help="Output format: json or yaml.")]
PrefixCachesOption = Annotated[
    bool,
    typer.Option("--prefix-caches", help="Simulate prefix caches; needs a workload with block ids."),
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Draw the run over time into this HTML file; needs fulcrum[plot].")
]
RecordOption = Annotated[
    Path | None, typer.Option(help="Write the live page's states to this file, for fulcrum web --replay.")
]
KubeconfigOption = Annotated[Path | None, typer.Option(help="Use the cluster of this kubeconfig.")]
ContextOption = Annotated[str | None, typer.Option(help="Use the cluster of this kubeconfig context.")]
NamespaceOption = Annotated[
    str | None, typer.Option("-n", "--namespace", help="Use this namespace of a cluster, not a local run.")
]


@app.command()
def play(
    load: Annotated[
        str | None,
        typer.Option(help="Shape of the load: moving (default), steady, bursty, tiers or tiers-flood."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay a recorded workload: our CSV, Azure, BurstGPT, Mooncake, Qwen Bailian or ServeGen."
        ),
    ] = None,
    speed: Annotated[float, typer.Option(help="Replay the trace this many times faster.")] = 1.0,
    scale: Annotated[
        float, typer.Option(help="Multiply the trace's arrival rate; lengths stay the same.")
    ] = 1.0,
    mode: Annotated[
        str | None, typer.Option(help="Autoscaling mode instead of the manifest's: Off, Advise or Auto.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--for", help="Duration of the load, e.g. 60s; by default until you quit.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the load and its prompts.")] = 1,
    port: Annotated[int, typer.Option(help="Port for clients; 0 means any free port.")] = 0,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Manifest to run instead of the shipped one.")
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="Do not show the live view.")] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Show the live view in the browser; prints the page's address.")
    ] = False,
    record: RecordOption = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the figures of the run to this file as JSON.")
    ] = None,
    kill_every: Annotated[str | None, typer.Option(help="Kill an engine at this interval, e.g. 5s.")] = None,
    flips: Annotated[
        int, typer.Option(help="Force this many flips, each as soon as the previous one is acknowledged.")
    ] = 0,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write the last frame of the live view to this file as SVG.")
    ] = None,
) -> None:
    """Run a service under load on this machine and watch its instances change roles."""
    from fulcrum_cli.commands.play import run
    from fulcrum_cli.play.options import parse_options

    options = parse_options(
        load=load, trace=trace, speed=speed, scale=scale, mode=mode, duration=duration, seed=seed, port=port,
        file=file, headless=headless, web=web, record=record, json=json, kill_every=kill_every, flips=flips,
        snapshot=snapshot,
    )  # fmt: skip
    raise typer.Exit(run(options))


@app.command()
def up(
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Manifest to run; optional with --engine vllm-cpu.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run the service as processes on this machine.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine instead of the manifest's: simulated (the default if it names none), or vllm-cpu "
            "(vLLM with a tiny model; needs `make engine`)."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port for clients; 0 means any free port.")] = 8000,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a file of SHA-256 digests for each tenant, instead of the Secret in "
            "spec.router.auth.apiKeys."
        ),
    ] = None,
) -> None:
    """Run the service of a manifest until Ctrl-C."""
    from fulcrum_cli.commands.up import run

    if not local:
        raise InvalidInput("--local", "not given", "is required: `up` starts local services only")
    run(file, engine=engine, port=port, api_keys=api_keys)


@app.command()
def plan(
    file: Annotated[Path, typer.Option("-f", "--file", help="Manifest to plan.")],
    model_config: Annotated[Path | None, typer.Option(help="The model's config.json, or its folder.")] = None,
    output: OutputOption = None,
) -> None:
    """Show what a manifest would start, and whether the model fits. Nothing is applied."""
    from fulcrum_cli.commands.plan import run

    raise typer.Exit(run(file, model_config=model_config, output=output))


@app.command()
def regret(
    service: ServiceArgument = None,
    file: Annotated[
        Path | None, typer.Option(help="Replay requests saved earlier, instead of asking the router.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save the recorded requests to this file.")] = None,
    record: RecordOption = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Engine profile: a name, or a YAML file of fulcrum profile."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Simulate with this many seeds, and show the spread.")] = 3,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Replay the last hour's requests with other policies, splits and numbers of instances."""
    from fulcrum_cli.commands.regret import RegretOptions, run
    from fulcrum_cli.target.selection import make_target_options

    run(
        RegretOptions(
            target=make_target_options(kubeconfig, context, namespace),
            service=service, file=file, save=save, record=record, profile=profile, seeds=seeds,
        )
    )  # fmt: skip


@app.command()
def bounds(
    trace: Annotated[Path, typer.Option(help="Recorded workload, in a format that `fulcrum play` reads.")],
    instances: Annotated[int, typer.Option(help="Number of instances.")],
    profile: Annotated[str, typer.Option(help="Engine profile: the name of a shipped one or a .yaml file.")],
    slo_ttft: Annotated[str, typer.Option(help="TTFT objective, e.g. 3s.")],
    slo_tpot: Annotated[str, typer.Option(help="TPOT objective, e.g. 100ms.")],
    attainment: Annotated[float, typer.Option(help="Percentage of requests that must meet both.")] = 90.0,
    resplit: Annotated[
        str | None,
        typer.Option(
            help="Also show the best fixed split, and the best split that changes at this interval."
        ),
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache", help="Leave out prompt tokens that an unlimited prefix cache would serve."
        ),
    ] = False,
    output: OutputOption = None,
) -> None:
    """Show the request rates of a workload that no scheduler can exceed within the SLO."""
    from fulcrum_cli.commands.bounds import run

    run(
        trace, instances=instances, profile=profile, slo_ttft=slo_ttft, slo_tpot=slo_tpot,
        attainment_percent=attainment, resplit=resplit, prefix_cache=prefix_cache, output=output,
    )  # fmt: skip


@app.command()
def simulate(
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded workload: our CSV, Azure, BurstGPT, Mooncake, Qwen Bailian or ServeGen."),
    ] = None,
    load: Annotated[
        str | None, typer.Option(help="Generated workload instead of a recorded one, e.g. phases-200s.")
    ] = None,
    instances: Annotated[int, typer.Option(help="Number of instances.")] = 8,
    profile: Annotated[str, typer.Option(help="Engine profile: a name or a YAML file.")] = "l70-h100-tp4",
    policy: Annotated[
        str, typer.Option(help="arrow, balanced, static:xPyD, static:best, clairvoyant or another.")
    ] = "balanced",
    compare: Annotated[
        str | None, typer.Option(help="Compare these policies, separated by commas, instead of running one.")
    ] = None,
    find_rate: Annotated[
        float | None,
        typer.Option(help="Find the highest rate at which this percentage of requests meets the SLO."),
    ] = None,
    check_rates: Annotated[
        bool, typer.Option("--check-rates", help="Run eight rates around the found one, too.")
    ] = False,
    scale: Annotated[float, typer.Option(help="Multiply the arrival rate; bursts keep their length.")] = 1.0,
    speed: Annotated[float, typer.Option(help="Divide all arrival times by this number.")] = 1.0,
    slo_ttft: Annotated[str, typer.Option(help="TTFT objective.")] = "3s",
    slo_tpot: Annotated[str, typer.Option(help="TPOT objective.")] = "100ms",
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same result.")] = 1,
    seeds: Annotated[
        int, typer.Option(help="Repeat with this many seeds, from --seed on, and show the spread.")
    ] = 1,
    state_age: Annotated[str, typer.Option(help="Age of the router's state at a decision.")] = "100ms",
    flip_latency: Annotated[
        str, typer.Option(help="Time from the write of a flip until the router applies it.")
    ] = "50ms",
    model_error: Annotated[
        float, typer.Option(help="Largest relative error of the router's first latency models.")
    ] = 0.2,
    step_noise: Annotated[
        float, typer.Option(help="Largest relative deviation of a step's duration.")
    ] = 0.05,
    failures: Annotated[float, typer.Option(help="Engine failures per instance and hour.")] = 0.0,
    prefix_caches: PrefixCachesOption = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file as JSON.")] = None,
    plot: PlotOption = None,
    record: RecordOption = None,
) -> None:
    """Simulate a service under a workload in virtual time: an hour takes seconds."""
    from fulcrum_cli.commands.simulate import run
    from fulcrum_cli.simulation.options import parse_options

    run(
        parse_options(
            trace=trace, load=load, instances=instances, profile=profile, policy=policy, compare=compare,
            find_rate=find_rate, check_rates=check_rates, scale=scale, speed=speed, slo_ttft=slo_ttft,
            slo_tpot=slo_tpot, seed=seed, seeds=seeds, state_age=state_age, flip_latency=flip_latency,
            model_error=model_error, step_noise=step_noise, failures=failures, json=json, plot=plot,
            record=record, prefix_caches=prefix_caches,
        )
    )  # fmt: skip


@app.command()
def profile(
    urls: Annotated[
        list[str],
        typer.Argument(help="Address of an idle engine, and of a second one to measure KV transfers."),
    ],
    model_config: Annotated[Path, typer.Option(help="The model's config.json, or its folder.")],
    out: Annotated[Path, typer.Option(help="Profile file to write, ending in .yaml.")],
    device: Annotated[
        str | None, typer.Option(help="Device of the engine, e.g. H100-SXM; checks the result.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices of the engine.")] = 1,
    token_budget: Annotated[int, typer.Option(help="The engine's max_num_batched_tokens.")] = 8192,
    max_seqs: Annotated[int, typer.Option(help="The engine's max_num_seqs.")] = 256,
    max_batch: Annotated[int, typer.Option(help="Largest batch to measure.")] = 32,
    repeats: Annotated[int, typer.Option(help="Measurements of each point; the median counts.")] = 3,
) -> None:
    """Measure a running engine and write an engine profile. Exit code 1 if a curve does not fit."""
    from fulcrum_cli.commands.measure_profile import ProfileOptions, run

    options = ProfileOptions(
        urls=tuple(urls), model_config=model_config, out=out, device=device, tensor_parallel=tensor_parallel,
        token_budget=token_budget, max_seqs=max_seqs, max_batch=max_batch, repeats=repeats,
    )  # fmt: skip
    raise typer.Exit(run(options))


@app.command()
def status(
    service: ServiceArgument = None,
    tiers: Annotated[bool, typer.Option("--tiers", help="Also show the requests of each QoS tier.")] = False,
    output: OutputOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Show services; for a single service also its instances and conditions."""
    from fulcrum_cli.commands.status import run
    from fulcrum_cli.target.selection import make_target_options

    run(make_target_options(kubeconfig, context, namespace), service, tiers=tiers, output=output)


@app.command()
def web(
    service: ServiceArgument = None,
    port: Annotated[int, typer.Option(help="Port of the page on this machine; 0 means any free port.")] = 0,
    record: RecordOption = None,
    replay: Annotated[
        Path | None, typer.Option(help="Show this file, which --record wrote, instead of a service.")
    ] = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Show a service live in the browser: roles, requests, queues, latencies and decisions."""
    from fulcrum_cli.commands.web import run, run_replay
    from fulcrum_cli.option_values import check_not_combined
    from fulcrum_cli.target.selection import make_target_options

    if replay is not None:
        target = {"--kubeconfig": kubeconfig, "--context": context, "--namespace": namespace}
        check_not_combined("--replay", {"SERVICE": service, "--record": record, **target})
        run_replay(replay, port=port)
    else:
        run(make_target_options(kubeconfig, context, namespace), service, port=port, record_file=record)


@app.command()
def flip(
    instance: InstanceArgument,
    to: Annotated[str, typer.Option(help="New role: Prefill or Decode.")],
    pin: Annotated[
        str | None,
        typer.Option(help="Keep the role for this long, e.g. 10m; without it an earlier pin is removed."),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait until the instance serves the role; exit code 1 if it does not in time."
        ),
    ] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Change the role of an instance. It is refused if a role would fall below its floor."""
    from fulcrum_cli.commands.flip import run
    from fulcrum_cli.target.selection import make_target_options

    code = run(make_target_options(kubeconfig, context, namespace), instance, to=to, pin=pin, wait=wait)
    raise typer.Exit(code)


@app.command()
def drain(
    instance: InstanceArgument,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait until no request is left on the instance; exit code 1 if the wait times out."
        ),
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Send new requests to the instance again.")] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Stop sending new requests to an instance, until --undo."""
    from fulcrum_cli.commands.drain import run
    from fulcrum_cli.target.selection import make_target_options

    raise typer.Exit(run(make_target_options(kubeconfig, context, namespace), instance, wait=wait, undo=undo))


@app.command()
def explain(
    service: ServiceArgument = None,
    limit: Annotated[int, typer.Option(help="Number of decisions; consecutive holds count as one.")] = 20,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Show the last role decisions with their reasons, and the flips that are refused now."""
    from fulcrum_cli.commands.explain import run
    from fulcrum_cli.target.selection import make_target_options

    run(make_target_options(kubeconfig, context, namespace), service, limit=limit)


@app.command()
def doctor(
    output: OutputOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Check for common problems and suggest what to do. Exit code 1 if there is a problem."""
    from fulcrum_cli.commands.doctor import run
    from fulcrum_cli.target.selection import make_target_options

    raise typer.Exit(run(make_target_options(kubeconfig, context, namespace), output=output))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(argv or ["--help"], prog_name=program_name(), standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        _exit_with_error(error.format_message())
    except FulcrumError as error:
        _exit_with_error(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except OSError as error:
        _exit_without_output(error)
    sys.exit(code or 0)


def _exit_with_error(message: str) -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    print(f"error: {make_printable(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(2)


def _exit_without_output(error: OSError) -> None:
    """Exit because standard output is closed, which needs no message, or full. Other errors are bugs."""
    if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        raise error
    _discard_output()
    if error.errno == errno.EPIPE:
        sys.exit(1)
    _exit_with_error(f"standard output cannot be written: {error.strerror}")


def _discard_output() -> None:
    """Discard what could not be written: else Python tries again at its end, and reports the error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
