"""Texts of strangers reach a terminal and a page as signs that are shown, never as signs that are obeyed."""

import ast
import io
import json
import os
import re
import subprocess
import sys
import unicodedata
from dataclasses import dataclass, field, fields

import pytest
from folders import ROOT
from hostile_runs import AFTER, write_run
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from served_verifiers import Fake
from typer.testing import CliRunner

from maporl.cli.common import Screen, echo
from maporl.cli.main import app
from maporl.config.schema import ApiSection
from maporl.engines.base import Request
from maporl.engines.human import HumanEngine
from maporl.engines.openai import OpenAIEngine
from maporl.engines.transcript import Transcript
from maporl.report.live import LivePage
from maporl.report.page import as_json, payload, write_report
from maporl.report.read import read_run
from maporl.report.terminal import frame
from maporl.runs.play import told
from maporl.text import all_printable, printable, text_option, well_formed
from maporl.types import Ask, Dialogue, Example, Grade, Utterance, to_record
from trl_ext.ppo.options import GREEDY, Checked

HOSTILE = {
    "colours": "\x1b[31mred", "a title": "\x1b]0;owned\x07", "a link": "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "moves": "\x1b[2J\x1b[1;1H", "C1": "\x9b31m\x90q\x9d0;x\x9c\x85", "overwriting": "right\rwrong\b\b\x0b\x0c", "DEL and NUL": "\x7f\x00",
    "embedding": "\u202atxt\u202b\u202c\u202d\u202eexe", "isolates": "\u2066a\u2067b\u2068c\u2069", "marks": "\u200ea\u200fb\u061cc",
    "half": "\ud83d", "tags": "\U000e0041", "interlinear": "\ufff9a\ufffb", "invisible": "\u2060\ufeff\xad",
}  # fmt: skip
ALL = "".join(HOSTILE.values())


def obeyed(text, coloured=False):
    """The characters of ``text`` that a terminal or a page obeys. ``coloured``: those of Rich itself are left out."""
    if coloured:
        text = re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[\d*A|\x1b\[2K", "", text)
    joins = "\u200c\u200d\n\t"
    return sorted({c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn") and c not in joins})


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_every_kind_of_sign_becomes_visible(text, capsys):
    assert obeyed(text)
    assert not obeyed(printable(text)) and printable(printable(text)) == printable(text)
    assert not obeyed(json.dumps(all_printable({text: [text, {"a": (text,)}]}), ensure_ascii=False))
    echo(text)
    echo(text, err=True)
    shown = capsys.readouterr()
    assert shown.out == shown.err == printable(text) + "\n"


def test_ordinary_texts_stay_as_they_are():
    for text in (
        "caf\u00e9 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627\n\t\u4f60\u597d",
        "\U0001f469\u200d\U0001f467 \u2581\u2588 \u00a0\u2028",
    ):
        assert printable(text) == text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_tables_panels_and_live_views_send_only_rich_s_own_colours(text):
    table = Table(text, title=text)
    table.add_row(Text(text, style="bold"))
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=True, width=100, markup=False, highlight=False, legacy_windows=False)
    screen.print(table)
    screen.print(Panel(Text(text), title=text), text, style="red")
    with Live(table, console=screen, auto_refresh=False) as view:
        view.update(Panel(text), refresh=True)
    assert "\x1b[" in file.getvalue() and not obeyed(file.getvalue().replace("\r", ""), coloured=True)
    assert "\x1b[31mred" not in file.getvalue().replace("\x1b[31m\u241b", "")


@pytest.fixture
def hostile_run(tmp_path):
    """A run whose every name and text is hostile."""
    name = ALL.replace("\ud83d", "")  # no file holds half of a surrogate pair
    said = Utterance(
        0, name, name, 0, 0, [{"role": "user", "content": name}], name, role=name, grade=Grade(name, True, name)
    )
    dialogue = Dialogue(Example(name, name, name, {"game": name}), [said])
    folder = write_run(
        tmp_path / "run", dialogues=[dialogue, *AFTER[:2]], agents={name: {"model": name}}, task={"name": name}
    )
    with (folder / "metrics.jsonl").open("a") as file:
        values = {f"accuracy/{name}": 0.5, f"{name}/objective/kl": 0.1, f"reward/{name}": 1.0, f"failed/{name}": 1.0}
        file.write(json.dumps({"step": 5, "tokens_per_second": 1.0, **values}) + "\n")
    lines = (folder / "dialogues.jsonl").read_text().splitlines()
    half = to_record(dialogue)
    half["utterances"][0]["text"] = "HALF"
    lines.append(json.dumps({"step": 5, **half}).replace("HALF", "\\ud83d"))
    (folder / "dialogues.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_with_hostile_names_is_watched_and_reported(hostile_run):
    run = read_run(hostile_run)
    assert not obeyed(as_json(payload([run])).decode())
    page = write_report([hostile_run]).read_text(encoding="utf-8")
    assert not obeyed(page)
    file = io.StringIO()
    Screen(file=file, force_terminal=True, width=160).print(frame(run, 160))
    assert not obeyed(file.getvalue(), coloured=True) and "\x1b[31mred" not in file.getvalue()
    live = LivePage(hostile_run, 0)
    live.server_close()
    assert not obeyed(as_json(live.data(-1, -1)).decode())
    for words in (
        ["watch", "--tui", str(hostile_run)],
        ["report", str(hostile_run)],
        ["report", str(hostile_run / ALL[:20])],
    ):
        result = CliRunner().invoke(app, words)
        assert not obeyed(result.output), words
    assert not obeyed(told(run.dialogues[0].dialogue))


@pytest.mark.parametrize("place", ["key", "value", "agent", "task", "file"])
def test_errors_quote_hostile_texts_as_signs(tmp_path, place):
    name = ALL.replace("\ud83d", "").replace("\x00", "")
    config = {
        "key": {name: 1}, "value": {"seed": name}, "agent": {"protocol": {"agents": [name]}}, "task": {"task": {"name": name}}, "file": {},
    }[place]  # fmt: skip
    file = tmp_path / "a.yaml"
    file.write_text(json.dumps({"agents": {"ann": {"tiny": {}}}, **config}))
    result = CliRunner().invoke(app, ["check", str(file) if place != "file" else str(tmp_path / f"{name[:40]}.yaml")])
    assert result.exit_code == 2 and "error: " in result.output
    assert not obeyed(result.output)


def test_warnings_log_records_and_traces_of_a_program_are_printable():
    program = (
        "import logging, sys, warnings\n"
        "from maporl.config.command_line import printable_messages\n"
        f"text = {ALL!r}\n"
        "printable_messages()\n"
        "warnings.warn(text)\n"
        "logging.getLogger('x').warning('from a server: %s', text)\n"
        "raise RuntimeError(text)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, timeout=120)
    told = ended.stderr.decode("utf-8")
    assert ended.returncode == 1 and told.count("\u241b[31mred") >= 3, told
    assert not obeyed(told)


def test_a_log_record_beside_a_progress_bar_has_a_line_of_its_own():
    program = (
        "import logging\n"
        "from tqdm.auto import tqdm\n"
        "from maporl.config.command_line import printable_messages\n"
        "printable_messages()\n"
        "bar = tqdm(total=4, desc='update')\n"
        "logging.getLogger('x').warning('the first update called nothing')\n"
        "bar.update()\n"
        "bar.close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (
        "update:" in ended.stderr and "the first update called nothing" in ended.stderr.replace("\r", "\n").splitlines()
    )


# -- halves of surrogate pairs ------------------------------------------------------------------------------------


def request(agent="ann"):
    ask = Ask(agent, [{"role": "user", "content": "1+1="}])
    return Request(ask, Example("q", "1+1=", "2"), 0, 0, Transcript(messages=list(ask.messages)), "label")


@pytest.mark.parametrize(("typed", "expected"), [
    ("5\ud83d", "5\ufffd"), ("\udcc3\udca9", "\u00e9"), ("\udcff!", "\ufffd!"), ("\udbff\udc00x", "\ufffd\ufffdx"), ("caf\u00e9", "caf\u00e9"),
])  # fmt: skip
def test_what_a_person_types_can_be_written_down(typed, expected):
    [reply] = HumanEngine(lambda line: None, lambda prompt: typed).generate([request()], GREEDY)
    assert well_formed(reply.text) == reply.text
    reply.text.encode()
    assert reply.text == expected or set(reply.text) <= {"\ufffd", "x"}


def test_bytes_that_are_no_text_are_asked_for_again_and_names_are_shown_as_signs():
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n5\n"), encoding="utf-8", newline="\n")
    stdin._CHUNK_SIZE = 3  # as a terminal gives it, line by line
    shown, prompts = [], []

    def read(prompt):
        prompts.append(prompt)
        return stdin.readline().rstrip("\n")

    [reply] = HumanEngine(shown.append, read).generate([request(ALL)], GREEDY)
    assert reply.text == "5" and "(that was not valid UTF-8)" in shown
    assert not obeyed("".join([*shown, *prompts]))


def test_an_api_s_half_of_a_pair_is_written_down():
    message = {"role": "assistant", "content": "4\ud83d"}
    server = Fake({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})
    section = ApiSection(model="m", base_url=f"{server.url}/v1", retries=0, cache=False)
    [reply] = OpenAIEngine({"ann": section}, 8).generate([request()], GREEDY)
    assert reply.text == "4\ufffd"


PRINTS = {
    "maporl/loops/run.py": "names of policies and folders, which are made printable",
    "maporl/cli/common.py": "defines echo and Screen",
    "maporl/integrations/ray/member.py": "names a process in its own log",
    "maporl/integrations/ray/ray_backend.py": "tells what is started, which it makes printable",
    "maporl/config/command_line.py": "prints errors, which it makes printable",
    "maporl/config/recipes.py": "writes a page of this project's own recipes",
    "maporl/report/metric_panels.py": "writes a page of this project's own metrics",
    "maporl/runs/train.py": "names the user's own folder",
    "maporl/environments/world.py": "warns of an environment whose close failed, which it makes printable",
    "maporl/runs/check.py": "prints what maporl check prints, which it makes printable",
    "maporl/training/team_loop.py": "tells of a run that was made in Python, in printable lines",
    "maporl/training/run_record.py": "warns of a report that failed, which it makes printable",
}


def test_commands_print_by_echo_and_screen_only():
    found = set()
    for path in (ROOT / "maporl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "print",
                "typer.echo",
                "click.echo",
                "Console",
                "typer.secho",
            ):
                found.add(str(path.relative_to(ROOT)))
    assert {f for f in found if "sandboxed" not in f} <= PRINTS.keys(), (
        "print by maporl.cli.common.echo or maporl.cli.common.Screen"
    )


@dataclass
class Asking(Checked):
    ask: str = text_option("{question}", "What is asked, with {question!} and {draft}, a quote in {{others}}.")
    hint: str | None = text_option(None, "A hint, with {words!}.")
    end: str = text_option("That was all.", "The last words.")


@dataclass
class AskingShortly(Asking):
    ask: str = field(default="{question}?", metadata={"help": "What is asked."})


def test_the_help_of_a_text_names_its_placeholders_and_is_read_without_marks():
    assert [declared.metadata["help"] for declared in fields(Asking)] == [
        "What is asked, with {question} and {draft}, a quote in {others}.", "A hint, with {words}.", "The last words.",
    ]  # fmt: skip
    assert Asking("{draft} {question}", hint="{words}", end="{{x}}").hint == "{words}" and AskingShortly("{question}!")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"ask": "{others} {question}"}, "ask: it may use ['draft', 'question'] in braces, but has {others}; two braces, as in {{a}}, stand for one"),
        ({"ask": "{question:9}"}, "ask: it may use ['draft', 'question'] in braces, but has {question:9}; two braces, as in {{a}}, stand for one"),
        ({"ask": "{draft} {{question}}"}, "ask: it must contain {question}, so that the agent is told it; got '{draft} {{question}}'"),
        ({"hint": "Think."}, "hint: it must contain {words}, so that the agent is told it; got 'Think.'"),
        ({"end": "{question}"}, "end: it may use [] in braces, but has {question}; two braces, as in {{a}}, stand for one"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [Asking, AskingShortly])
def test_a_text_is_refused_with_another_placeholder_and_without_one_that_it_must_have(kind, texts, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        kind(**texts)
