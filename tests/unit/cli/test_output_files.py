"""Output files are complete or not there, and never replace an input."""

import re
from pathlib import Path

import pytest

from fulcrum_cli.output_files import check_outputs, replace_file, write_text_file
from fulcrum_core.errors import InvalidInput


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "out.json"
    path.write_text("old")
    return path


def test_a_file_is_replaced_at_the_end_with_its_mode_and_links(old: Path) -> None:
    old.chmod(0o600)
    link = old.with_name("link")
    link.symlink_to(old)
    with replace_file("--json", link) as file:
        file.write(b"new")
        assert old.read_text() == "old"
    assert (old.read_text(), old.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o600, True)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_after_an_exception_the_old_file_is_there_and_nothing_else(
    old: Path, failure: type[BaseException]
) -> None:
    def write() -> None:
        with replace_file("--json", old) as file:
            file.write(b"new")
            raise failure

    with pytest.raises(failure):
        write()
    assert (old.read_text(), list(old.parent.iterdir())) == ("old", [old])


def test_devices_are_written_directly() -> None:
    write_text_file("--json", Path("/dev/null"), "new")
    with pytest.raises(
        InvalidInput, match=r"--json \(/dev/full\) cannot be written: No space left on device"
    ):
        write_text_file("--json", Path("/dev/full"), "new")


def test_a_file_in_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--json \(.*\) cannot be written: No such file"):
        write_text_file("--json", tmp_path / "gone" / "out.json", "new")


def test_an_output_must_not_be_an_input_or_another_output(old: Path) -> None:
    link, new, null = old.with_name("link"), old.with_name("new"), Path("/dev/null")
    link.symlink_to(old)
    with pytest.raises(InvalidInput, match=re.escape(f"--json ({link}) must be another file than --trace")):
        check_outputs({"--json": link}, {"--trace": old})
    with pytest.raises(InvalidInput, match=re.escape(f"--plot ({new}) must be another file than --json")):
        check_outputs({"--json": new, "--plot": new}, {"--trace": old})
    check_outputs({"--json": null, "--plot": null, "--record": None}, {"--trace": old})
