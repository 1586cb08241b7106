"""Bad input: the fuzz targets of `tests/integration/fuzz`, for a longer time than in `make test`.

    python bench/fuzz.py [--minutes N] [--seed N]

Prints the inputs and outcomes of each target. A failing input is printed, too: it belongs into the corpus of
its target, with what must become of it. Exit code 1 if there is one.
"""

import argparse
import subprocess
import sys

TARGETS = "tests/integration/fuzz"
TARGET_COUNT = 8


def main() -> None:
    """Run all targets one after another, each for its share of the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="time of all targets (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the run (default: a new one, printed)"
    )
    given = parser.parse_args()
    seconds = given.minutes * 60 / TARGET_COUNT
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        TARGETS,
        f"--fuzz-seconds={seconds}",
        f"--timeout={seconds + 300}",
    ]
    if given.seed is not None:
        command.append(f"--seed={given.seed}")
    sys.exit(min(1, subprocess.run(command, check=False).returncode))


if __name__ == "__main__":
    main()
