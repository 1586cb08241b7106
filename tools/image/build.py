"""Builds the container image for tests without registry, daemon or build tool.

    python tools/image/build.py OUT.tar TAG        writes localhost/fulcrum:TAG in the format of `docker save`

A TAG with a slash in it, such as localhost/fulcrum:1, is the whole name.

It holds what the Dockerfile's holds: this interpreter below /usr/local, and in it the packages that
`requirements/image.lock` names (taken from the environment that runs this), and the rooms as they lie in
the checkout. The data path is compiled (`tools/compiled`). Files of bytecode are in it, because nothing in
a container can write them. What is slow to make, the layers of interpreter and packages, stays in a cache
folder under a name made from all that went into it.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.compiled.build import compile_packages, list_libraries  # noqa: E402  (the same)
from tools.kubernetes.images import LayerEntry, build_layer, write_image  # noqa: E402  (the checkout has to be on the path)

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
STDLIB_PATH = f"usr/local/lib/python{PYTHON_VERSION}"
SITE_PACKAGES_PATH = f"{STDLIB_PATH}/site-packages"
USER = "65532:65532"
EXCLUDED_FOLDERS = {
    *("__pycache__", "site-packages", "dist-packages", "test", "tests"),
    *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"),
}
"""Parts of the standard library that no program here loads: two thirds of its size."""
EXCLUDED_SUFFIXES = {".a", ".c", ".h", ".pxd", ".pyc", ".pyi", ".pyx"}
SELDOM_USED = ("kubernetes/", "pygments/")
"""Packages of which only a few files are loaded: not compiled."""
STRIP_ABOVE_BYTES = 1_000_000
EXTRA_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/tmp:/sbin/nologin\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
    "usr/local/bin/fulcrum": (
        "#!/usr/local/bin/python\nfrom fulcrum_cli.__main__ import main\n\nraise SystemExit(main())\n"
    ),
}
"""Files that no package contains: users, name service order, the command line."""


def build_image(target: Path, name: str) -> Path:
    """Write the image under `name`, such as `localhost/fulcrum:1`, as the archive `target`.

    Every name gives an image of its own digest, so that one can be rolled out after the other.
    """
    layers = [
        _load_cached_layer("interpreter", _hash_interpreter_inputs(), _build_interpreter_layer),
        _load_cached_layer("packages", _hash_package_inputs(), _build_packages_layer),
        _build_rooms_layer(),
    ]
    version = name.rpartition(":")[2]
    settings: dict[str, object] = {
        "Env": ["PATH=/usr/local/bin", "HOME=/tmp", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"],
        "User": USER,
        "Cmd": ["fulcrum", "--help"],
        "StopSignal": "SIGTERM",
        "Labels": {"org.opencontainers.image.title": "fulcrum", "org.opencontainers.image.version": version},
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    write_image(target, [name], layers, settings)
    return target


def _load_cached_layer(what: str, key: str, make: Callable[[Path], bytes]) -> bytes:
    """Return the layer of this key, cached or built by `make`, which gets a temporary folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fulcrum-image-for-tests"
    file = folder / f"{what}-{key}.tar"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            partial = Path(scratch, "layer.tar")
            partial.write_bytes(make(Path(scratch)))
            partial.replace(file)  # atomic: another process may build the same layer
    return file.read_bytes()


def _hash_inputs(*parts: object) -> str:
    return hashlib.sha256(repr((Path(__file__).read_bytes(), *parts)).encode()).hexdigest()[:16]


def _hash_interpreter_inputs() -> str:
    interpreter = Path(os.path.realpath(sys.executable)).stat()
    return _hash_inputs(sys.version, interpreter.st_size, interpreter.st_mtime_ns)


def _hash_package_inputs() -> str:
    return _hash_inputs(sys.version, (ROOT / "requirements" / "image.lock").read_bytes())


def _build_interpreter_layer(scratch: Path) -> bytes:
    """Return interpreter, standard library, the shared libraries of both, and `EXTRA_FILES`."""
    entries: list[LayerEntry] = [
        (f"usr/local/bin/python{PYTHON_VERSION}", Path(os.path.realpath(sys.executable)))
    ]
    entries += [(f"usr/local/bin/{name}", f"python{PYTHON_VERSION}") for name in ("python", "python3")]
    entries += _list_tree(Path(sysconfig.get_path("stdlib")), STDLIB_PATH)
    for name, text in EXTRA_FILES.items():
        file = scratch / "files" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755 if "bin/" in name else 0o644)
        entries.append((name, file))
    return build_layer(
        [
            *_strip_libraries([*entries, *_list_shared_libraries(entries)], scratch),
            *_compile_modules(entries, scratch),
        ]
    )


