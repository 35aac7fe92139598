"""Take a picture of a run's report for the README, with Chromium driven by Selenium. ``make picture`` takes both.

python benchmarks/picture.py runs/quickstart docs/images/report.png --height 880
python benchmarks/picture.py runs/quickstart docs/images/dialogues.png --height 860 --at when=train

A picture names the version of the page that it shows, so that a test finds a picture of another one.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from maporl.report.page import page_version, write_report

VERSION = "page"
"""The name of the text in a picture that has the version of the page."""
WIDTH = 1280


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--height", type=int, default=880)
    parser.add_argument(
        "--at", default="", help="what follows # in the page's address; by default the picture is of its beginning"
    )
    options = parser.parse_args()
    page = write_report([options.run])
    chromium = webdriver.ChromeOptions()
    chromium.binary_location = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ):
            chromium.add_argument(flag)
        chromium.add_argument("--disable-component-update")
        chromium.add_argument("--hide-scrollbars")
        chromium.add_argument(f"--user-data-dir={profile}")
        browser = webdriver.Chrome(options=chromium, service=webdriver.ChromeService(shutil.which("chromedriver")))
        size = {"width": WIDTH, "height": options.height, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)  # a window's size has its frame in it
        light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
        browser.get(f"{page.resolve().as_uri()}#{options.at}")
        WebDriverWait(browser, 10).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
        time.sleep(1)  # until the charts are drawn
        browser.save_screenshot(str(options.picture))
        browser.quit()
    named = PngInfo()
    named.add_text(VERSION, page_version())
    with Image.open(options.picture) as picture:
        picture.convert("RGB").save(options.picture, pnginfo=named, optimize=True)


if __name__ == "__main__":
    main()
