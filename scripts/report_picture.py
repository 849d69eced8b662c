"""Make ``docs/report.png``, the picture in the README: the report of a finished demonstration in headless Chromium.

Usage: ``python grpo.py --config-name grpo_cpu hydra.run.dir=outputs/demo``, then
``python scripts/report_picture.py outputs/demo`` (needs playwright and a Chromium on this machine).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIZE = {"width": 1280, "height": 828}


def picture(run_dir: Path, out: Path) -> None:
    """Write the top of the report of ``run_dir`` to the PNG ``out``."""
    from playwright.sync_api import sync_playwright

    from sota_grpo.report import write_report

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page_file = write_report([run_dir], Path(folder) / "report.html")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(page_file.as_uri())
        page.wait_for_selector(".chart", state="attached")
        page.wait_for_timeout(500)  # the curves are drawn when they come into view
        page.screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "docs" / "report.png")