def _build_packages_layer(scratch: Path) -> bytes:
    """Return the packages in the image's lock, from the environment that runs this program."""
    lock = (ROOT / "requirements" / "image.lock").read_text(encoding="utf-8")
    entries: list[LayerEntry] = []
    for name, version in re.findall(r"^([a-z0-9-]+)==([^ ;]+)", lock, re.MULTILINE):
        found = importlib.metadata.distribution(name)
        if found.version != version:
            raise SystemExit(f"error: {name} ({found.version}) is locked as {version}; run tools/install dev")
        entries += [
            (f"{SITE_PACKAGES_PATH}/{file}", Path(str(file.locate())))
            for file in found.files or ()
            if ".." not in file.parts and EXCLUDED_FOLDERS.isdisjoint(file.parts)
            if file.suffix not in EXCLUDED_SUFFIXES
        ]
    return build_layer(
        [
            *_strip_libraries([*entries, *_list_shared_libraries(entries)], scratch),
            *_compile_modules(entries, scratch),
        ]
    )


def _build_rooms_layer() -> bytes:
    """Return the packages of the checkout, laid out as in the wheel, with the compiled modules."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        wheel = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    entries: list[LayerEntry] = []
    for package in wheel["packages"]:
        entries += _list_tree(ROOT / package, f"{SITE_PACKAGES_PATH}/{Path(package).name}")
    entries += [
        (f"{SITE_PACKAGES_PATH}/{name}", ROOT / source) for source, name in wheel["force-include"].items()
    ]
    compiled = compile_packages()
    entries += [
        (f"{SITE_PACKAGES_PATH}/{library.relative_to(compiled)}", library)
        for library in list_libraries(compiled)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        return build_layer([*entries, *_compile_modules(entries, Path(scratch))])


def _list_tree(root: Path, name: str) -> Iterator[LayerEntry]:
    """Yield the files below `root` as entries below `name`; links are followed."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - EXCLUDED_FOLDERS)
        for path in (Path(folder, entry) for entry in files):
            if path.suffix not in EXCLUDED_SUFFIXES and not path.name.startswith(("_tkinter", "_test")):
                yield f"{name}/{path.relative_to(root)}", path


def _list_shared_libraries(entries: Iterable[LayerEntry]) -> Iterator[LayerEntry]:
    """Return all shared libraries that programs and extensions load, and the loader."""
    binaries = [source for _, source in entries if isinstance(source, Path) and _is_elf(source)]
    listing = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    carried = {source.name for source in binaries}
    for found in sorted(set(re.findall(r"^\s+(?:\S+ => )?(/\S+) \(", listing, re.MULTILINE))):
        if Path(found).name not in carried:
            yield found.lstrip("/"), Path(found)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as content:
        return content.read(4) == b"\x7fELF"


def _strip_libraries(entries: Iterable[LayerEntry], scratch: Path) -> Iterator[LayerEntry]:
    """Return the entries, with debug information of large libraries removed if `strip` is installed."""
    strip = shutil.which("strip")
    for number, (name, source) in enumerate(entries):
        if (
            strip
            and isinstance(source, Path)
            and source.stat().st_size > STRIP_ABOVE_BYTES
            and _is_elf(source)
        ):
            copy = scratch / f"{number}.elf"
            shutil.copy2(source, copy)
            subprocess.run([strip, "--strip-unneeded", copy], check=True)
            yield name, copy
        else:
            yield name, source


def _compile_modules(entries: Iterable[LayerEntry], scratch: Path) -> Iterator[LayerEntry]:
    """Return a compiled file for each module, valid whatever its source's time is."""
    modules = [
        (name, source) for name, source in entries if isinstance(source, Path) and name.endswith(".py")
    ]
    targets = [scratch / f"{number}.pyc" for number in range(len(modules))]
    with ProcessPoolExecutor() as pool:
        made = list(pool.map(_compile_module, modules, targets, chunksize=50))
    for (name, _), target, good in zip(modules, targets, made, strict=True):
        if good:
            yield importlib.util.cache_from_source(name), target


def _compile_module(module: tuple[str, Path], target: Path) -> bool:
    """Compile one module; return False if it is not valid Python, such as a template."""
    name, source = module
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compiled = py_compile.compile(
        str(source), cfile=str(target), dfile=f"/{name}", quiet=2, invalidation_mode=unchecked
    )
    return compiled is not None


def parse_image_name(tag: str) -> str:
    """Return the image's full name from a tag or from a full name."""
    name = tag if "/" in tag else f"localhost/fulcrum:{tag}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9._:/-]*/[a-z0-9._-]+:\w[\w.-]{0,127}", name):
        raise SystemExit(
            f"error: TAG ({tag}) must be a tag such as 1, or a full name such as localhost/fulcrum:1"
        )
    return name


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: build.py OUT.tar TAG")
    archive = build_image(Path(sys.argv[1]), parse_image_name(sys.argv[2]))
    print(f"{archive} {archive.stat().st_size / 1e6:.0f} MB")
