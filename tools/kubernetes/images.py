"""Container images without a registry, a daemon or a build tool: tar files in the format of `docker save`.

`pause` is what a node needs; `python` packs the interpreter that runs this module, or a virtual environment,
at the paths it has here, with the shared libraries that it loads. Import with `ctr -n k8s.io images import`.
"""

import fnmatch
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

# Parts of an installed Python that no workload loads: two thirds of its size.
NOT_NEEDED = {"__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"}
APPLETS = (
    "sh",
    "cat",
    "echo",
    "env",
    "hostname",
    "httpd",
    "id",
    "ls",
    "mkdir",
    "nc",
    "ps",
    "sleep",
    "touch",
    "wget",
)
LOOP = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"


def pause(target: Path) -> None:
    """The image that holds a pod's network; as it has a shell and wget, tests use it for small pods too."""
    names = ["localhost/pause:1", "localhost/busybox:1"]
    image(target, names, [layer(_busybox())], {"Entrypoint": ["/bin/sh", "-c", LOOP]})


def python(target: Path, name: str, *, environment: Path | None = None, user: str = "65532:65532") -> None:
    """An image with this interpreter and, if given, a virtual environment made with it."""
    base = Path(sys.base_prefix)
    interpreter = (environment or base) / "bin/python3"
    standard = [*_tree(base / "bin", only="python3*"), *_tree(base / "lib", without={"site-packages"})]
    layers = [layer([*_busybox(), *_with_libraries(standard)])]
    if environment:
        layers.append(layer(_with_libraries(list(_tree(environment)))))
    variables = [f"PATH={interpreter.parent}:/bin", "PYTHONDONTWRITEBYTECODE=1"]
    image(target, [name], layers, {"Env": variables, "User": user, "Cmd": [str(interpreter)]})


Entry = tuple[str, Path | str]  # name in the image; a file here, or where a link points to


def layer(entries: Iterable[Entry]) -> bytes:
    """A layer as an uncompressed tar file: the same entries give the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        scratch = tarfile.TarInfo("tmp")
        scratch.type, scratch.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(scratch)
        for name, source in dict(sorted(entries, key=lambda entry: entry[0])).items():
            info = tarfile.TarInfo(name.lstrip("/"))
            if isinstance(source, str):
                info.type, info.linkname = tarfile.SYMTYPE, source
                tar.addfile(info)
            else:
                info.size, info.mode = (
                    source.stat().st_size,
                    0o755 if source.stat().st_mode & 0o111 else 0o644,
                )
                with source.open("rb") as content:
                    tar.addfile(info, content)
    return buffer.getvalue()


def image(target: Path, names: list[str], layers: list[bytes], settings: dict[str, object]) -> None:
    digests = [hashlib.sha256(content).hexdigest() for content in layers]
    config = json.dumps({
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux", "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
    }).encode()  # fmt: skip
    manifest = [
        {"Config": "config.json", "RepoTags": names, "Layers": [f"{digest}.tar" for digest in digests]}
    ]
    with tarfile.open(target, "w") as tar:
        files = {f"{digest}.tar": content for digest, content in zip(digests, layers, strict=True)}
        for name, content in (
            files | {"config.json": config, "manifest.json": json.dumps(manifest).encode()}
        ).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _busybox() -> Iterator[Entry]:
    busybox = shutil.which("busybox", path="/bin:/usr/bin:/usr/local/bin")
    if busybox is None:
        raise FileNotFoundError("busybox")
    yield from _with_libraries([("bin/busybox", Path(busybox))])
    for applet in APPLETS:
        yield f"bin/{applet}", "busybox"


def _tree(root: Path, *, only: str = "*", without: Set[str] = frozenset()) -> Iterator[Entry]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_NEEDED | without]
        links = [name for name in folders if Path(folder, name).is_symlink()]
        for path in (Path(folder, name) for name in fnmatch.filter([*files, *links], only)):
            if path.is_symlink():
                yield str(path), str(path.readlink())
            elif path.suffix not in {".a", ".pyc"}:
                yield str(path), path


def _with_libraries(entries: list[Entry]) -> Iterator[Entry]:
    """The entries, every shared library that a program or an extension among them loads, and the loader."""
    yield from entries
    binaries = [source for _, source in entries if isinstance(source, Path) and _is_elf(source)]
    listing = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    for found in sorted(set(re.findall(r"^\s+(?:\S+ => )?(/\S+) \(", listing, re.M))):
        yield found, Path(found)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as content:
        return content.read(4) == b"\x7fELF"
