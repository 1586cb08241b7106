"""API keys of clients: SHA-256 digests by tenant, read from the files of a mounted Secret and read again.

`callers` looks up the key of each request, `server` has the files read again. A file is named after its
tenant. Each of its lines is the SHA-256 of one key in hexadecimal digits and, after a space, optionally the
key's name. Empty lines and lines that begin with `#` are comments. The keys themselves are stored nowhere:
somebody who reads the Secret cannot send requests with it.
"""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

log = structlog.get_logger()

RELOAD_INTERVAL_S = 5.0
MAX_KEY_BYTES = 512
"""Longer keys are unknown, without hashing them."""
MAX_PROBLEMS = 8
"""Problems that are reported; the rest is left out."""
_LINE = re.compile(r"([0-9a-fA-F]{64})(?:[ \t]+([-._a-zA-Z0-9]{1,63}))?")


class ApiKey(NamedTuple):
    """A key by which a client is known."""

    digest: bytes
    tenant: str
    name: str
    """TENANT/NAME; empty for a key without a name."""


class KeyTable(NamedTuple):
    """The keys of all tenants."""

    keys: Mapping[bytes, ApiKey]
    """Keys by the digest of the key's text."""
    problems: tuple[str, ...]
    """Why lines or keys have no effect, for people; without any part of a key."""


NO_KEYS = KeyTable({}, ())


def parse_keys(files: Mapping[str, bytes]) -> KeyTable:
    """Parse the files, whose names are tenants. A key that two tenants have is refused."""
    keys, problems, shared = dict[bytes, ApiKey](), list[str](), set[bytes]()
    for tenant, content in sorted(files.items()):
        for number, line in enumerate(content.decode("latin-1").splitlines(), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            match = _LINE.fullmatch(text)
            if match is None:
                problems.append(f"line {number} of tenant {tenant} is not a SHA-256 and a name")
                continue
            digest = bytes.fromhex(match[1])
            known = keys.get(digest)
            if known is not None and known.tenant != tenant:
                shared.add(digest)
                problems.append(f"tenants {known.tenant} and {tenant} have the same key: it is refused")
                continue
            keys[digest] = ApiKey(digest, tenant, f"{tenant}/{match[2]}" if match[2] else "")
    for digest in shared:
        del keys[digest]
    return KeyTable(keys, tuple(problems[:MAX_PROBLEMS]))


class ApiKeys:
    """The current keys.

    Args:
        folder: Where the Secret is mounted; None: the router was started without keys.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._files: Mapping[str, bytes] = {}
        self.table = NO_KEYS

    def find(self, presented: bytes) -> ApiKey | None:
        """The key that a client presents, None if it is unknown.

        The time shows nothing of the stored keys: it depends on the digest of the presented key, which nobody
        can steer towards a stored one, and digests are compared in constant time.
        """
        if len(presented) > MAX_KEY_BYTES:
            return None
        digest = hashlib.sha256(presented).digest()
        found = self.table.keys.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def read(self) -> None:
        """Read the files; nothing happens if they are as before.

        Raises:
            OSError: if they cannot be read; the keys are as before.
        """
        if self._folder is None:
            return
        files = {
            path.name: path.read_bytes()
            for path in sorted(self._folder.iterdir())
            if not path.name.startswith(".") and path.is_file()  # `..data` is the kubelet's
        }
        if files == self._files:
            return
        self._files, self.table = files, parse_keys(files)
        for problem in self.table.problems:
            log.warning("API key without effect", reason=problem)
        log.info("API keys read", keys=len(self.table.keys), tenants=len(files))

    async def keep_fresh(self) -> None:
        """Read the files again and again, until cancelled."""
        while True:
            try:
                self.read()
            except OSError as error:  # the files are being replaced: tried again
                log.warning("cannot read the API keys; using those before", reason=error.strerror)
            await asyncio.sleep(RELOAD_INTERVAL_S)

    def list_problems(self) -> tuple[str, ...]:
        """Why keys have no effect, for people, given that the service asks for keys."""
        if self._folder is None:
            return ("this router was started without API keys: every request that needs one is refused",)
        if not self.table.keys:
            return (
                "the Secret holds no API key: every request that needs one is refused",
                *self.table.problems,
            )
        return self.table.problems
