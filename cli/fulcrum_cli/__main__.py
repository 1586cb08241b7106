"""`fulcrum`, also as `kubectl fulcrum`: declares the commands.

What they do is imported when one is run, so that `--help` is quick.

Whatever a user got wrong ends as one line on standard error and exit code 2.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fulcrum_cli.program_name import program_name
from fulcrum_core.errors import FulcrumError, InvalidInput

app = typer.Typer(
    name="fulcrum",
    help="Keeps the split between prefill and decode right while requests run.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(requested: bool) -> None:
    """Prints the version and leaves; looked up only when asked for, as the look-up takes its time."""
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
    """Keeps the split between prefill and decode right while requests run."""


ServiceArgument = Annotated[
    str | None, typer.Argument(help="Name of the service; not needed where only one runs.")
]
InstanceArgument = Annotated[str, typer.Argument(help="Name of the instance.")]
OutputOption = Annotated[str | None, typer.Option("-o", "--output", help="json or yaml.")]
KubeconfigOption = Annotated[Path | None, typer.Option(help="A cluster, by this kubeconfig.")]
ContextOption = Annotated[str | None, typer.Option(help="A cluster, by this context of the kubeconfig.")]
NamespaceOption = Annotated[
    str | None, typer.Option("-n", "--namespace", help="A cluster, in it this namespace.")
]


@app.command()
def play(
    load: Annotated[
        str | None, typer.Option(help="Shape of the load: moving (the default), steady or bursty.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A recorded workload: CSV of arrival_s, input_tokens, output_tokens; or gzip."),
    ] = None,
    speed: Annotated[float, typer.Option(help="Replay the recording so many times as fast.")] = 1.0,
    scale: Annotated[float, typer.Option(help="Multiply the rate of arrivals; lengths never change.")] = 1.0,
    mode: Annotated[str | None, typer.Option(help="Off, Advise or Auto, in place of the manifest's.")] = None,
    duration: Annotated[
        str | None, typer.Option("--for", help="How long the load lasts, such as 60s; else until you quit.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the load and its prompts.")] = 1,
    port: Annotated[int, typer.Option(help="Port for clients; 0: any free one.")] = 0,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="A manifest in place of the built-in one.")
    ] = None,
    headless: Annotated[bool, typer.Option("--headless", help="No live view.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures of the run to this file.")] = None,
    kill_every: Annotated[str | None, typer.Option(help="Kill an engine every so often, such as 5s.")] = None,
    flips: Annotated[
        int, typer.Option(help="Force so many flips, each as soon as the last is acknowledged.")
    ] = 0,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write the last picture of the live view as SVG.")
    ] = None,
) -> None:
    """Run a service under load and watch it change roles."""
    from fulcrum_cli.commands.play import run
    from fulcrum_cli.play.options import parse_options

    options = parse_options(
        load=load, trace=trace, speed=speed, scale=scale, mode=mode, duration=duration, seed=seed, port=port,
        file=file, headless=headless, json=json, kill_every=kill_every, flips=flips, snapshot=snapshot,
    )  # fmt: skip
    raise typer.Exit(run(options))


@app.command()
def up(
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="The manifest; not needed with --engine.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="As processes on this machine.")] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            help="vllm-cpu: vLLM with a tiny model, as make engine made them, in place of the manifest's."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port for clients; 0: any free one.")] = 8000,
) -> None:
    """Bring up the service of a manifest until Ctrl-C."""
    from fulcrum_cli.commands.up import run

    if not local:
        raise InvalidInput("--local", "not given", "is needed: only local services can be brought up")
    run(file, engine=engine, port=port)


@app.command()
def plan(
    file: Annotated[Path, typer.Option("-f", "--file", help="The manifest.")],
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, or the folder that holds it.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Say what a manifest would start, and whether the model fits. Nothing is applied."""
    from fulcrum_cli.commands.plan import run

    raise typer.Exit(run(file, model_config=model_config, output=output))


@app.command()
def status(
    service: ServiceArgument = None,
    output: OutputOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Show services: roles, phases, conditions. Of one service every instance."""
    from fulcrum_cli.commands.status import run
    from fulcrum_cli.target.selection import make_target_options

    run(make_target_options(kubeconfig, context, namespace), service, output=output)


@app.command()
def flip(
    instance: InstanceArgument,
    to: Annotated[str, typer.Option(help="Prefill or Decode, in any case.")],
    pin: Annotated[str | None, typer.Option(help="Keep it there so long, such as 10m.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it plays the role; exit code 1 if not.")
    ] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Give an instance the other role, now. The floors of the service stand above it."""
    from fulcrum_cli.commands.flip import run
    from fulcrum_cli.target.selection import make_target_options

    code = run(make_target_options(kubeconfig, context, namespace), instance, to=to, pin=pin, wait=wait)
    raise typer.Exit(code)


@app.command()
def drain(
    instance: InstanceArgument,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until no request is left on it; exit code 1 if not.")
    ] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take new work again.")] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Give an instance no new work, until --undo takes that back."""
    from fulcrum_cli.commands.drain import run
    from fulcrum_cli.target.selection import make_target_options

    raise typer.Exit(run(make_target_options(kubeconfig, context, namespace), instance, wait=wait, undo=undo))


@app.command()
def explain(
    service: ServiceArgument = None,
    limit: Annotated[int, typer.Option(help="How many; a run of held ones is one.")] = 20,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Tell the last decisions and why, and what is refused now."""
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
    """Look for the usual troubles and say what to do. Exit code 1 if there is a problem."""
    from fulcrum_cli.commands.doctor import run
    from fulcrum_cli.target.selection import make_target_options

    raise typer.Exit(run(make_target_options(kubeconfig, context, namespace), output=output))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(argv or ["--help"], prog_name=program_name(), standalone_mode=False)
    except typer.TyperException as error:
        _exit_with_error(error.format_message())
    except FulcrumError as error:
        _exit_with_error(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code or 0)


def _exit_with_error(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
