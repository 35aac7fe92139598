"""Dialogues of programs are forked by running the program again, which is told what was said.

The programs use the ``openai`` client, and the agents count what they say.
"""

import itertools
import random
import threading
from contextlib import nullcontext

import pytest
from asked_programs import EXAMPLE, TASK, Script, assistant, driver_of, post, user
from tiny_runs import config_of

from maporl import Program
from maporl.config.schema import AblateSection, BranchingSection, RewardSection
from maporl.errors import ConfigError
from maporl.protocols import program as module
from maporl.rewards.labels import label
from maporl.rewards.scoring import Scorer
from maporl.rollout.branching import play_branched


class Counted(Script):
    """Agents that say ``AGENT NUMBER``, counted over all dialogues, or for bob what ``answers`` has next."""

    def __init__(self, answers=()):
        super().__init__()
        numbers = {name: itertools.count() for name in ("ann", "bob")}
        left = iter(answers)
        self.script = lambda r: (
            next(left, None) if r.ask.agent == "bob" and answers else f"{r.ask.agent} {next(numbers[r.ask.agent])}"
        )


def client(base_url):
    from openai import OpenAI  # here, because it takes a second

    return OpenAI(base_url=base_url, api_key="none", max_retries=0)


def said(client, model, messages, **fields):
    return client.chat.completions.create(model=model, messages=messages, **fields).choices[0].message


def talk(question, base_url):
    """Ann drafts, bob answers, and ann goes on with her conversation; bob's word is the answer."""
    one = client(base_url)
    drafts = [user(question)]
    drafts.append(assistant(said(one, "ann", drafts).content))
    answer = said(one, "bob", [user(f"{drafts[-1]['content']}; {question}")]).content
    said(one, "ann", [*drafts, user(answer)])
    return answer


def branched(program, how, engine, reward=None, ablate=None, **section):
    driver = driver_of(program, engine, replays=True)
    scorer = Scorer(RewardSection(sources=reward or {"label": 1.0}), {"label": label}, ("ann", "bob"))
    branching = BranchingSection(how=how, ablate=ablate, **section)
    return play_branched(driver, [EXAMPLE], branching, lambda some: scorer.worth(some, TASK))


def texts(dialogue):
    return [u.text for u in dialogue.utterances]


def test_a_fork_is_told_what_was_said_and_the_rest_is_sampled():
    engine = Counted()
    driver = driver_of(talk, engine, replays=True)
    [trunk] = driver.opened([EXAMPLE])
    driver.step([trunk])
    driver.step([trunk])
    fork, early = driver.fork(trunk, 1), driver.fork(trunk, 2, 1)
    assert engine.batches == [1, 1], "nothing is sampled for what was said"
    driver.finish([trunk, fork, early])
    driver.release()
    assert texts(trunk.dialogue) == ["ann 0", "bob 0", "ann 1"]
    assert texts(fork.dialogue) == ["ann 0", "bob 0", "ann 2"]
    assert texts(early.dialogue) == ["ann 0", "bob 1", "ann 3"]
    assert [u.after for u in early.dialogue.utterances] == [None, None, 0]
    assert [u.parents for u in early.dialogue.utterances] == [(), (0,), (0, 1)]
    assert early.dialogue.outcome == {"answer": "bob 1", "calls": 3, "requests": 3, "answered": 3}
    assert [u.sample for u in fork.dialogue.utterances] == ["0.0", "0.1", None]


BRANCHINGS = {
    # how: (options, the texts of the dialogues; which last word is sampled first depends on which program asks first)
    "fork_first": ({"group": 2}, ["ann 0,bob 0,last", "ann 2,bob 1,last"]),
    "fork_every": ({"group": (1, 2, 1)}, ["ann 0,bob 0,last", "ann 0,bob 1,last"]),
    "tree": ({"group": 2}, ["ann 0,bob 0", "ann 1", "ann 0,bob 1,last", "ann 0,bob 1,last"]),
    "stages": ({"group": (1, 2, 1), "keep": 1, "choose": "balanced"}, ["ann 0,bob 0", "ann 0,bob 1,last"]),
    "best_of": ({"drafts": 3, "group": 2}, ["ann 0,bob 0,last", "ann 0,bob 1,last"]),
}


