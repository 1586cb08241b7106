"""Write the dashboards: `python -m tools.dashboards FOLDER`."""

import sys
from pathlib import Path

from tools.dashboards.definitions import build_dashboards


def main(folder: Path) -> None:
    """Replace the JSON files of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        stale.unlink()
    for name, text in build_dashboards().items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.dashboards FOLDER")
    main(Path(sys.argv[1]))
