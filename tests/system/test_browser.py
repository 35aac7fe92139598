"""The report in a real browser: Chromium, driven by Selenium. Skipped where either is missing."""

import json
import os
import shutil
import threading
import time
from itertools import pairwise

import pytest
from hostile_runs import AFTER, HOSTILE, LEARNS, RIGHT, SAMPLES, WRONG, debate, of_group, run_with, write_run
from tiny_runs import TWO, played

from maporl.report.live import LivePage, PageSeat
from maporl.report.page import write_report
from maporl.types import Trace, to_record

selenium = pytest.importorskip("selenium", reason="needs selenium (pip install -e '.[dev]')")
from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import Select, WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and ChromeDriver (Debian: chromium, chromium-driver)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new", "--disable-gpu", "--hide-scrollbars", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync",
        "--disable-component-update", "--window-size=1280,900", f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def open_page(browser, address):
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(address)
    WebDriverWait(browser, 10).until(
        lambda b: b.execute_script("return document.documentElement.dataset.ready") == "yes"
    )


def no_complaints(browser):
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def count(browser):
    return int(browser.find_element(By.ID, "count").text.split()[0])


def traced(name):
    dialogue = debate(name, (WRONG, RIGHT), (RIGHT, RIGHT), text="two is it")
    for u in dialogue.utterances:
        u.trace = Trace(["two", " is", " it"], [-0.1, -2.0, -0.3], [0.5, -1.0, 0.2], [0.3, 0.2, 0.1])
    return dialogue


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "run", updates=30, dialogues=[traced(f"t{n}") for n in range(90)]
    )
    return f"file://{write_report([folder])}"


def press(browser, key):
    browser.find_element(By.TAG_NAME, "body").send_keys(key)


def test_a_page_opens_from_a_file_without_a_complaint_and_says_what_was_learned(browser, report):
    open_page(browser, report)
    text = browser.find_element(By.TAG_NAME, "main").text
    assert "What the team learned" in text and "+30.0 points" in text and "Where it still fails" in text
    assert len(browser.find_elements(By.CSS_SELECTOR, "figure canvas")) == 4, "charts are drawn"
    browser.find_element(By.XPATH, "//summary[starts-with(., 'Speed, memory')]").click()
    WebDriverWait(browser, 5).until(lambda b: len(b.find_elements(By.CSS_SELECTOR, "figure canvas")) == 7)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#flips path")) > 0
    no_complaints(browser)


def test_names_that_are_written_from_right_to_left_stand_apart_from_what_is_around_them(browser, tmp_path):
    name = "\u05d0\u05d1\u05d2"
    dialogue = debate("q", (RIGHT, RIGHT), (RIGHT, RIGHT))
    for u in dialogue.utterances:
        u.agent, u.role = name, "\u202e" + name
    folder = write_run(tmp_path / "run", dialogues=[dialogue], before=None, after=None)
    open_page(browser, f"file://{write_report([folder])}")
    names = browser.find_elements(By.CSS_SELECTOR, "h4 bdi")
    assert {n.text for n in names} == {name, f"\u27e6U+202E\u27e7{name}"}
    assert {n.value_of_css_property("unicode-bidi") for n in names} == {"isolate"}
    no_complaints(browser)


def test_cross_play_and_groups_are_drawn(browser, tmp_path):
    run = run_with(tmp_path / "one", [of_group("ann", 10.0, LEARNS, SAMPLES)] * 4)
    (run.folder / "crossplay.json").write_text(json.dumps(played(TWO).to_json()))
    open_page(browser, f"file://{write_report([run.folder])}")
    cells = browser.find_elements(By.XPATH, "//details[starts-with(summary, 'Cross-play')]//td")
    marked = [cell.value_of_css_property("outline-style") for cell in cells]
    assert marked == ["solid", "none", "none", "solid"], "the diagonal"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#groups .work")) == 2
    no_complaints(browser)