def worth_of(text):
    return {"bob 1": 1.0}.get(text, 0.0)


def reporting(question, base_url):
    """As :func:`talk`, and the program says what bob's answer is worth as soon as it has it."""
    one = client(base_url)
    drafts = [user(question)]
    drafts.append(assistant(said(one, "ann", drafts).content))
    answer = said(one, "bob", [user(f"{drafts[-1]['content']}; {question}")]).content
    post(base_url, "reward", {"reward": worth_of(answer), "agent": "bob"})
    said(one, "ann", [*drafts, user(answer)])
    return answer


@pytest.mark.parametrize("how", BRANCHINGS)
def test_every_branching_forks_programs(how):
    options, expected = BRANCHINGS[how]
    dialogues = branched(reporting, how, Counted(), {"reported": 1.0, "label": 1.0}, **options)
    whole = [d for d in dialogues if len(d.utterances) == 3]
    assert sorted(",".join([*texts(d)[:2], *["last"] * (d in whole)]) for d in dialogues) == sorted(expected)
    last = {d.utterances[2].text for d in whole}
    assert len(last) == len(whole) and all(text.startswith("ann ") for text in last)
    assert all(d.outcome["answer"] == d.utterances[1].text == d.utterances[1].submitted for d in whole)
    paid = {u.text: u.rewards["reported"] for d in dialogues for u in d.utterances if "reported" in u.rewards}
    assert paid == {text: worth_of(text) for text in {t for e in expected for t in e.split(",") if t[:3] == "bob"}}


def test_what_only_the_end_of_the_trunk_made_an_answer_is_none_in_its_fork():
    """Bob's first word is the answer of the trunk, and his second one that of the fork."""

    def program(question, base_url):
        one = client(base_url)
        first = said(one, "bob", [user(question)]).content
        second = said(one, "bob", [user(question + "again")]).content
        post(base_url, "reward", {"reward": 1.0})
        return first if second == "no" else second

    driver = driver_of(program, Counted(["4", "no", "5"]), replays=True)
    [trunk] = driver.opened([EXAMPLE])
    driver.finish([trunk])
    fork = driver.fork(trunk, 1, 1)
    driver.finish([fork])
    driver.release()
    found = [[(u.text, u.submitted, u.settles, u.rewards) for u in e.dialogue.utterances] for e in (trunk, fork)]
    assert found == [
        [("4", "4", (), {"reported": 1.0}), ("no", None, (0,), {})],
        [("4", None, (1,), {}), ("5", "5", (), {"reported": 1.0})],
    ]


TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def test_samples_of_one_request_are_told_again_and_those_after_the_fork_are_drawn():
    def program(question, base_url):
        one = client(base_url)
        told = []
        for model in ("ann", "bob"):
            reply = one.chat.completions.create(model=model, messages=[user(question)], n=2)
            told.append(" and ".join(choice.message.content for choice in reply.choices))
        return "; ".join(told)

    dialogues = branched(program, "fork_every", Counted(), group=(1, 2))
    assert [d.outcome["answer"] for d in dialogues] == [
        "ann 0 and ann 1; bob 0 and bob 1",
        "ann 0 and ann 1; bob 2 and bob 3",
    ]


def test_calls_that_a_program_carries_out_are_told_again():
    def program(question, base_url):
        one, messages = client(base_url), [user(question)]
        message = said(one, "bob", messages, tools=[TOOL])
        [call] = message.tool_calls
        messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        return said(one, "bob", messages, tools=[TOOL]).content

    called = '<call>{"name": "add", "arguments": {"a": 2}}</call>'
    dialogues = branched(program, "fork_every", Counted([called, "4", "5"]), group=(1, 2))
    assert [texts(d) for d in dialogues] == [[called, "4"], [called, "5"]]
    assert [[(c.arguments, c.result.text) for c in d.utterances[0].calls] for d in dialogues] == [[({"a": 2}, "4")]] * 2
    assert [d.utterances[1].after for d in dialogues] == [0, 0]


