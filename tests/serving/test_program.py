"""A program of the user's own as a protocol: what becomes of its requests, its answer and its failures."""

import asyncio
import contextlib
import copy
import http.client
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.parse
from dataclasses import replace
from types import SimpleNamespace

import pytest
from asked_programs import EXAMPLE, TASK, Script, ask, assistant, driver_of, play, post, user
from folders import ROOT, blocks
from played_games import EXAMPLES, buys, by_turns, spec
from played_games import driver_of as auction

from maporl import Program
from maporl.config.call_options import CallLimits, CallTexts
from maporl.config.schema import RewardSection
from maporl.decoding import Sampling, SpeakerSampling
from maporl.environments.base import tool_of
from maporl.environments.build import ToolGrant
from maporl.environments.calls import NativeFormat
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.rewards.labels import label
from maporl.rewards.scoring import Scorer
from maporl.rollout.agent_tools import formats_of_schemas
from maporl.rollout.episode import SpeakerSpec
from maporl.serving import gateway, running
from maporl.tasks import build_task
from maporl.training.dialogue_metrics import dialogue_metrics
from maporl.types import Ask, Example, Stop, why_nobody
from trl_ext.ppo.options import GREEDY, Decoding
from trl_ext.process.waits import until


class Crew:
    """Programs may be methods of objects."""

    def solve(self, question, base_url):
        return ask(base_url, "ann", [user(question)])


crew = Crew()


def chat(base_url, **fields):
    """Ask ann in this way. Return the status and what the server answers."""
    return post(base_url, "chat/completions", {"model": "ann", "messages": [user("hi")], **fields})


def plan_and_solve(question, base_url):
    plan = ask(base_url, "ann", [user(f"Plan: {question}")])
    return ask(base_url, "bob", [user(f"{plan}\n{question}")])


def credits(dialogues, sources=None, **reward):
    section = RewardSection(sources=sources or {"label": 1.0}, **reward)
    Scorer(section, {"label": label}, ("ann", "bob")).credit(dialogues, TASK)
    return [u.rewards.get("credit") for u in dialogues[0].utterances]


def test_requests_become_utterances_and_the_answer_is_graded_and_credits_whom_it_shows():
    dialogues = play(plan_and_solve, Script(ann=["I add."], bob=["2+2=4"]))
    first, second = dialogues[0].utterances
    assert (first.agent, first.messages, first.text, first.answers) == ("ann", [user("Plan: 2+2=")], "I add.", False)
    assert (second.agent, second.parents, second.answers, second.submitted) == ("bob", (0,), True, "2+2=4")
    assert dialogues[0].outcome == {"answer": "2+2=4", "calls": 2, "requests": 2, "answered": 2}
    assert credits(dialogues) == [1.0, 1.0] and second.grade.correct


def test_what_is_returned_is_graded_and_not_what_was_said():
    def program(question, base_url):
        ask(base_url, "ann", [user("1")])
        ask(base_url, "bob", [user("2")])
        return "4"

    dialogues = play(program, Script(ann=["The answer is 4."], bob=["I say 7."]))
    first, second = dialogues[0].utterances
    assert first.answers and first.submitted == "4" and not second.answers, "the last who said the answer gave it"
    assert second.settles == (0,), "what nobody was shown has the credit of the answer"
    assert credits(dialogues) == [1.0, 1.0]


def test_a_conversation_that_is_repeated_goes_on_and_one_that_is_changed_begins():
    def program(base_url):
        messages = [user("a")]
        messages += [assistant(ask(base_url, "ann", messages)), user("b")]
        messages += [assistant(ask(base_url, "ann", messages)), user("c")]
        ask(base_url, "ann", messages)
        return ask(base_url, "ann", [user("a"), assistant("something else"), user("d")])

    [dialogue] = play(program)
    assert [u.after for u in dialogue.utterances] == [None, 0, 1, None]
    assert [u.messages[-1]["content"] for u in dialogue.utterances] == ["a", "b", "c", "d"]
    assert [len(u.messages) for u in dialogue.utterances] == [1, 1, 1, 3]
    assert [u.tags.get("history", "")[:9] for u in dialogue.utterances] == ["", "continued", "continued", "changed: "]
    assert [u.turn for u in dialogue.utterances] == [0, 1, 2, 3]


def test_a_stop_string_is_left_out_of_a_reply_that_goes_on_as_it_was():
    def program(base_url):
        messages = [user("a")]
        said = ask(base_url, "ann", messages, stop=["</call>"])
        assert said == "<call>x"
        return ask(base_url, "ann", [*messages, assistant(said), user("y")], stop=["</call>"])

    engine = Script(ann=["<call>x</call>", "y"])
    stopped = engine.generate
    engine.generate = lambda requests, decoding: [replace(r, stop=Stop.STOP) for r in stopped(requests, decoding)]
    [dialogue] = play(program, engine)
    assert [(u.after, u.parents) for u in dialogue.utterances] == [(None, ()), (0, (0,))]
    assert dialogue.turns() == 1 and dialogue.at(0) == [dialogue.utterances[1]], "there is one answer"


TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def test_a_program_carries_out_the_calls_of_tools_that_it_brings():
    def program(base_url):
        body = {"model": "ann", "messages": [user("2+2=")], "tools": [TOOL]}
        message = post(base_url, "chat/completions", body)[1]["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert (message["content"], call["function"]) == (None, {"name": "add", "arguments": '{"a": 2}'})
        body["messages"] += [message, {"role": "tool", "tool_call_id": call["id"], "content": "4"}]
        return post(base_url, "chat/completions", body)[1]["choices"][0]["message"]["content"]

    [dialogue] = play(program, Script(ann=['<call>{"name": "add", "arguments": {"a": 2}}</call>', "4"]))
    first, second = dialogue.utterances
    assert "add" in first.messages[0]["content"] and first.messages[0]["role"] == "system"
    assert [(c.name, c.arguments, c.result.text) for c in first.calls] == [("add", {"a": 2}, "4")]
    assert second.after == 0 and second.parents == (0,) and second.tags["history"] == "continued"
    assert second.messages == [{"role": "tool", "content": "4", "name": "add"}]


def test_one_call_at_a_time_is_a_completion_that_ends_after_its_first_call():
    grant = ToolGrant(limits=CallLimits(parallel=True))
    formats = formats_of_schemas("ann", None, {"ann": grant})
    ends = []

    class Noting(Script):
        def generate(self, requests, decoding):
            ends.extend(request.call_ends for request in requests)
            return super().generate(requests, decoding)

    def program(base_url):
        return [chat(base_url, tools=[TOOL], **one)[0] for one in ({}, {"parallel_tool_calls": False})]

    driver = driver_of(lambda base_url: str(program(base_url)), Noting())
    driver.specs["ann"] = driver.builder.specs["ann"] = replace(driver.specs["ann"], formats=formats)
    [dialogue] = driver.play([EXAMPLE])
    assert dialogue.outcome["answer"] == "[200, 200]" and ends == [(), ("</call>",)]


def test_one_call_at_a_time_is_refused_where_a_chat_template_writes_calls_as_a_list():
    def native(several, *ends):
        reader = SimpleNamespace(several=several, ends=ends)
        form = NativeFormat([tool_of(TOOL)], CallTexts(), reader)
        return replace(driver_of(lambda base_url: "").specs["ann"], formats=lambda schemas: form)

    ask = Ask("ann", [user("hi")], schemas=(TOOL,), single=True, refusable=True)
    assert native(True).refusal_of(ask, 0, GREEDY).startswith("parallel_tool_calls: this agent's chat template writes")
    assert native(True).refusal_of(replace(ask, single=False), 0, GREEDY) is None
    assert native(True, "</t>").refusal_of(ask, 0, GREEDY) is native(False).refusal_of(ask, 0, GREEDY) is None
    ends = [native(True, "</t>").form_of(replace(ask, single=single)).stop_strings for single in (True, False)]
    assert ends == [("</t>",), ()]


def test_samples_of_one_request_are_utterances_of_their_own_and_what_goes_on_names_one_by_its_text():
    def program(question, base_url):
        status, reply = chat(base_url, messages=[user(question)], n=3)
        said = [choice["message"]["content"] for choice in reply["choices"]]
        assert (status, said) == (200, ["2+2=4", "5", "6"])
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        messages = [user(question), assistant(said[1]), user("Sure?")]
        second = ask(base_url, "ann", messages)
        ask(base_url, "bob", [user("hi")], {"x-maporl-parents": reply["id"]})
        return said[0] if second == "no" else second

    engine = Script(ann=["2+2=4", "5", "6", "no"])
    [dialogue] = play(program, engine, learning=("ann",))
    assert engine.batches == [3, 1, 1], "the samples are drawn together"
    assert [(u.after, u.parents) for u in dialogue.utterances] == [(None, ())] * 3 + [(1, (1,)), (None, (0,))]
    assert [u.tags.get("choice") for u in dialogue.utterances] == ["1 of 3", "2 of 3", "3 of 3", None, None]
    assert [u.tags.get("together") for u in dialogue.utterances] == [None] * 5, "one request is alone"
    assert dialogue.outcome == {"answer": "2+2=4", "calls": 5, "requests": 3, "answered": 3}
    assert credits([dialogue]) == [1.0] * 5 and dialogue.utterances[0].answers


def test_each_sample_counts_as_a_call_and_one_of_an_api_is_refused():
    def program(base_url):
        told = [chat(base_url, n=n)[1] for n in (3, 2, 1)]
        return "; ".join(one["error"]["message"] if "error" in one else str(len(one["choices"])) for one in told)

    [dialogue] = play(program, calls=4)
    why = "this dialogue has had 3 of 4 calls (protocol.calls), and 2 more are asked for; each sample is one"
    assert dialogue.outcome["answer"] == f"3; {why}; 1"
    api = SpeakerSpec("openai", ("ann",))
    refusal = api.refusal_of(Ask("ann", [], tags={"choice": "1 of 2"}), 0, GREEDY)
    assert refusal.startswith("n: this agent is behind an API, which would be asked, and paid, once for each sample")
    assert api.refusal_of(Ask("ann", []), 0, GREEDY) is None


def test_random_numbers_are_of_a_requests_seed_or_else_of_its_place():
    keys = []

    class Noting(Script):
        def generate(self, requests, decoding):
            keys.extend(request.rng_key for request in requests)
            return super().generate(requests, decoding)

    def program(base_url):
        for fields in ({}, {"seed": 7}, {"seed": 7, "n": 2}, {"seed": 8}, {"n": 2}, {"seed": 7}):
            chat(base_url, **fields)
        return "4"

    driver = driver_of(program, Noting())
    for rng_key, begin in (((1, "train"), (1, "train", 5, 0)), (None, (5, 0))):
        driver.builder.rng_key, driver.numbers = rng_key, [5]
        driver.play([EXAMPLE])
        first = (*begin, 7, 1)
        place = [None if rng_key is None else (*begin, number) for number in range(8)]
        assert keys == [place[0], first, first, (*begin, 7, 2), (*begin, 8, 1), place[5], place[6], first]
        keys.clear()


def test_an_agent_may_have_tools_of_the_run_which_the_program_does_not_see():
    def program(base_url):
        messages = [user("a")]
        messages += [assistant(ask(base_url, "ann", messages)), user("b")]
        said = ask(base_url, "ann", messages)
        status, answer = chat(base_url, messages=messages, tools=[TOOL])
        assert status == 400 and answer["error"]["message"].startswith("tools: this agent has tools of the run")
        return said

    lines = by_turns(ann=[buys(2), "two apples", buys(1), "three apples"])
    [dialogue] = auction(lines, World({}, {"shop": spec(agents=("ann",))}), Program(run=program)).play(EXAMPLES[:1])
    *spoken, refused = dialogue.utterances
    assert [(u.turn, u.part, u.after) for u in spoken] == [(0, 0, None), (0, 1, None), (1, 0, 1), (1, 1, 1)]
    assert dialogue.outcome["answer"] == "three apples" and spoken[3].answers
    assert [len(u.calls) for u in spoken] == [1, 0, 1, 0] and "refused" in refused.tags


def test_requests_of_threads_come_together_in_an_order_of_their_own(monkeypatch):
    monkeypatch.setattr(gateway, "SETTLE", 0.2)  # threads may take so long to begin

    def program(base_url):
        barrier = threading.Barrier(3)
        said = {}

        def one(word):
            barrier.wait()
            said[word] = ask(base_url, "ann", [user(word)])

        threads = [threading.Thread(target=one, args=(word,)) for word in "cab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return ask(base_url, "bob", [user(" ".join(said[word] for word in sorted(said)))])

    engine = Script(ann=["red", "green", "blue"])
    [dialogue] = play(program, engine)
    assert [u.messages[0]["content"] for u in dialogue.utterances[:3]] == ["a", "b", "c"]
    assert [u.order for u in dialogue.utterances] == [0, 0, 0, 1] and engine.batches == [3, 1]
    assert dialogue.utterances[3].parents == (0, 1, 2)
    assert [u.tags.get("together") for u in dialogue.utterances] == [True, True, True, None]


def test_dialogues_are_answered_in_batches():
    engine = Script()
    dialogues = driver_of(plan_and_solve, engine).play([EXAMPLE], rollouts=16)
    assert [d.outcome["answer"] for d in dialogues] == ["bob 0"] * 16
    assert sum(engine.batches) == 32 and len(engine.batches) <= 8, engine.batches


def test_a_coroutine_is_a_program_too():
    async def program(base_url, api_key, example):
        assert set(example["meta"]) == {"bare_question", "rollout", "draw"}, "its task shows nothing of meta"
        assert "answer" not in example and api_key
        said = await asyncio.gather(*(asyncio.to_thread(ask, base_url, name, [user("hi")]) for name in ("ann", "bob")))
        return " and ".join(said)

    [dialogue] = play(program)
    assert dialogue.outcome["answer"] == "ann 0 and bob 0"
    assert [u.answers for u in dialogue.utterances] == [False, True]


COMMAND = """
import json, os, sys, urllib.request

told = json.load(sys.stdin)
def ask(model, text):
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def test_a_command_is_told_what_the_page_says(tmp_path):
    (page,) = blocks(ROOT / "docs/howto/program.md", "json")
    lines = [
        f"open({str(tmp_path / 'told.json')!r}, 'w').write(json.dumps(told))",
        "print(ask('ann', told['question']))",
    ]
    driver = driver_of(None, command=command_of(tmp_path, *lines))
    driver.rng_key = (0, "record")
    driver.numbers = [1]
    driver.play([Example("1+6", "1+6=", "7", {"solution": "1+6 is 7"})])
    told, says = json.loads((tmp_path / "told.json").read_text()), json.loads(page)
    for text in (told, says):
        address = text.pop("base_url")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/d/\d+\.[\w-]+/v1", address)
    assert told == says


MBPP_ROW = {
    "text": "Double x.",
    "code": "def f(x):\n    return 2 * x",
    "test_list": ["assert f(1) == 2", "assert f(4) == 8", "assert f(5) == 10"],
}
HOTPOT_ROW = {
    "question": "Who?", "answer": "Emma", "type": "bridge", "meta": {"proof": "1"}, "paragraphs": ["Emma and Bo."],
    "supporting_facts": {"title": ["a"], "sent_id": [0]},
}  # fmt: skip
FANTOM_ROW = {"question": "Who?", "document": "d", "correct_answer": "Emma", "wrong_answer": "Bo"}


@pytest.mark.parametrize(
    ("name", "rows", "shown"),
    [
        ("gsm8k", [{"question": "?", "answer": "6*2=12\n#### 12"}], {}),
        ("math", [{"question": "?", "answer": "As 6*2=12, it is \\boxed{12}."}], {}),
        ("mbpp", [MBPP_ROW], {"entry_point": "f"}),
        ("hotpotqa", [HOTPOT_ROW], {"paragraphs": [{"title": "", "text": "Emma and Bo."}]}),
        ("fantom", [FANTOM_ROW, {**FANTOM_ROW, "document": "e"}], {"document": "e"}),
        ("triplets", None, {}),
        ("tiny_programs", None, {"entry_point": "f"}),
        ("toy_skills", None, {}),
    ],
)
def test_a_program_is_told_what_a_task_shows_and_nothing_else(tmp_path, name, rows, shown):
    options = {} if rows is None else {"source": str(tmp_path / "rows.jsonl")}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows or ())))
    mixture = {"tasks": {"own": {"name": name, **options}, "other": {"name": "toy_sum"}}, "name": "mixture"}
    heard = []
    driver = driver_of(lambda example, base_url: str(heard.append(example)))
    for section in ({"name": name, **options}, mixture):
        task = driver.task = build_task(section, "train", 0)
        own = task[0]
        driver.play([own])
        told = heard.pop()
        in_play = {"rollout": 0, "draw": repr((None, 0)), "bare_question": own.question}
        meta = shown | in_play | ({"task": "own"} if section is mixture else {})
        assert told == {"id": own.id, "question": task.question(own), "meta": meta}
        before = copy.deepcopy(own)
        for value in told["meta"].values():  # it is the program's own, whatever becomes of it
            if isinstance(value, list):
                value.clear()
        assert own == before


def command_of(tmp_path, *lines):
    path = tmp_path / "program.py"
    path.write_text(COMMAND + "\n".join(lines))
    return (sys.executable, str(path))


def test_a_command_is_told_the_question_and_its_last_line_is_the_answer(tmp_path):
    lines = ["print('x' * 5_000_000)", "print(ask('ann', told['question']))"]
    [dialogue] = play(None, Script(ann=["4"]), command=command_of(tmp_path, *lines))
    assert dialogue.outcome == {"answer": "4", "calls": 1, "requests": 1, "answered": 1}
    assert dialogue.utterances[0].messages == [user("2+2=")]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("ending", ["print(4)", "import time; time.sleep(60)"])
def test_the_children_of_a_command_end_with_it(tmp_path, ending):
    child = tmp_path / "child"
    lines = [
        "import subprocess",
        "other = subprocess.Popen(['sleep', '60'], stdout=sys.stdout)",
        f"open({str(child)!r}, 'w').write(str(other.pid))",
        "ask('ann', 'hi')",
        ending,
    ]
    with (
        pytest.warns(UserWarning, match="did not end within 2 seconds")
        if "sleep" in ending
        else contextlib.nullcontext()
    ):
        [dialogue] = play(None, command=command_of(tmp_path, *lines), seconds=2)
    assert len(dialogue.utterances) == 1
    assert until(lambda left: time.sleep(0.01) or gone(int(child.read_text())), 5)


def test_a_command_that_was_waited_for_is_not_killed_by_its_number(tmp_path, monkeypatch):
    """The number of a process may be another one's as soon as it was waited for."""
    signalled, kill = [], os.killpg

    def killed(group, number):
        signalled.append((group, gone(group) and not os.waitid(os.P_PID, group, os.WEXITED | os.WNOWAIT | os.WNOHANG)))
        kill(group, number)

    monkeypatch.setattr(os, "killpg", killed)
    play(None, command=command_of(tmp_path, "print(4)"))
    assert [late for _, late in signalled] == [False], "it was signalled once, before it was waited for"


def test_a_command_is_given_no_secrets_but_those_that_are_named(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SEARCH", "HF_HOME"):
        monkeypatch.setenv(name, f"value of {name}")
    lines = [
        "import os",
        "print([n for n in ('HF_TOKEN', 'WANDB_API_KEY', 'MY_SEARCH', 'HF_HOME') if n in os.environ])",
    ]
    [dialogue] = play(None, command=command_of(tmp_path, *lines))
    assert dialogue.outcome["answer"] == "['HF_HOME']"
    [dialogue] = play(None, command=command_of(tmp_path, *lines), variables=("MY_SEARCH", "HF_TOKEN"))
    assert dialogue.outcome["answer"] == "['HF_TOKEN', 'MY_SEARCH', 'HF_HOME']"
    with pytest.warns(UserWarning, match=r"MY_SEARCH of your environment is not given to it; name it in protocol\.var"):
        play(None, command=command_of(tmp_path, "import os", "os.environ['MY_SEARCH']"))


def test_functions_that_never_return_end_the_run_before_threads_run_out(monkeypatch):
    monkeypatch.setattr(running, "MOST_LEFT", 2)
    hold = threading.Event()
    driver = driver_of(lambda base_url: hold.wait(60), seconds=0.1)
    try:
        with pytest.warns(UserWarning, match="did not end within"), pytest.raises(ConfigError, match="3 calls of the"):
            for _ in range(9):
                driver.play([EXAMPLE])
    finally:
        hold.set()


def raises(base_url):
    ask(base_url, "ann", [user("hi")])
    raise ValueError("no such city")


def test_a_program_that_raises_leaves_a_dialogue_without_answer():
    with pytest.warns(UserWarning, match=r"(?s)on_failure: zero.*no such city") as told:
        dialogues = play(raises)
    assert "raise ValueError" in str(told[0].message) and dialogues[0].outcome["answer"] is None
    assert dialogues[0].outcome["failure"].endswith("ValueError: no such city")
    assert credits(dialogues) == [0.0] and dialogues[0].utterances[0].submitted == ""


def test_of_a_traceback_the_frames_of_the_program_and_the_one_that_raised_are_told():
    def deep(base_url):
        return json.loads("no JSON")

    with pytest.warns(UserWarning):
        [dialogue] = play(deep)
    told = dialogue.outcome["failure"]
    assert 'return json.loads("no JSON")' in told and told.splitlines()[-1].startswith("json.decoder.JSONDecodeError")
    assert told.count("  File ") == 2 and "in raw_decode" in told, "json's two frames between are left out"


def test_a_failure_may_drop_the_dialogue_or_stop_the_run():
    with pytest.warns(UserWarning, match="no such city"):
        [dialogue] = play(raises, on_failure="drop")
    assert dialogue.lost == ("program",) and dialogue.outcome["failure"].endswith("ValueError: no such city")
    assert dialogue_metrics([], World(), (), [dialogue])["program/failed"] == 1.0
    with pytest.raises(ConfigError, match=r"(?s)set protocol.on_failure: zero or drop.*no such city"):
        play(raises, on_failure="stop")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (lambda base_url: None, "it returned nothing; expected its answer, a text"),
        (lambda base_url: {"answer": 4}, "it returned {'answer': 4}; expected its answer, a text"),
        (lambda base_url: time.sleep(60), "it did not end within 0.3 seconds"),
        (lambda base_url: sys.exit(3), "SystemExit: 3"),
    ],
)
def test_a_program_without_an_answer_says_why(program, says):
    with pytest.warns(UserWarning) as told:
        [dialogue] = play(program, seconds=0.3)
    assert says in dialogue.outcome["failure"] and says in str(told[0].message)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["sys.stderr.write('e' * 3_000_000)", "raise KeyError('city')"], "status 1; the last lines of its errors:"),
        (["pass"], "it ended without an answer, which is its last line"),
    ],
)
def test_a_command_that_fails_says_why(tmp_path, lines, says):
    with pytest.warns(UserWarning):
        [dialogue] = play(None, command=command_of(tmp_path, *lines))
    assert says in dialogue.outcome["failure"] and ("KeyError: 'city'" in dialogue.outcome["failure"]) == (
        len(lines) > 1
    )


