"""`python -m fulcrum_autoscaler`: the autoscaler process, which `program` runs.

It first sees to it that a signal during the start ends the process at once, and imports the rest after that.
"""

from collections.abc import Sequence

from fulcrum_cluster.process import exit_if_stopped_while_starting


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Invalid arguments print one line on stderr and exit with code 2."""
    exit_if_stopped_while_starting()
    # Imported here, because its modules take a second: see `exit_if_stopped_while_starting`.
    from fulcrum_autoscaler import program

    program.main(argv)


if __name__ == "__main__":
    main()
