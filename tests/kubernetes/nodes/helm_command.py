"""`helm` as the documentation writes it: the actions and flags that it uses, run by Helm's own library.

The library knows no `--reset-then-reuse-values`; the values of the release before are used instead.
"""

import argparse
import os
import sys

import yaml
from helm_python.config import Config


def main(arguments: list[str]) -> None:
    """Run one action; exit with Helm's error if it fails."""
    options = _parse(arguments)
    with Config(kubeconfig_path=os.environ["KUBECONFIG"], namespace=options.namespace) as config:
        try:
            _run(config, options)
        except Exception as error:
            sys.exit(f"helm {options.action}: {error}")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["install", "upgrade", "uninstall", "test", "rollback"])
    parser.add_argument("release")
    parser.add_argument("operand", nargs="?")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--reset-then-reuse-values", action="store_true", dest="reuse_values")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    return parser.parse_args(arguments)


def _run(config: Config, options: argparse.Namespace) -> None:
    release, values = options.release, _nest(options.settings)
    wait = "watcher" if options.wait else None
    match options.action:
        case "install":
            create = options.create_namespace
            config.install(options.operand, release, values, create_namespace=create, timeout=120, wait=wait)
        case "upgrade":
            reuse = options.reuse_values
            config.upgrade(options.operand, release, values, reuse_values=reuse, timeout=120, wait=wait)
        case "uninstall":
            config.uninstall(release, timeout=60, wait="watcher")
        case "test":
            config.test(release, timeout=60)
        case "rollback":
            config.rollback(release, timeout=120, wait="watcher")


def _nest(settings: list[str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for setting in settings:
        path, _, text = setting.partition("=")
        *parents, last = path.split(".")
        inside = values
        for name in parents:
            inside = inside.setdefault(name, {})  # type: ignore[assignment]  # --set only nests maps here
        inside[last] = text if last == "tag" else yaml.safe_load(text)
    return values


if __name__ == "__main__":
    main(sys.argv[1:])