def test_a_method_of_an_object_is_a_program():
    [dialogue] = play("test_program:crew.solve")
    assert dialogue.outcome == {"answer": "ann 0", "calls": 1, "requests": 1, "answered": 1}


def test_a_number_is_an_answer():
    [dialogue] = play(lambda base_url: len(ask(base_url, "ann", [user("hi")])))
    assert dialogue.outcome["answer"] == "5"


def test_rewards_that_a_program_reports():
    def program(base_url):
        ask(base_url, "ann", [user("1")])
        said = ask(base_url, "bob", [user("2")])
        for body in ({"reward": 0.5}, {"rewards": {"ann": 2.0}}, {"reward": 0.25, "agent": "bob"}):
            assert post(base_url, "reward", body) == (200, {"ok": True})
        status, answer = post(base_url, "reward", {"reward": 1, "agent": "eve"})
        assert status == 400 and "'ann', 'bob'" in answer["error"]["message"]
        return said

    dialogues = play(program)
    assert [u.rewards for u in dialogues[0].utterances] == [{"reported": 2.0}, {"reported": 0.75}]
    assert credits(dialogues, {"reported": 1.0}, rules=["own"]) == [2.0, 0.75]


def refusals(*requests, headers=()):
    """What a program is told that sends ``requests``, and the dialogue."""
    told = []

    def program(base_url):
        told.extend(post(base_url, path, body, headers) for path, body in requests)
        return ask(base_url, "ann", [user("hi")])

    [dialogue] = play(program)
    return [(status, answer["error"]["message"], answer["error"]["code"]) for status, answer in told], dialogue


