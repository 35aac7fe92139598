"""A picture of a run's report, as the README shows it: Chromium, driven by Selenium.

python benchmarks/picture.py runs/quickstart-... docs/images/report.png [--height 1150]
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from maporl.report.page import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--height", type=int, default=1150)
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
        browser.get(page.resolve().as_uri())
        WebDriverWait(browser, 10).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
        browser.execute_script("document.getElementById('charts').scrollIntoView(); scrollTo(0, 0)")
        browser.save_screenshot(str(options.picture))
        browser.quit()


if __name__ == "__main__":
    main()
