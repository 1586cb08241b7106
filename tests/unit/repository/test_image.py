"""The Dockerfile and the builder without Docker (`tools/image`) make the same image."""

import re

import pytest

from tests.paths import ROOT
from tools.image.build import EXTRA_FILES, USER, parse_image_name

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions(name: str) -> list[str]:
    """Return the arguments of every instruction of this name, in order."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(name).strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_base_image_is_pinned_and_overridable() -> None:
    base, *_ = instructions("ARG")
    assert re.fullmatch(r"BASE=[a-z0-9./:-]+@sha256:[0-9a-f]{64}", base)
    assert {stage.split()[0] for stage in instructions("FROM")} == {"${BASE}"}


def test_image_runs_as_an_unprivileged_user() -> None:
    assert instructions("USER") == [USER]
    assert USER.split(":") == ["65532", "65532"]
    assert USER.split(":")[0] in EXTRA_FILES["etc/passwd"]


def test_copied_paths_exist_and_pass_dockerignore() -> None:
    here = [word for copy in instructions("COPY") if "--from" not in copy for word in copy.split()[:-1]]
    assert [name for name in here if not (ROOT / name).exists()] == []
    let_through = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    assert {name.rstrip("/") for name in here} == let_through


def test_every_package_is_installed_by_hash() -> None:
    installs = re.findall(r"pip [^&]*?install (.*?)(?: &&|$)", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)
    assert installs
    assert [each for each in installs if "--require-hashes" not in each and "--no-index" not in each] == [], (
        "only our own wheel has no hash"
    )


def test_no_part_of_an_installed_package_is_removed() -> None:
    assert "site-packages" not in DOCKERFILE


@pytest.mark.parametrize(
    ("tag", "name"),
    [
        pytest.param("1", "localhost/fulcrum:1", id="a tag only"),
        pytest.param(
            "registry.example:5000/team/fulcrum:v1.2",
            "registry.example:5000/team/fulcrum:v1.2",
            id="a full name",
        ),
    ],
)
def test_image_name_is_parsed_from_a_tag_or_a_full_name(tag: str, name: str) -> None:
    assert parse_image_name(tag) == name


@pytest.mark.parametrize("tag", ["", "fulcrum:1", "localhost/fulcrum", "localhost/fulcrum:", "a b"])
def test_invalid_image_tag_is_refused_in_one_line(tag: str) -> None:
    with pytest.raises(
        SystemExit, match=r"^error: TAG \(.*\) must be a tag such as 1, or a full name such as [^\n]*$"
    ):
        parse_image_name(tag)