def test_bad_requests_get_an_error_and_stand_in_the_outcome():
    hi = [user("hi")]
    told, dialogue = refusals(
        ("chat/completions", {"model": "eve", "messages": hi}),
        ("chat/completions", {"model": "ann", "messages": hi, "n": 0}),
        ("chat/completions", b"{"),
        ("chat/completions", b" " * (8 * 2**20 + 1)),
        ("embeddings", {}),
    )
    assert [(status, code) for status, _, code in told] == [
        (404, "model_not_found"), (400, "unsupported_value"), (400, "invalid_json"), (413, "too_large"), (404, "not_found")
    ]  # fmt: skip
    assert dialogue.outcome["refused"] == [message for _, message, _ in told]
    assert "known: ann, bob" in told[0][1] and len(dialogue.utterances) == 1


def test_the_outcome_says_how_many_requests_there_were_and_why_nobody_was_asked():
    def refused(base_url):
        chat(base_url, temperature=0.1, top_p=0.5)
        chat(base_url, n=0, audio={})
        return "4"

    [dialogue] = play(refused, learning=("ann",))
    outcome = dialogue.outcome
    assert (outcome["requests"], outcome["answered"], outcome["calls"]) == (2, 0, 1)
    assert [why.partition(":")[0] for why in outcome["refused"]] == ["temperature", "top_p", "n", "audio"], "each alone"
    assert outcome["nobody"] == f"all its requests were refused: {'; '.join(outcome['refused'])}"
    assert why_nobody([dialogue]) == outcome["nobody"]
    others = play(lambda base_url: ask(base_url, "ann", [user("hi")])) + play(lambda base_url: "4")
    assert [d.outcome.get("nobody") for d in others] == [None, "no request came to its base_url"]
    assert why_nobody([dialogue, *others]) is None and why_nobody([]) is None
    found = dialogue_metrics([dialogue, others[0]], World(), ())
    assert (found["program/refused"], found["program/failed"]) == (2 / 3, 0.0)


