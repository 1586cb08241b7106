"""One Helm action, read as JSON from standard input: kubeconfig, namespace, action, arguments, options.

A process of its own, because the library brings Go's runtime, whose threads would stay in the tests' process.
"""

import json
import sys

from helm_python.config import Config


def main() -> None:
    """Prints the release that the action gave, or fails with Helm's own words."""
    asked = json.load(sys.stdin)
    with Config(kubeconfig_path=asked["kubeconfig"], namespace=asked["namespace"]) as config:
        action = getattr(config, asked["action"])
        try:
            print(json.dumps(action(*asked["arguments"], **asked["options"])))
        except Exception as error:
            sys.exit(f"helm {asked['action']}: {error}")


if __name__ == "__main__":
    main()