def test_runs_are_compared_side_by_side(browser, tmp_path):
    one, two = write_run(tmp_path / "one", dialogues=[traced("t")]), write_run(tmp_path / "two", task={"name": "gsm8k"})
    open_page(browser, f"file://{write_report([one, two], tmp_path / 'both.html')}")
    text = browser.find_element(By.TAG_NAME, "main").text
    assert "Side by side" in text and "cannot be compared" in text and count(browser) == 41
    Select(browser.find_elements(By.CSS_SELECTOR, "select")[1]).select_by_visible_text("two")
    assert count(browser) == 20
    no_complaints(browser)


def test_filters_search_and_keys_work_and_the_address_keeps_them(browser, report):
    open_page(browser, report)
    assert count(browser) == 110
    buttons = {
        b.text.rsplit(" ", 1)[0]: b for b in browser.find_elements(By.CSS_SELECTOR, "[aria-label='Show only'] button")
    }
    assert buttons["spoiled"].text == "spoiled 1" and "penalised" not in buttons, "what no dialogue has is not offered"
    buttons["spoiled"].click()
    assert count(browser) == 1 and buttons["spoiled"].get_attribute("aria-pressed") == "true"
    assert not buttons["all right"].is_enabled() and buttons["all right"].text == "all right 0"
    address = browser.current_url
    assert "show=spoiled" in address
    browser.back()
    WebDriverWait(browser, 5).until(lambda b: count(b) == 110)
    browser.forward()
    WebDriverWait(browser, 5).until(lambda b: count(b) == 1)
    buttons["spoiled"].click()
    Select(browser.find_elements(By.CSS_SELECTOR, "select")[0]).select_by_value("train")
    assert count(browser) == 90
    press(browser, "/")
    browser.switch_to.active_element.send_keys("t42=")
    assert count(browser) == 1
    open_page(browser, address)
    assert count(browser) == 1, "an address brings back what one saw"
    open_page(browser, report)
    press(browser, "j")
    press(browser, "j")
    press(browser, "k")
    assert "dialogue=0%2Fafter%2Fq1" in browser.current_url
    browser.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("no such words")
    assert count(browser) == 0
    browser.find_element(By.XPATH, "//button[.='clear the filters']").click()
    assert count(browser) == 110
    no_complaints(browser)


def test_show_them_shows_the_dialogues_that_were_counted(browser, report):
    open_page(browser, report)
    lines = browser.find_elements(By.CSS_SELECTOR, "[aria-label='Where it still fails'] li")
    assert lines[0].text.startswith("Nobody is right at the end on 2 of 10 questions")
    for line, expected in ((lines[0], 2), (lines[3], 1)):
        line.find_element(By.TAG_NAME, "button").click()
        WebDriverWait(browser, 5).until(lambda b, n=expected: count(b) == n)
    assert "2 of 5 wrong last answers" in browser.find_element(By.ID, "dialogues").text
    address = browser.current_url
    open_page(browser, address)
    assert count(browser) == 1
    browser.find_element(By.XPATH, "//button[.='show all']").click()
    assert count(browser) == 110
    no_complaints(browser)


def test_a_dialogue_shows_answers_grades_rewards_and_tokens(browser, report):
    open_page(browser, f"{report}#dialogue=0%2F30%2Ft29")
    cells = browser.find_elements(By.CSS_SELECTOR, ".said")
    assert len(cells) == 4 and cells[0].text.startswith("ann ✗ wrong") and "differs from the label" in cells[0].text
    tokens = cells[0].find_elements(By.CSS_SELECTOR, ".tok")
    assert [t.text.strip() for t in tokens] == ["two", "is", "it"]
    webdriver.ActionChains(browser).move_to_element(tokens[1]).perform()
    told = cells[0].find_element(By.CSS_SELECTOR, ".tip").text
    assert told == '" is": log-probability -2 (13.5%), value 0.2, advantage -1'
    assert "rgba" in tokens[1].get_attribute("style")
    no_complaints(browser)


def test_what_models_write_changes_nothing(browser, tmp_path):
    hostile = debate(HOSTILE, (RIGHT, RIGHT), (RIGHT, RIGHT), label=HOSTILE, text=HOSTILE)
    folder = write_run(tmp_path / "run", dialogues=[hostile], after=[hostile], task={"name": HOSTILE})
    open_page(browser, f"file://{write_report([folder])}")
    assert browser.title.startswith("ann and bob on </script>") and browser.title.endswith(" · maporl")
    assert HOSTILE.split("\u202e")[0] in browser.find_element(By.CSS_SELECTOR, ".said .text").text
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main b") == []
    no_complaints(browser)