OWN = "protocol.run: {}.py:3 makes {}() without base_url, which asks its provider with {}, and no agent; give it"
CLIENTS = {
    "OpenAI()": ("OpenAI", "OPENAI_API_KEY"),
    "openai.AsyncOpenAI(timeout=3)": ("AsyncOpenAI", "OPENAI_API_KEY"),
    "ChatMistralAI(model='m')": ("ChatMistralAI", "MISTRAL_API_KEY"),
    "OpenAI(base_url=base_url)": None, "ChatOpenAI(openai_api_base=base_url)": None, "OpenAI(**options)": None,
    "OpenAI().with_options(base_url=base_url)": None, "Anthropic()": None, "openai()": None,
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_of_the_programs_own_is_warned_of_before_it_asks(client, tmp_path, monkeypatch, recwarn):
    """Its requests would go to a provider with the user's key."""
    name = f"own_{list(CLIENTS).index(client)}"
    (tmp_path / f"{name}.py").write_text('"""Calls OpenAI()."""\ndef solve(base_url):\n    ' + client)
    monkeypatch.syspath_prepend(str(tmp_path))
    for key in ("OPENAI_API_KEY", "MISTRAL_API_KEY"):
        monkeypatch.setenv(key, "sk-company")
    program = Program(run=f"{name}:solve")
    told = [str(one.message) for one in recwarn]
    if CLIENTS[client] is None:
        assert told == []
        return
    assert len(told) == 1 and told[0].startswith(OWN.format(name, *CLIENTS[client])), told
    outcome = play(f"{name}:solve")[0].outcome
    assert f"no request came to its base_url; {name}.py:3 makes" in outcome["nobody"]
    for key in ("OPENAI_API_KEY", "MISTRAL_API_KEY"):
        monkeypatch.delenv(key)
    assert replace(program, calls=3)._own_clients == "", "without a key it can ask nobody"


@pytest.mark.parametrize(("listed", "then"), [("x.org", "x.org,127.0.0.1"), ("", "127.0.0.1"), ("*", "*")])
def test_no_proxy_of_the_environment_takes_what_a_program_asks(listed, then, monkeypatch):
    httpx = pytest.importorskip("httpx")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, listed)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    older = httpx.Client()

    def program(base_url, client=None):
        body = {"model": "ann", "messages": [user("hi")]}
        answer = (client or httpx.Client()).post(f"{base_url}/chat/completions", json=body)
        return answer.json()["choices"][0]["message"]["content"]

    assert play(program)[0].outcome["answer"] == "ann 0"
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == then
    if listed != "*":
        with pytest.warns(UserWarning, match="Connection refused"):
            outcome = play(lambda base_url: program(base_url, older))[0].outcome
        why = "HTTP_PROXY is set, and a client asks that proxy if it has not read NO_PROXY"
        assert (outcome["nobody"].rpartition("; ")[2], outcome["requests"]) == (why, 0)


