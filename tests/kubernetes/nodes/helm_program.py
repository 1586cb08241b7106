"""Runs one Helm action, read as JSON from standard input: kubeconfig, namespace, action, arguments, options.

A process of its own, because the library starts Go's runtime, whose threads would stay in the tests' process.
"""

import json
import sys

from helm_python.config import Config


def main() -> None:
    """Print the resulting release as JSON, or exit with Helm's error."""
    request = json.load(sys.stdin)
    with Config(kubeconfig_path=request["kubeconfig"], namespace=request["namespace"]) as config:
        action = getattr(config, request["action"])
        try:
            print(json.dumps(action(*request["arguments"], **request["options"])))
        except Exception as error:
            sys.exit(f"helm {request['action']}: {error}")


if __name__ == "__main__":
    main()