def test_threads_that_come_in_another_order_are_told_what_each_was_told():
    runs, turn = itertools.count(), threading.Lock()

    def program(question, base_url):
        with turn:
            number = next(runs)
        one, heard = client(base_url), {}

        def chain(word, before):
            before.wait(20)
            heard[word] = said(one, "ann", [user(word)]).content
            heard[word + "2"] = said(one, "ann", [user(word + "2")]).content

        gates = {"a": threading.Event(), "b": threading.Event()}
        threads = {word: threading.Thread(target=chain, args=(word, gates[word])) for word in gates}
        for thread in threads.values():
            thread.start()
        for word in "ab" if number == 0 else "ba":  # a play again lets the other chain go first
            gates[word].set()
            if number == 0:
                threads[word].join()
        for thread in threads.values():
            thread.join()
        return said(one, "bob", [user(" ".join(heard[word] for word in ("a", "a2", "b", "b2")))]).content

    driver = driver_of(program, Counted(), replays=True)
    [trunk] = driver.opened([EXAMPLE])
    driver.finish([trunk])
    fork = driver.fork(trunk, 1, 4)
    driver.finish([fork])
    driver.release()
    assert texts(trunk.dialogue) == ["ann 0", "ann 1", "ann 2", "ann 3", "bob 0"]
    assert fork.dialogue.utterances[4].messages == [user("ann 0 ann 1 ann 2 ann 3")]
    assert texts(fork.dialogue) == ["ann 0", "ann 1", "ann 2", "ann 3", "bob 1"]


RUNS = itertools.count()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda words: user(f"{random.random()} {words}"),
            r"protocol program: played again, it asks something else\..* In step 2 on question 'e', agent 'bob' was "
            r"asked \{'role': 'user', 'content': '0\.\d+ ann 0'\}, and agent 'bob' now \{'role': 'user', 'content': "
            r"'0\.\d+ ann 0'\}\. Let it ask the same .* or set branching.how: independent",
        ),
        (
            lambda words: user(words) if next(RUNS) == 0 else None,
            r"In step 2 on question 'e', agent 'bob' was asked \[\{'role': 'user', 'content': 'ann 0'\}\], and agent 'ann' now "
            r"\[\{'role': 'user', 'content': 'nothing'\}\]",
        ),
    ],
)
def test_a_program_that_asks_something_else_is_an_error_that_says_what(change, says, monkeypatch):
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.1)

    def program(question, base_url):
        one = client(base_url)
        asked = change(said(one, "ann", [user(question)]).content)
        first = said(one, "bob", [asked]).content if asked else "nothing"
        return said(one, "ann", [user(first)]).content

    driver = driver_of(program, Counted(), replays=True)
    [trunk] = driver.opened([EXAMPLE])
    driver.finish([trunk])
    with pytest.raises(ConfigError, match=says):
        driver.fork(trunk, 1, 2)


def test_agents_may_be_left_out_of_a_program():
    [dialogue] = branched(talk, "independent", Counted(), ablate=AblateSection(who=("ann",), placeholder="nothing"))
    [without] = dialogue.ablations
    assert texts(without) == ["nothing", "bob 1", "nothing"] and without.outcome["answer"] == "bob 1"


@pytest.mark.slow
def test_programs_with_replays_all_run_at_once_and_evaluations_as_before():
    dialogues = branched(talk, "fork_first", Counted(), group=80)
    assert len({d.outcome["answer"] for d in dialogues}) == 80, "64 would wait for a place that nobody leaves"
    with pytest.raises(ValueError, match="concurrency: with replays a dialogue and its forks run beside each other"):
        Program(run=talk, replays=True, concurrency=3)
    assert Program(run=talk, replays=True).in_evaluation() == Program(run=talk)


@pytest.mark.parametrize(
    ("branching", "replays", "sources", "says"),
    [
        ({"how": "fork_every", "group": 2}, False, ["label"], "or set protocol.replays: true if it asks the same"),
        ({"how": "fork_every", "group": 2}, True, ["label"], None),
        ({"how": "tree", "group": 2}, True, ["label"], r"let a program report .* \(reward.sources: reported\)"),
        ({"how": "tree", "group": 2}, True, ["label", "reported"], None),
    ],
)
def test_a_configuration_says_what_a_branching_needs_of_a_program(tmp_path, branching, replays, sources, says):
    program = {"name": "program", "run": "test_program_forks:talk", "replays": replays}
    reward = {"sources": dict.fromkeys(sources, 1.0), "rules": ["own"]}
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        config_of(tmp_path, 1, {"protocol": program, "branching": branching, "reward": reward})
