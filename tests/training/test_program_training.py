"""Programs as protocols in the trainer's own steps, with tiny models that really answer."""

import json
import threading

import pytest
from asked_programs import EXAMPLE, TASK, ask, assistant, post, user
from tiny_runs import config_of

from maporl import Agent, Program, Team
from maporl.engines.text import TextEngine
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.runs import train as run
from maporl.types import Stop
from trl_ext.learning.audit import VoidRun
from trl_ext.ppo.options import Decoding, PPOOptions
from trl_ext.sampling.own_weights import OwnWeights


def talk(question, base_url):
    """Each agent speaks twice, and bob is shown what ann says."""
    anns, bobs = [user(question)], []
    for _ in range(2):
        anns.append(assistant(ask(base_url, "ann", anns)))
        bobs += [user(anns[-1]["content"] + ";" + question)]
        bobs.append(assistant(ask(base_url, "bob", bobs)))
        anns.append(user(bobs[-1]["content"]))
    return bobs[-1]["content"]


def trained(folder, updates=2, on_void="stop", **sections):
    program = {"name": "program", "run": "test_program_training:talk"}
    reward = {"sources": {"label": 1.0}, "rules": ["last"]}
    sections = {"protocol": program, "reward": reward} | sections
    config = config_of(folder, updates, sections, learning_rate=0.0, on_void=on_void)
    return run.train(config, resume=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program") / "run"
    trained(folder)
    return folder


def dialogues_of(folder):
    return [json.loads(line) for line in (folder / "dialogues.jsonl").read_text().splitlines()]


def test_both_policies_learn_from_what_they_said_token_by_token(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for agent in ("ann", "bob"):
        update = next(record for record in records if f"{agent}/val/first_ratio" in record)
        assert update[f"{agent}/val/first_ratio"] == pytest.approx(1.0, abs=1e-5)
        assert update[f"{agent}/continued_share"] == 1.0 and update["program/failed"] == 0.0
    assert {u["agent"] for d in dialogues_of(folder) for u in d["utterances"] if "credit" in u["rewards"]} == {
        "ann",
        "bob",
    }


def asks_in_vain(question, base_url):
    """Both of its requests are refused."""
    for fields in ({"n": 0}, {"temperature": 0.5}):
        post(base_url, "chat/completions", {"model": "ann", "messages": [user(question)], **fields})
    return "4"


def test_an_update_in_which_no_agent_was_asked_says_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Program, "in_rehearsal", lambda self: Program(run=talk))  # it asked when it was rehearsed
    with pytest.raises(VoidRun) as told:
        trained(tmp_path / "run", 1, protocol={"name": "program", "run": "test_program_training:asks_in_vain"})
    assert ": all its requests were refused: n: " in str(told.value)
    assert "; temperature: this agent is being trained" in str(told.value)
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (record["program/refused"], record["program/failed"]) == (1.0, 0.0)


@pytest.mark.slow
def test_what_is_said_in_forks_is_learned_token_by_token_and_once(tmp_path):
    program = {"name": "program", "run": "test_program_training:talk", "replays": True}
    trained(tmp_path / "run", 1, protocol=program, branching={"how": "fork_every", "group": [2, 1, 2, 1]})
    [record] = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1:]
    for agent in ("ann", "bob"):
        assert record[f"{agent}/val/first_ratio"] == pytest.approx(1.0, abs=1e-5)
    dialogues = [d for d in dialogues_of(tmp_path / "run") if d["prompt"] == 0]
    assert len(dialogues) == 4
    samples = {(u["sample"] or f"{d['rollout']}.{u['id']}") for d in dialogues for u in d["utterances"]}
    assert len(samples) == 2 + 2 + 4 + 4


ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message.content }}{% if message.role == 'assistant' %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)


def test_log_probabilities_are_those_that_the_policy_is_trained_on(tiny):
    model, tokenizer = tiny(context=32)
    team = Team([Agent("ann", model, tokenizer)])
    team.find_stop_ids(PPOOptions())
    engine = TextEngine(team.policies, OwnWeights(team.policies, 64), 4)
    told = []

    def program(question, base_url):
        from openai import OpenAI  # here, because it takes a second

        client = OpenAI(base_url=base_url, api_key="none")
        asked = {"model": "ann", "messages": [user(question)], "logprobs": True, "top_logprobs": 2}
        choice = client.chat.completions.create(**asked).choices[0]
        told.append(choice.logprobs.content)
        pieces = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        told.append(pieces[0].logprobs.content)
        response = client.responses.create(model="ann", input=question, top_logprobs=2)
        told.append(response.output[0].content[0].logprobs)
        return choice.message.content

    drawn = (Decoding(1.0), ["ann"]), (Decoding(0.0), [])
    for decoding, learning in drawn:
        specs = {"ann": SpeakerSpec("own", ("ann",), frozenset(learning), tells_tokens=True)}
        driver = RolloutDriver(TASK, Program(run=program), specs, {"own": engine}, decoding)
        [dialogue] = driver.play([EXAMPLE])
        assert "refused" not in dialogue.outcome
        for u in dialogue.utterances:
            content = told.pop(0)
            ended = u.stop is Stop.EOS
            assert len(content) == len(u.response_ids) - ended
            assert "".join(token.token for token in content) == tokenizer.decode(u.response_ids[: len(content)])
            expected = u.logprobs or [0.0] * 4
            assert [token.logprob for token in content] == pytest.approx(expected[: len(content)])
            for token in content:
                others = {other.token: other.logprob for other in token.top_logprobs}
                assert len(token.top_logprobs) == (2 if u.logprobs else 1)
                assert sorted(others.values(), reverse=True) == list(others.values())
                assert others.get(token.token, min(others.values())) >= token.logprob - 1e-5
        assert (u.logprobs is None) == (decoding.temperature == 0)


