"""docs/images/report.png: the top of the page that a run writes, as a browser shows it.

    python scripts/figures/report_page.py [--run runs/train] [--browser chromium]

Without --run it trains first, which takes minutes: `zero-jax train --profile steps=100:104`. It needs Chromium.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image  # matplotlib brings it

PICTURE = Path(__file__).parents[2] / "docs/images/report.png"
WIDTH, HEIGHT, SHOWN_WIDTH, COLORS = 1180, 1500, 900, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of a run that has ended")
    parser.add_argument("--browser", default="chromium")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, shot = args.run or Path(folder) / "run", Path(folder) / "page.png"
        if args.run is None:
            subprocess.run([sys.executable, "-m", "zero_jax", "train", "--profile", "steps=100:104", "--out", str(run)],
                           check=True)
        subprocess.run([args.browser, "--headless", "--no-sandbox", "--hide-scrollbars",
                        f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}",
                        (run / "report.html").resolve().as_uri()], check=True)
        picture = Image.open(shot).resize((SHOWN_WIDTH, HEIGHT * SHOWN_WIDTH // WIDTH), Image.Resampling.LANCZOS)
        picture.quantize(COLORS, method=Image.Quantize.FASTOCTREE).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
