"""`python -m fulcrum_cli.local.exec_with_parent PROGRAM …`: exec a program that ends with its parent process.

For programs that are not ours, such as vLLM: they would go on running after `fulcrum up` was killed.
Fulcrum's own programs call `fulcrum_cluster.process.die_with_parent` themselves.
"""

import os
import sys

from fulcrum_cluster.process import die_with_parent, exit_with_error


def main() -> None:
    """Replace this process by the program; on an error exit with code 2."""
    if len(sys.argv) < 2:
        exit_with_error("PROGRAM (not given) is required")
    die_with_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        exit_with_error(f"{sys.argv[1]} cannot be started: {(error.strerror or 'unknown error').lower()}")


if __name__ == "__main__":
    main()
