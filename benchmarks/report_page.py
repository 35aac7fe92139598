"""Measure the report of many dialogues: the time to write its page, and the time of each filter in Chromium.

python benchmarks/report_page.py runs/quickstart --dialogues 5000

The run's recorded dialogues are repeated until there are as many as asked for. A filter's time ends with the second
frame that the browser draws after it.
"""

import argparse
import itertools
import json
import shutil
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from maporl.report.page import write_report

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
FILTERS = {
    "show only": "buttons[0].click()",
    "show all": "buttons[0].click()",
    "search, no hit": "type('zzz')",
    "search, some hits": "type('1')",
    "search cleared": "type('')",
}
SCRIPT = """
const done = arguments[0], times = [];
const buttons = [...document.querySelectorAll("[aria-label='Show only'] button")];
const field = document.querySelector("input[type=search]");
const frame = () => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)));
const type = (text) => { field.value = text; field.dispatchEvent(new Event("input", { bubbles: true })); };
(async () => {
  for (const act of [ACTS]) {
    const began = performance.now(); act(); await frame(); times.push(performance.now() - began);
  }
  done(times);
})();"""


def enlarged(run: Path, number: int, folder: Path) -> Path:
    """Return a copy of ``run`` in ``folder`` with ``number`` recorded dialogues, each with a different id."""
    copy = folder / "run"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoint-*", "final", "initial"))
    recorded = [json.loads(line) for line in (run / "dialogues.jsonl").read_text().splitlines()]
    with (copy / "dialogues.jsonl").open("w") as file:
        for n, record in zip(range(number), itertools.cycle(recorded), strict=False):
            file.write(json.dumps(record | {"prompt": n}) + "\n")
    return copy


def filter_times(page: Path, profile: str) -> list[float]:
    """Return the milliseconds that the page takes for each of ``FILTERS``."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(page.resolve().as_uri())
        WebDriverWait(browser, 30).until(lambda b: b.execute_script("return document.documentElement.dataset.ready"))
        return browser.execute_async_script(
            SCRIPT.replace("ACTS", ", ".join(f"() => {act}" for act in FILTERS.values()))
        )
    finally:
        browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--dialogues", type=int, default=5000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = enlarged(options.run, options.dialogues, Path(folder))
        started = time.perf_counter()
        page = write_report([run], most=options.dialogues + 1000)
        written = time.perf_counter() - started
        result = {
            "dialogues": options.dialogues,
            "megabytes": round(page.stat().st_size / 1e6, 2),
            "written_in_seconds": round(written, 2),
        }
        times = filter_times(page, f"{folder}/profile")
    print(
        json.dumps(
            result | {"filter_milliseconds": {n: round(t) for n, t in zip(FILTERS, times, strict=True)}}, indent=1
        )
    )


if __name__ == "__main__":
    main()