def test_a_seed_decides_what_is_said_and_samples_differ(tiny):
    model, tokenizer = tiny(context=32)
    team = Team([Agent("ann", model, tokenizer)])
    team.find_stop_ids(PPOOptions())
    engine = TextEngine(team.policies, OwnWeights(team.policies, 64), 6)

    def program(question, base_url):
        from openai import OpenAI

        client = OpenAI(base_url=base_url, api_key="none")
        said = []
        for fields in ({"seed": 3}, {"seed": 4}, {"seed": 3, "n": 3}, {"seed": 3}, {"n": 2}):
            reply = client.chat.completions.create(model="ann", messages=[user(question)], **fields)
            said.append([choice.message.content for choice in reply.choices])
        return json.dumps(said)

    specs, drawn = {"ann": SpeakerSpec("own", ("ann",), frozenset(["ann"]))}, []
    for key in ((1,), (1,), (2,)):
        driver = RolloutDriver(TASK, Program(run=program), specs, {"own": engine}, Decoding(1.0), rng_key=key)
        drawn.append(json.loads(driver.play([EXAMPLE])[0].outcome["answer"]))
    one, other, three, again, two = drawn[0]
    assert one == again == three[:1] and len({*one, *other, *three, *two}) == 6
    assert drawn[0] == drawn[1] and not {*one, *other, *three} & {text for said in drawn[2] for text in said}


def sampled(question, base_url):
    """Ann is asked for three answers at once, with a seed every other time, and bob for one on the last of them."""
    seed = {"seed": 7} if question < "5" else {}
    body = {"model": "ann", "messages": [user(question)], "n": 3, **seed}
    choices = post(base_url, "chat/completions", body)[1]["choices"]
    return ask(base_url, "bob", [user(choices[-1]["message"]["content"] + ";" + question)])


def test_each_sample_of_a_request_is_a_row_that_is_trained(tmp_path):
    trained(tmp_path / "run", protocol={"name": "program", "run": "test_program_training:sampled"})
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [record for record in records if "ann/val/first_ratio" in record]
    assert len(updates) == 2
    for update in updates:
        for agent in ("ann", "bob"):
            assert update[f"{agent}/val/first_ratio"] == pytest.approx(1.0, abs=1e-5)
    for dialogue in dialogues_of(tmp_path / "run"):
        assert [u["tags"].get("choice") for u in dialogue["utterances"]] == ["1 of 3", "2 of 3", "3 of 3", None]
        assert all("credit" in u["rewards"] and u["trace"] for u in dialogue["utterances"])
        assert len({tuple(u["response_ids"]) for u in dialogue["utterances"][:3]}) > 1


def test_what_a_model_cannot_read_is_refused_and_the_others_of_the_batch_are_answered(tiny):
    model, tokenizer = tiny(context=32)
    tokenizer.chat_template = ALTERNATING
    team = Team([Agent("ann", model, tokenizer)])
    team.find_stop_ids(PPOOptions())
    engine = TextEngine(team.policies, OwnWeights(team.policies, 64), 4)
    requests = {"good": [user("1+1=")], "odd": [assistant("1"), user("2+2=")], "long": [user("1+1=" * 9)]}
    answers = {}

    def program(base_url):
        def one(name):
            answers[name] = post(base_url, "chat/completions", {"model": "ann", "messages": requests[name]})

        threads = [threading.Thread(target=one, args=(name,)) for name in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "2"

    specs = {"ann": SpeakerSpec("own", ("ann",), frozenset(["ann"]))}
    [dialogue] = RolloutDriver(TASK, Program(run=program), specs, {"own": engine}, Decoding(1.0)).play([EXAMPLE])
    assert {name: status for name, (status, _) in answers.items()} == {"good": 200, "odd": 400, "long": 400}
    codes = {name: answers[name][1]["error"]["code"] for name in ("odd", "long")}
    assert codes == {"odd": "unsupported_value", "long": "context_length_exceeded"}
    assert "cannot render assistant, user" in answers["odd"][1]["error"]["message"]
    assert sorted(bool(u.response_ids) for u in dialogue.utterances) == [False, False, True]


def talk_of_nothing(question, base_url):
    """Ann is asked nothing at all, which her template writes without a token."""
    status, answer = post(base_url, "chat/completions", {"model": "ann", "messages": [user("")]})
    assert (status, answer["error"]["code"]) == (400, "unsupported_value")
    assert "its prompt has no tokens" in answer["error"]["message"]
    return ask(base_url, "bob", [user(question)], max_tokens=4000)  # as a program for a larger model says


def test_a_request_without_a_token_is_refused_and_a_limit_of_another_model_is_lowered(tmp_path):
    trained(
        tmp_path / "run",
        1,
        protocol={"name": "program", "run": "test_program_training:talk_of_nothing"},
        warm_start={"steps": 0},
        on_void="warn",
    )
    said = [u for d in dialogues_of(tmp_path / "run") for u in d["utterances"]]
    assert {u["agent"]: bool(u["response_ids"]) for u in said} == {"ann": False, "bob": True}
    most = config_of(tmp_path).ppo.response_length
    assert max(len(u["response_ids"]) for u in said) <= most, "no answer is longer than the run allows"
