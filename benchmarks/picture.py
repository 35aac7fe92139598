"""Take a picture of a run's report for the README, with Chromium driven by Selenium.

python benchmarks/picture.py runs/quickstart docs/images/report.png --height 1000
python benchmarks/picture.py runs/quickstart docs/images/dialogues.png --height 800 --at "when=train&dialogue=0/80/722*"
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from maporl.report.page import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--height", type=int, default=1150)
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
        chromium.add_argument(f"--window-size=1000,{options.height}")
        chromium.add_argument(f"--user-data-dir={profile}")
        browser = webdriver.Chrome(options=chromium, service=webdriver.ChromeService(shutil.which("chromedriver")))
        browser.get(f"{page.resolve().as_uri()}#{options.at}")
        WebDriverWait(browser, 10).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
        time.sleep(1)  # until the charts are drawn
        browser.save_screenshot(str(options.picture))
        browser.quit()


if __name__ == "__main__":
    main()
