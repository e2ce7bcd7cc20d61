"""The picture of docs/report.md: the demo's report in headless Chromium.

    epitorch demo --out runs/demo
    python benchmarks/report_picture.py runs/demo docs/report.png

Needs `pip install playwright` and a Chromium (`EPITORCH_CHROMIUM`, or `chromium` on the path).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from epitorch.report import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    chromium = os.environ.get("EPITORCH_CHROMIUM") or shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "report.html"
        report([arguments.runs], page_file)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 1450})
        page.goto(page_file.as_uri())
        page.wait_for_selector("#accuracy-madds.drawn .main-svg")
        page.screenshot(path=arguments.out)
        browser.close()
    Image.open(arguments.out).convert("RGB").save(arguments.out, optimize=True)


if __name__ == "__main__":
    main()
