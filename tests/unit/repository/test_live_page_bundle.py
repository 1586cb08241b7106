"""The committed bundle of the live page is the one that its sources in web/ make."""

import hashlib
from pathlib import Path

from tests.paths import ROOT

BUNDLE = ROOT / "cli/fulcrum_cli/web/page"
SUMS = BUNDLE / "SHA256SUMS"


def list_files() -> list[Path]:
    """Return the sources of the bundle and its files."""
    web = ROOT / "web"
    sources = [path for path in web.iterdir() if path.is_file() and path.name != ".gitignore"]
    return [*sources, *(web / "src").iterdir(), *(path for path in BUNDLE.iterdir() if path != SUMS)]


def test_the_bundle_was_built_from_these_sources() -> None:
    """`make web` builds it again; that needs npm, which nothing else does."""
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(ROOT)}"
        for path in sorted(list_files())
    ]
    assert SUMS.read_text().splitlines() == sums
