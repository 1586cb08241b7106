"""Take the README's pictures of the live page: a screenshot and a short animation of a simulated run.

    tools/install browser && .venv/bin/python tools/live_page_pictures.py docs/img [--for 33] [--from 401]

Needs the Debian package chromium. Writes live-page.webp, the animation, and live-page.png. A replay of a
simulated run shows what `fulcrum play --web` shows, and the same on a busy machine.
"""

import argparse
import asyncio
import base64
import io
import itertools
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

FULCRUM = Path(sys.executable).with_name("fulcrum")
LOAD = "phases-200s"
VIEWPORT = {"width": 1280, "height": 760}
FRAMES_PER_S = 4
"""At most: a busy machine draws fewer, and the animation keeps their times."""
WIDTH_PX = 960
"""Of the animation."""
QUALITY = 60
"""Of the animation's frames, 0 to 100."""


class Frame(NamedTuple):
    """A picture of the page, and its time in seconds."""

    at_s: float
    picture: Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from", dest="from_s", type=int, default=401, help="second of the run to begin at")
    parser.add_argument("--for", dest="seconds", type=float, default=33.0, help="duration of the animation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "run.gz"
        subprocess.run(
            [FULCRUM, "simulate", "--load", LOAD, "--record", recording],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        picture = options.folder / "live-page.png"
        frames = take_frames(recording, options.from_s, options.seconds, picture)
    write_animation(frames, options.folder / "live-page.webp")


def take_frames(recording: Path, from_s: int, seconds: float, picture: Path) -> list[Frame]:
    """Replay the recording from a second of its run on, take frames for as long, and a picture at the end."""
    with subprocess.Popen(
        [FULCRUM, "web", "--replay", recording], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            address = re.search(r"http://\S+#\S+", server.stdout.readline())
            assert address is not None
            return asyncio.run(take_frames_of_page(address[0], from_s, seconds, picture))
        finally:
            server.terminate()


async def take_frames_of_page(address: str, from_s: int, seconds: float, picture: Path) -> list[Frame]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page: Any = await browser.new_page(viewport=VIEWPORT, color_scheme="dark")
        await page.goto(address)
        await page.wait_for_selector(".tile")
        await page.locator("input[type=range]").fill(str(from_s))
        await page.evaluate("document.activeElement.blur()")  # no ring around the slider
        await page.wait_for_function(
            "at => Number(document.querySelector('input[type=range]').value) > at", arg=from_s
        )
        frames: list[Frame] = []
        session = await page.context.new_cdp_session(page)

        def keep(event: dict[str, Any]) -> None:
            at_s = event["metadata"]["timestamp"]
            if not frames or at_s - frames[-1].at_s >= 1 / FRAMES_PER_S:
                frames.append(Frame(at_s, Image.open(io.BytesIO(base64.b64decode(event["data"])))))
            acknowledged.add(
                asyncio.ensure_future(
                    session.send("Page.screencastFrameAck", {"sessionId": event["sessionId"]})
                )
            )

        acknowledged: set[asyncio.Future[Any]] = set()
        session.on("Page.screencastFrame", keep)
        await session.send("Page.startScreencast", {"format": "jpeg", "quality": 95})
        await asyncio.sleep(seconds)
        await session.send("Page.stopScreencast")
        await asyncio.gather(*acknowledged)
        await page.screenshot(path=picture)
        await browser.close()
    return frames


def write_animation(frames: list[Frame], file: Path) -> None:
    """Write the frames as an animated WebP that repeats."""
    size = (WIDTH_PX, round(WIDTH_PX * VIEWPORT["height"] / VIEWPORT["width"]))
    first, *rest = (frame.picture.resize(size, Image.Resampling.LANCZOS) for frame in frames)
    durations_s = [later.at_s - frame.at_s for frame, later in itertools.pairwise(frames)]
    first.save(
        file,
        save_all=True,
        append_images=rest,
        duration=[round(1000 * duration_s) for duration_s in (*durations_s, 1.0)],
        loop=0,
        quality=QUALITY,
    )


if __name__ == "__main__":
    main()
