"""Builds container images without registry, daemon or build tool: tar files in the format of `docker save`.

`build_pause_image`: what a node needs; `build_system_image`: what stands beneath a virtual environment that
is mounted. Import
with `ctr -n k8s.io images import`.

`cluster` and `tools/image` call it.
"""

import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

MANYLINUX_LIBRARIES = frozenset(
    f"lib{name}"
    for name in (
        *("c.so.6", "m.so.6", "mvec.so.1", "dl.so.2", "rt.so.1", "pthread.so.0", "util.so.1", "resolv.so.2"),
        *("gcc_s.so.1", "stdc++.so.6", "atomic.so.1", "z.so.1", "expat.so.1"),
        "numa.so.1",  # only for vLLM on CPUs
    )
)
"""Libraries of the manylinux list, without X11 and OpenGL."""
BUSYBOX_APPLETS = (
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
IDLE_SCRIPT = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"


def build_pause_image(target: Path) -> None:
    """Write the pause image, which keeps a pod's network; small test pods use it, too (shell, wget)."""
    names = ["localhost/pause:1", "localhost/busybox:1"]
    write_image(
        target, names, [build_layer(_list_busybox_entries())], {"Entrypoint": ["/bin/sh", "-c", IDLE_SCRIPT]}
    )


def build_system_image(target: Path, name: str, environment: Path) -> None:
    """Write an image with a shell and the system libraries that a virtual environment needs.

    Both are mounted, at the paths that they have here: nodes keep their images in memory, which has no place
    for gigabytes.
    """
    base = find_interpreter(environment)
    lookup = target.with_suffix(".nsswitch.conf")
    lookup.write_text("hosts: files dns\n")  # a pod's own name is only in its hosts file
    lscpu = Path(shutil.which("lscpu") or "/usr/bin/lscpu")
    entries: list[LayerEntry] = [
        *_list_busybox_entries(),
        *_add_shared_libraries([("bin/lscpu", lscpu)]),
        *_list_shared_libraries([base / "bin/python3", *base.glob("lib/python3.*/lib-dynload/*.so")]),
        *_list_manylinux_libraries(),
        ("etc/nsswitch.conf", lookup),
    ]
    settings: dict[str, object] = {"Env": [f"PATH={environment}/bin:/bin"], "User": "65532:65532"}
    write_image(target, [name], [build_layer(entries)], settings)


def find_interpreter(environment: Path) -> Path:
    """Return the folder of the interpreter that a virtual environment uses."""
    return (environment / "bin/python").resolve().parents[1]


LayerEntry = tuple[str, Path | str]  # name in the image; a file of this machine, or the target of a link


def build_layer(entries: Iterable[LayerEntry]) -> bytes:
    """Return a layer as an uncompressed tar file; the same entries give the same bytes."""
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


def write_image(target: Path, names: list[str], layers: list[bytes], settings: dict[str, object]) -> None:
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


def _list_busybox_entries() -> Iterator[LayerEntry]:
    busybox = shutil.which("busybox", path="/bin:/usr/bin:/usr/local/bin")
    if busybox is None:
        raise FileNotFoundError("busybox")
    yield from _add_shared_libraries([("bin/busybox", Path(busybox))])
    for applet in BUSYBOX_APPLETS:
        yield f"bin/{applet}", "busybox"


def _add_shared_libraries(entries: list[LayerEntry]) -> Iterator[LayerEntry]:
    """Return the entries and the shared libraries that their programs load."""
    yield from entries
    yield from _list_shared_libraries(
        [source for _, source in entries if isinstance(source, Path) and _is_elf(source)]
    )


def _list_shared_libraries(binaries: list[Path]) -> Iterator[LayerEntry]:
    """Return all shared libraries that programs and extensions load, and the loader."""
    listing = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    for found in sorted(set(re.findall(r"^\s+(?:\S+ => )?(/\S+) \(", listing, re.M))):
        yield found, Path(found)


def _list_manylinux_libraries() -> Iterator[LayerEntry]:
    """Return the system libraries that packages expect, as far as this machine has them."""
    listing = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for name, path in re.findall(r"^\s+(\S+) \(libc6,.*\) => (/\S+)$", listing, re.M):
        if name in MANYLINUX_LIBRARIES:
            yield path, Path(path)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as content:
        return content.read(4) == b"\x7fELF"
