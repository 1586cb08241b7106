"""`python -m fulcrum_operator.model_reader`: reads a model's config.json where the engines find the model.

It runs once, in a pod of its own beside the engines: what mounts the claim and holds the hub's token is that
pod, and never the operator. Its last words are the answer: with exit code 0 the excerpt as JSON, with 1 one
line that says why there is none.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import httpx

from fulcrum_cluster.process import ArgumentParser
from fulcrum_core.models import excerpt_config

DEFAULT_HUB_URL = "https://huggingface.co"
"""Where engines look unless `HF_ENDPOINT` names another place."""
REPORT_BYTES_MAX = 4096
"""What Kubernetes keeps of them."""

_CONFIG_BYTES_MAX = 4 * 2**20
"""A config.json is a few kilobytes."""
_TIMEOUT_S = 10.0
_RETRY_PAUSES_S = (1.0, 4.0)
"""Between tries at a hub that does not answer, or answers that it cannot now."""
_HUB_MODEL_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_PERMANENT_ERRORS = {
    401: "it asks for a token: modelSource.tokenSecret names the Secret",
    403: "the token may not read it",
    404: "it has no such model or revision, or hides it from this token",
}


class ConfigUnreadable(Exception):
    """The reason, in one line."""


def main(argv: Sequence[str] | None = None) -> None:
    """Leave the excerpt, or the reason why there is none."""
    args = _parser().parse_args(argv)
    try:
        text, code = excerpt_report(_read(args, os.environ)), 0
    except ConfigUnreadable as error:
        reason = " ".join(str(error).split())
        text, code = reason[: REPORT_BYTES_MAX // 4], 1  # a character takes four bytes at most
    print(text, flush=True)
    args.report.write_text(text, encoding="utf-8")
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="fulcrum_operator.model_reader", description="Reads a model's config.json.")
    add = parser.add_argument
    model_location = parser.add_mutually_exclusive_group(required=True)
    model_location.add_argument("--folder", type=Path, help="folder of the model")
    model_location.add_argument(
        "--model", help="name of the model at the hub (its address: HF_ENDPOINT; HF_TOKEN)"
    )
    add("--revision", default="main", help="branch, tag or commit at the hub (default: main)")
    add("--report", type=Path, default=Path("/dev/termination-log"), help="file for the last words")
    return parser


def _read(args: argparse.Namespace, env: Mapping[str, str]) -> bytes:
    if args.folder is not None:
        return read_folder(args.folder)
    hub, token = env.get("HF_ENDPOINT") or DEFAULT_HUB_URL, env.get("HF_TOKEN", "")
    return read_hub(args.model, args.revision, hub=hub, token=token)


def read_folder(folder: Path) -> bytes:
    """The config.json of a model's folder.

    Raises:
        ConfigUnreadable: if there is none.
    """
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            return _check_length(file.read(_CONFIG_BYTES_MAX + 1), str(path))
    except OSError as error:
        raise ConfigUnreadable(f"{path}: {error.strerror or error}{_describe_folder(folder)}") from error


def _describe_folder(folder: Path) -> str:
    """What is there instead: the usual mistake is a folder too high, too low or misspelled."""
    existing = folder if folder.is_dir() else folder.parent
    try:
        names = sorted(entry.name for entry in existing.iterdir())[:5]
    except OSError:
        return ""
    return f"; {existing} holds {', '.join(names)}" if names else f"; {existing} is empty"


def read_hub(
    model: str,
    revision: str,
    *,
    hub: str,
    token: str = "",
    pause: Callable[[float], None] = time.sleep,
) -> bytes:
    """The config.json of a model at the hub.

    Args:
        model: As the hub calls it.
        revision: Branch, tag or commit.
        hub: Its address.
        token: What it asks for; empty: nothing.
        pause: Waits so many seconds between two tries.

    Raises:
        ConfigUnreadable: if the hub does not give it.
    """
    if not _HUB_MODEL_NAME.fullmatch(model):
        raise ConfigUnreadable(f"spec.model ({model}) is no name at a hub; modelSource says where else it is")
    url = f"{hub.rstrip('/')}/{model}/resolve/{quote(revision, safe='')}/config.json"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    reason = ""
    with httpx.Client(headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as client:
        for wait_s in (*_RETRY_PAUSES_S, None):
            try:
                return _fetch(client, url)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = f"{url}: {_describe_error(error)}"
            if wait_s is not None:
                pause(wait_s)
    raise ConfigUnreadable(reason)


def _fetch(client: httpx.Client, url: str) -> bytes:
    """Raises HTTPStatusError for what may pass, ConfigUnreadable for what will not."""
    with client.stream("GET", url) as response:
        if response.status_code in _PERMANENT_ERRORS:
            raise ConfigUnreadable(
                f"{url}: {_PERMANENT_ERRORS[response.status_code]} (status {response.status_code})"
            )
        response.raise_for_status()
        body = b""
        for chunk in response.iter_bytes():
            body = _check_length(body + chunk, url)
        return body


def _describe_error(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"answers with status {error.response.status_code}"
    return str(error) or type(error).__name__


def _check_length(body: bytes, where: str) -> bytes:
    if len(body) > _CONFIG_BYTES_MAX:
        raise ConfigUnreadable(f"{where}: is longer than a config.json ever is")
    return body


def excerpt_report(body: bytes) -> str:
    """The excerpt of a config.json, as short as JSON can be.

    Raises:
        ConfigUnreadable: if it is none, or its excerpt is too long to be told.
    """
    try:
        config = json.loads(body)
    except ValueError as error:
        raise ConfigUnreadable("config.json is not JSON") from error
    if not isinstance(config, dict):
        raise ConfigUnreadable("config.json holds no object")
    try:
        text = json.dumps(excerpt_config(config), separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ConfigUnreadable("config.json holds a number that is none") from error
    if len(text) > REPORT_BYTES_MAX:
        raise ConfigUnreadable(f"config.json: its excerpt takes {len(text)} bytes of {REPORT_BYTES_MAX}")
    return text


if __name__ == "__main__":
    main()
