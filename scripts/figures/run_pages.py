"""docs/images/report.png, docs/images/tensorboard.png and docs/images/audit.png: pages, as a browser shows them.

    python scripts/figures/run_pages.py [--run runs/train] [--browser chromium] [--tensorboard tensorboard]
    python scripts/figures/run_pages.py --audit tunix.html     # as scripts/reliability/audited_libraries.py writes it

Without --run it trains first, which takes minutes: `zero-jax train --profile steps=100:104 --log-to tensorboard`. It
needs Chromium and the command of `pip install tensorboard`, which may be in another environment.
"""

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image  # matplotlib brings it

IMAGES = Path(__file__).parents[2] / "docs/images"
WIDTH, SHOWN_WIDTH, COLORS = 1180, 900, 200
SHOWN_TAGS = "loss%7Cgrad_norm%7Caccuracy"
LOADING_MS = 15_000
"""Until TensorBoard has drawn its charts, in the browser's time."""


def take_picture(browser: str, address: str, path: Path, height: int, *, wait_ms: int | None = None) -> None:
    """`path`: the first `height` pixels of the page at `address`."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "page.png"
        wait = [f"--virtual-time-budget={wait_ms}"] * (wait_ms is not None)
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *wait,
                        f"--window-size={WIDTH},{height}", f"--screenshot={shot}", address], check=True)
        picture = Image.open(shot).resize((SHOWN_WIDTH, height * SHOWN_WIDTH // WIDTH), Image.Resampling.LANCZOS)
    picture.quantize(COLORS, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


@contextlib.contextmanager
def serving(tensorboard: str, folder: Path) -> Iterator[str]:
    """The address of TensorBoard over the files in `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([tensorboard, "--logdir", folder.name, "--port", str(port), "--load_fast=false"],
                              cwd=folder.parent)  # the page shows this path
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/data/runs") as answer:
                if answer.read().strip() not in (b"", b"[]"):  # it has read the files
                    break
            if server.poll() is not None:
                sys.exit("TensorBoard ended: its error is above.")
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Trains where no run is given, and takes both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a run that has ended")
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--tensorboard", default="tensorboard")
    parser.add_argument("--audit", type=Path, help="the page of an audit, of which alone a picture is taken")
    args = parser.parse_args()
    if args.audit:
        take_picture(args.browser, args.audit.resolve().as_uri(), IMAGES / "audit.png", 980)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or Path(folder) / "run"
        if args.run is None:
            subprocess.run([sys.executable, "-m", "zero_jax", "train", "--profile", "steps=100:104", "--log-to",
                            "tensorboard", "--out", str(run)], check=True)
        take_picture(args.browser, (run / "report.html").resolve().as_uri(), IMAGES / "report.png", 1500)
        with serving(args.tensorboard, run / "tensorboard") as address:
            page = f"{address}/#scalars&tagFilter={SHOWN_TAGS}&_smoothingWeight=0"
            take_picture(args.browser, page, IMAGES / "tensorboard.png", 740, wait_ms=LOADING_MS)


if __name__ == "__main__":
    main()