def test_the_header_names_parents_by_the_ids_of_replies():
    def program(base_url):
        body = {"model": "ann", "messages": [user("1")]}
        ids = [post(base_url, "chat/completions", body)[1]["id"] for _ in range(2)]
        refused = post(base_url, "chat/completions", body, {"x-maporl-parents": "chatcmpl-0-0"})
        assert refused[0] == 400 and "chatcmpl-0-0" in refused[1]["error"]["message"]
        ask(base_url, "bob", [user("2")], {"x-maporl-parents": ids[1], "x-maporl-role": "critic"})
        return ask(base_url, "bob", [user("ann 0")], {"x-maporl-parents": ""})

    [dialogue] = play(program)
    assert [u.parents for u in dialogue.utterances] == [(), (), (1,), ()]
    assert dialogue.utterances[2].role == "critic"


def test_what_an_agent_asks_in_a_call_is_shown_to_whom_it_calls_and_its_id_is_shown_in_any_text():
    tool = {"type": "function", "function": {"name": "ask_bob", "parameters": {"type": "object"}}}

    def program(base_url):
        fields = {"model": "ann", "messages": [user("2+2=")], "tools": [tool]}
        _, first = post(base_url, "chat/completions", fields)
        [call] = first["choices"][0]["message"]["tool_calls"]
        ask(base_url, "bob", [user("You are asked: What is 2+2?")])
        ask(base_url, "bob", [user("Somebody says: I ask.")])
        ask(base_url, "bob", [user("Nobody says anything.")])
        return ask(base_url, "ann", [user(f"Result of {call['id']}: 4")])

    said = 'I ask.<call>{"name": "ask_bob", "arguments": {"question": "What is 2+2?"}}</call>'
    [dialogue] = play(program, Script(ann=[said, "4"], bob=["four", "fore", "for"]))
    assert [u.parents for u in dialogue.utterances] == [(), (0,), (0,), (), (0,)]


