"""`python -m fulcrum_router`: the router of one service, until SIGTERM.

It checks the options, starts logging and says whether the data path is compiled; `server.serve` does the
rest.
"""

import asyncio
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fulcrum_cluster.process import (
    announce_ready,
    die_with_parent,
    exit_if_stopped_while_starting,
    exit_with_error,
)
from fulcrum_core.errors import InvalidInput

if TYPE_CHECKING:
    from fulcrum_router.options import RouterOptions


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Bad arguments end the process with one line and exit code 2."""
    exit_if_stopped_while_starting()
    die_with_parent()
    # Imported here, because these modules take a second: see `exit_if_stopped_while_starting`.
    import uvloop

    from fulcrum_cluster.logs import configure_logging
    from fulcrum_router.options import parse_options

    try:
        options = parse_options(arguments)
        # The text of an exception may hold part of a prompt.
        configure_logging(level=options.log_level, exception_texts=False)
        uvloop.run(_run(options))
    except InvalidInput as error:
        exit_with_error(error)


async def _run(options: "RouterOptions") -> None:
    import structlog

    from fulcrum_cluster.logs import log_loop_errors
    from fulcrum_router.server import is_compiled, serve

    def announce(**ports: int) -> None:
        announce_ready(**ports)
        structlog.get_logger().info("router started", compiled=is_compiled())

    stopped = asyncio.Event()
    log_loop_errors(asyncio.get_running_loop())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await serve(options, stopped, announce=announce)


if __name__ == "__main__":
    main()