CONTRAST = """
    const rgb = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3]));
    const light = (c) => c.map((v) => { v /= 255; return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }).reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
    const behind = (e) => { const own = rgb(getComputedStyle(e).backgroundColor); return own[3] === 1 || !e.parentElement ? own.slice(0, 3) : over(own, behind(e.parentElement)); };
    const found = [];
    for (const e of document.querySelectorAll("body *")) {
      if (e.closest(":disabled, script, style, .skip, svg") || !e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
      let opacity = 1;
      for (let p = e; p; p = p.parentElement) opacity *= Number(getComputedStyle(p).opacity);
      const under = behind(e), colour = rgb(getComputedStyle(e).color), shown = over([...colour.slice(0, 3), colour[3] * opacity], under);
      const ratio = (Math.max(light(shown), light(under)) + .05) / (Math.min(light(shown), light(under)) + .05);
      if (ratio < 4.5) found.push([e.tagName, e.className, e.textContent.trim().slice(0, 30), Math.round(10 * ratio) / 10]);
    }
    return found"""


def test_headings_labels_and_contrast_serve_a_screen_reader(browser, report):
    open_page(browser, report)
    levels = [int(h.tag_name[1]) for h in browser.find_elements(By.CSS_SELECTOR, "h1, h2, h3, h4")]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    unnamed = browser.execute_script("""
        return [...document.querySelectorAll("button, input, select, textarea, [role=img]")].filter((e) => !(e.innerText || e.ariaLabel || e.labels?.length)).length""")
    assert unnamed == 0
    open_page(browser, f"{report}#dialogue=0%2F30%2Ft29")  # with tokens that are shaded
    browser.execute_script("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    browser.find_element(By.CSS_SELECTOR, ".legend button").click()  # a line that is not drawn
    for theme in ("light", "dark"):
        browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        assert browser.execute_script(CONTRAST) == [], theme


def test_a_page_follows_a_run_and_lets_a_person_speak(browser, tmp_path):
    folder, seat = write_run(tmp_path / "run", dialogues=AFTER[:2], before=None, after=None), PageSeat()
    page = LivePage(folder, 0, seat)
    threading.Thread(target=page.serve_forever, args=(0.02,), daemon=True).start()
    answers = []
    seat.show("[ann, turn 1]")
    threading.Thread(target=lambda: answers.append(seat.read("ann> ")), daemon=True).start()
    try:
        open_page(browser, page.url)
        WebDriverWait(browser, 10).until(lambda b: count(b) == 2)
        with (folder / "dialogues.jsonl").open("a") as file:
            file.write(json.dumps({"step": 9, **to_record(AFTER[9])}) + "\n")
        WebDriverWait(browser, 10).until(lambda b: count(b) == 3)
        WebDriverWait(browser, 10).until(lambda b: b.find_elements(By.TAG_NAME, "textarea"))
        browser.find_element(By.TAG_NAME, "textarea").send_keys("Answer: 2")
        browser.find_element(By.CSS_SELECTOR, "form button").click()
        deadline = time.time() + 5
        while not answers and time.time() < deadline:
            time.sleep(0.05)
        assert answers == ["Answer: 2"]
        no_complaints(browser)
    finally:
        seat.close()
        page.shutdown()
        page.server_close()


def test_a_page_that_is_only_watched_asks_for_no_seat(browser, tmp_path):
    folder = write_run(tmp_path / "run", dialogues=AFTER[:2], before=None, after=None)
    page = LivePage(folder, 0)
    threading.Thread(target=page.serve_forever, args=(0.02,), daemon=True).start()
    try:
        open_page(browser, page.url)
        WebDriverWait(browser, 10).until(lambda b: count(b) == 2)
        asked = browser.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
        assert any("/data?" in name for name in asked) and not any(name.endswith("/seat") for name in asked)
        no_complaints(browser)
    finally:
        page.shutdown()
        page.server_close()
