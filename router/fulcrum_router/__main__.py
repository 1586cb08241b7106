"""`python -m fulcrum_router`: the router of one service, until SIGTERM."""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import structlog
import uvloop

from fulcrum_cluster.process import announce_ready, die_with_parent, exit_with_error
from fulcrum_core.errors import InvalidInput
from fulcrum_router.options import RouterOptions, parse_options
from fulcrum_router.server import serve


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Bad arguments end the process with one line and exit code 2."""
    die_with_parent()
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    try:
        uvloop.run(_run(parse_options(arguments)))
    except InvalidInput as error:
        exit_with_error(error)


async def _run(options: RouterOptions) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await serve(options, stopped, announce=announce_ready)


if __name__ == "__main__":
    main()