def test_replies_do_not_wait_until_the_client_has_acknowledged_a_part_of_them():
    """Without this every request takes 40 ms longer."""
    nodelay = []

    def program(base_url):
        address = urllib.parse.urlsplit(base_url)
        connection = http.client.HTTPConnection(address.hostname, address.port)
        connection.request("GET", f"{address.path}/models")
        assert connection.getresponse().status == 200
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(number))) as other:
                if other.getpeername() == connection.sock.getsockname():
                    nodelay.append(other.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return "4"

    play(program)
    assert nodelay == [1]


def test_an_address_serves_its_own_dialogue_and_no_other():
    seen = []

    def program(question, base_url):
        seen.append(base_url)
        return ask(base_url, "ann", [user(question)])

    play(program)
    secret = seen[0].rpartition("/v1")[0]
    for url in (seen[0], f"{secret[:-1]}x/v1"):
        status, answer = chat(url)
        assert status == 410 and answer["error"]["code"] == "dialogue_over"


def test_few_programs_run_at_once():
    running, most = [], []

    def program(base_url):
        running.append(1)
        most.append(len(running))
        said = ask(base_url, "ann", [user("hi")])
        running.pop()
        return said

    dialogues = driver_of(program, concurrency=2).play([EXAMPLE], rollouts=6)
    assert max(most) == 2 and [d.outcome["answer"] for d in dialogues] == ["ann 0"] * 6


def test_a_program_that_hangs_does_not_keep_others_waiting():
    def program(base_url, example):
        if example["meta"]["rollout"] == 0:
            time.sleep(5)
        return ask(base_url, "ann", [user("hi")])

    begun = time.monotonic()
    with pytest.warns(UserWarning, match="did not end"):
        dialogues = driver_of(program, concurrency=1, seconds=0.3, engine=Script())
        dialogues.common_seed = False
        played = dialogues.play([EXAMPLE], rollouts=3)
    assert [d.outcome["answer"] for d in played] == [None, "ann 0", "ann 0"] and time.monotonic() - begun < 4


def test_temperatures_of_agents_in_training_are_those_of_the_run():
    def program(base_url):
        same, (status, answer) = chat(base_url, temperature=1.0), chat(base_url, temperature=0)
        assert (same[0], status) == (200, 400)
        return answer["error"]["message"]

    [dialogue] = play(program, learning=("ann",))
    why = "temperature: this agent is being trained, and answers are drawn with 1.0"
    assert dialogue.outcome["answer"].startswith(why)
    assert dialogue.outcome["refused"] == [dialogue.outcome["answer"]]
    assert dialogue.utterances[1].tags["refused"] and not dialogue.utterances[1].trainable
    assert play(
        lambda base_url: ask(base_url, "ann", [user("hi")], temperature=0), learning=("ann",), ignore=("temperature",)
    )
    assert play(lambda base_url: ask(base_url, "ann", [user("hi")], temperature=0), learning=("bob",))


def test_log_probabilities_that_an_engine_does_not_tell_are_refused_by_name():
    def program(base_url):
        return chat(base_url, logprobs=True)[1]["error"]["message"]

    [dialogue] = play(program)
    assert dialogue.outcome["answer"].startswith("logprobs: this agent's engine does not tell them")


def test_dialogues_of_programs_are_not_forked():
    driver = driver_of(plan_and_solve)
    [episode] = driver.opened([EXAMPLE])
    with pytest.raises(ConfigError, match=r"program.*cannot be forked.*branching.how: independent"):
        driver.fork(episode, 1)
    driver.release()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "expected one of them"),
        ({"run": raises, "command": ("x",)}, "expected one of them"),
        ({"run": raises, "seconds": 0}, "seconds: expected a number above 0"),
        ({"run": raises, "on_failure": "skip"}, "on_failure"),
        ({"run": "nowhere:solve"}, "nowhere"),
        ({"run": lambda row: row}, "expected a function of base_url, and of question, api_key and example if it likes"),
        (
            {"run": lambda question: question},
            "without base_url its client cannot reach its agents, and would ask a provider",
        ),
        ({"run": lambda base_url, row, far=1: row}, "which needs row; give it a default"),
        ({"run": "test_program:Crew.solve"}, "which needs self; name the method of an object, as in my_app:team.solve"),
        ({"run": "solve"}, "unknown 'solve'; your own is named MODULE:OBJECT"),
    ],
)
def test_options_that_cannot_be(options, says):
    with pytest.raises(ValueError, match=says):
        Program(**options)


