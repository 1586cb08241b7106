"""`python -m fulcrum_router`: the router of one service, until SIGTERM."""

import asyncio
import signal
from collections.abc import Sequence

import uvloop

from fulcrum_cluster.logs import configure_logging, log_loop_errors
from fulcrum_cluster.process import announce_ready, die_with_parent, exit_with_error
from fulcrum_core.errors import InvalidInput
from fulcrum_router.options import RouterOptions, parse_options
from fulcrum_router.server import serve


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Bad arguments end the process with one line and exit code 2."""
    die_with_parent()
    try:
        options = parse_options(arguments)
        # The text of an exception may hold part of a prompt.
        configure_logging(level=options.log_level, exception_texts=False)
        uvloop.run(_run(options))
    except InvalidInput as error:
        exit_with_error(error)


async def _run(options: RouterOptions) -> None:
    stopped = asyncio.Event()
    log_loop_errors(asyncio.get_running_loop())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await serve(options, stopped, announce=announce_ready)


if __name__ == "__main__":
    main()
