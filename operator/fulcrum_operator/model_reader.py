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
from fulcrum_core.models import excerpt

HUB = "https://huggingface.co"
"""Where engines look unless `HF_ENDPOINT` names another place."""
LAST_WORDS_BYTES = 4096
"""What Kubernetes keeps of them."""

_LONGEST_BYTES = 4 * 2**20
"""A config.json is a few kilobytes."""
_TIMEOUT_S = 10.0
_PAUSES_S = (1.0, 4.0)
"""Between tries at a hub that does not answer, or answers that it cannot now."""
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_REFUSALS = {
    401: "it asks for a token: modelSource.tokenSecret names the Secret",
    403: "the token may not read it",
    404: "it has no such model or revision, or hides it from this token",
}


class Unreadable(Exception):
    """The reason, in one line."""


def main(argv: Sequence[str] | None = None) -> None:
    """Leave the excerpt, or the reason why there is none."""
    args = _parser().parse_args(argv)
    try:
        text, code = last_words(_read(args, os.environ)), 0
    except Unreadable as error:
        words = " ".join(str(error).split())
        text, code = words[: LAST_WORDS_BYTES // 4], 1  # a character takes four bytes at most
    print(text, flush=True)
    args.report.write_text(text, encoding="utf-8")
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="fulcrum_operator.model_reader", description="Reads a model's config.json.")
    add = parser.add_argument
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--folder", type=Path, help="folder of the model")
    place.add_argument("--model", help="name of the model at the hub (its address: HF_ENDPOINT; HF_TOKEN)")
    add("--revision", default="main", help="branch, tag or commit at the hub (default: main)")
    add("--report", type=Path, default=Path("/dev/termination-log"), help="file for the last words")
    return parser


def _read(args: argparse.Namespace, env: Mapping[str, str]) -> bytes:
    if args.folder is not None:
        return read_folder(args.folder)
    hub, token = env.get("HF_ENDPOINT") or HUB, env.get("HF_TOKEN", "")
    return read_hub(args.model, args.revision, hub=hub, token=token)


def read_folder(folder: Path) -> bytes:
    """The config.json of a model's folder.

    Raises:
        Unreadable: if there is none.
    """
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            return _short(file.read(_LONGEST_BYTES + 1), str(path))
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror or error}{_beside(folder)}") from error


def _beside(folder: Path) -> str:
    """What is there instead: the usual mistake is a folder too high, too low or misspelled."""
    there = folder if folder.is_dir() else folder.parent
    try:
        names = sorted(entry.name for entry in there.iterdir())[:5]
    except OSError:
        return ""
    return f"; {there} holds {', '.join(names)}" if names else f"; {there} is empty"


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
        Unreadable: if the hub does not give it.
    """
    if not _NAME.fullmatch(model):
        raise Unreadable(f"spec.model ({model}) is no name at a hub; modelSource says where else it is")
    url = f"{hub.rstrip('/')}/{model}/resolve/{quote(revision, safe='')}/config.json"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    why = ""
    with httpx.Client(headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as client:
        for wait_s in (*_PAUSES_S, None):
            try:
                return _fetched(client, url)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"{url}: {_words(error)}"
            if wait_s is not None:
                pause(wait_s)
    raise Unreadable(why)


def _fetched(client: httpx.Client, url: str) -> bytes:
    """Raises HTTPStatusError for what may pass, Unreadable for what will not."""
    with client.stream("GET", url) as answer:
        if answer.status_code in _REFUSALS:
            raise Unreadable(f"{url}: {_REFUSALS[answer.status_code]} (status {answer.status_code})")
        answer.raise_for_status()
        body = b""
        for chunk in answer.iter_bytes():
            body = _short(body + chunk, url)
        return body


def _words(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"answers with status {error.response.status_code}"
    return str(error) or type(error).__name__


def _short(body: bytes, where: str) -> bytes:
    if len(body) > _LONGEST_BYTES:
        raise Unreadable(f"{where}: is longer than a config.json ever is")
    return body


def last_words(body: bytes) -> str:
    """The excerpt of a config.json, as short as JSON can be.

    Raises:
        Unreadable: if it is none, or its excerpt is too long to be told.
    """
    try:
        config = json.loads(body)
    except ValueError as error:
        raise Unreadable("config.json is not JSON") from error
    if not isinstance(config, dict):
        raise Unreadable("config.json holds no object")
    try:
        text = json.dumps(excerpt(config), separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise Unreadable("config.json holds a number that is none") from error
    if len(text) > LAST_WORDS_BYTES:
        raise Unreadable(f"config.json: its excerpt takes {len(text)} bytes of {LAST_WORDS_BYTES}")
    return text


if __name__ == "__main__":
    main()