def test_a_play_that_is_given_up_ends_its_program(tmp_path):
    child = tmp_path / "child"
    lines = [f"open({str(child)!r}, 'w').write(str(os.getpid()))", "ask('ann', 'hi')", "import time; time.sleep(60)"]
    driver = driver_of(None, command=command_of(tmp_path, *lines))
    [episode] = driver.opened([EXAMPLE])
    assert until(lambda left: time.sleep(0.01) or (child.exists() and child.read_text()), 20), "the program works"
    assert not episode.over
    driver.release()
    assert gone(int(child.read_text()))


@pytest.mark.parametrize(("role", "asked", "refused"), [
    (None, {"temperature": 0.5}, None), (None, {"temperature": 0.7}, "drawn with 0.5, not with 0.7"),
    ("critic", {"temperature": 0.9, "top_p": 0.8}, None), ("critic", {"temperature": 0.5}, "drawn with 0.9, not with 0.5"),
    ("critic", {"top_k": 0, "max_tokens": 3}, None), (None, {"top_p": 0.8}, "drawn with 1.0, not with 0.8"),
])  # fmt: skip
def test_a_request_that_says_how_the_run_draws_is_never_refused(role, asked, refused):
    """What a program asks for is compared with the nearest value: the role's, the agent's, the run's."""
    sampling = SpeakerSampling(
        Sampling(temperature=0.5), {"critic": Sampling(temperature=0.9, top_p=0.8)}, training=True
    )
    spec = SpeakerSpec("engine", ("ann",), frozenset({"ann"}), sampling=sampling)
    why = spec.refusal_of(Ask("ann", [], role, sampling=Sampling(**asked)), 0, Decoding(0.7))
    assert why is None if refused is None else refused in why
