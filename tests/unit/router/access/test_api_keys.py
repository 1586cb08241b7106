"""API keys: what a Secret may hold, what has no effect and why, and reading changed files."""

import hashlib
import os
from pathlib import Path

import pytest

from fulcrum_router.access.api_keys import MAX_KEY_BYTES, ApiKey, ApiKeys, KeyTable, parse_keys


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def entry(key: bytes, tenant: str, name: str = "") -> tuple[bytes, ApiKey]:
    raw = hashlib.sha256(key).digest()
    return raw, ApiKey(raw, tenant, name)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, KeyTable({}, ()), id="no tenant"),
        pytest.param(
            {"acme": f"# two keys\n{digest(b'a')} batch\n\n{digest(b'b').upper()}\n".encode()},
            KeyTable(dict([entry(b"a", "acme", "acme/batch"), entry(b"b", "acme")]), ()),
            id="names and comments are optional",
        ),
        pytest.param(
            {"acme": b"secret-key-itself", "globex": digest(b"g").encode()},
            KeyTable(dict([entry(b"g", "globex")]), ("line 1 of tenant acme is not a SHA-256 and a name",)),
            id="a key in place of its digest is not repeated in the message",
        ),
        pytest.param(
            {"acme": digest(b"a").encode(), "globex": f"{digest(b'a')}\n{digest(b'g')}".encode()},
            KeyTable(
                dict([entry(b"g", "globex")]), ("tenants acme and globex have the same key: it is refused",)
            ),
            id="a key of two tenants is nobody's",
        ),
        pytest.param(
            {"acme": b"\xff\xfe\x00"},
            KeyTable({}, ("line 1 of tenant acme is not a SHA-256 and a name",)),
            id="bytes that are no text",
        ),
    ],
)
def test_files_are_parsed(files: dict[str, bytes], expected: KeyTable) -> None:
    assert parse_keys(files) == expected


def test_a_key_is_found_by_its_text_and_not_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "acme").write_text(digest(b"a" * MAX_KEY_BYTES) + "\n" + digest(b"b" * 513))
    keys = ApiKeys(tmp_path)
    keys.read()
    presented = (b"a" * MAX_KEY_BYTES, digest(b"a" * MAX_KEY_BYTES).encode(), b"", b"b" * 513)
    assert [found and found.tenant for found in map(keys.find, presented)] == ["acme", None, None, None]


def test_a_changed_secret_is_read_as_the_kubelet_writes_it(tmp_path: Path) -> None:
    for version, key in (("..1", b"old"), ("..2", b"new")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "acme").write_text(digest(key))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "acme").symlink_to("..data/acme")
    keys = ApiKeys(tmp_path)
    keys.read()
    before = [keys.find(key) is not None for key in (b"old", b"new")]
    (tmp_path / "..data_tmp").symlink_to("..2")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    keys.read()
    assert (before, [keys.find(key) is not None for key in (b"old", b"new")]) == (
        [True, False],
        [False, True],
    )


def test_keys_stay_while_their_files_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "acme").write_text(digest(b"a"))
    keys = ApiKeys(tmp_path / "keys")
    keys.read()
    (tmp_path / "keys").rename(tmp_path / "gone")
    with pytest.raises(OSError, match="No such file"):
        keys.read()
    assert keys.find(b"a") is not None


def test_a_router_without_any_key_reports_that_all_are_refused(tmp_path: Path) -> None:
    empty = ApiKeys(tmp_path)
    empty.read()
    assert (ApiKeys().list_problems(), empty.list_problems()) == (
        ("this router was started without API keys: every request that needs one is refused",),
        ("the Secret holds no API key: every request that needs one is refused",),
    )
