"""Write the dashboards: `python -m tools.dashboards FOLDER`, which `make generate` calls."""

import sys
from pathlib import Path

from tools.dashboards import autoscaler, control_plane, cost, instances, service, tiers

DASHBOARDS = {
    "service": service.build,
    "tiers": tiers.build,
    "cost": cost.build,
    "instances": instances.build,
    "autoscaler": autoscaler.build,
    "control-plane": control_plane.build,
}
"""What builds the JSON of each dashboard, by the name of its file without suffix."""


def main(folder: Path) -> None:
    """Replace the JSON files of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        stale.unlink()
    for name, build in DASHBOARDS.items():
        (folder / f"{name}.json").write_text(build(), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.dashboards FOLDER")
    main(Path(sys.argv[1]))
