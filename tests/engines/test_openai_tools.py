"""An agent behind an OpenAI-style API calls tools and acts in an environment.

The API is a real server, and is scripted.
"""

import pytest
import yaml
from asked_programs import post
from served_verifiers import Fake

from maporl.errors import ConfigError
from maporl.runs.build import build_player
from maporl.tasks import build_task
from maporl.types import Stop, TurnEnd
from maporl.validation.load import load
from trl_ext.ppo.options import Decoding

MODULE = '''
from maporl import Environment, Tool


def double(n: int) -> int:
    """Double a number.

    Args:
        n: the number
    """
    return 2 * n


class Counter(Environment):
    def reset(self, seed, row):
        self.count = 0

    def tools(self, agent):
        def up() -> int:
            """Count up."""
            self.count += 1
            return self.count

        return [Tool.of(up)]

    def reward(self):
        return float(self.count)
'''
DOUBLE, UP = '<call>{"name": "double", "arguments": {"n": 4}}</call>', '<call>{"name": "up"}</call>'


@pytest.fixture
def api():
    """A server that answers with the next of ``script``, and keeps what it is asked."""
    server = Fake()
    server.usage = None
    return server


def asked(api):
    return [body for _, _, body in api.asked]


@pytest.fixture
def play(api, tmp_path, forgotten):
    """``play(says, **agent)`` -> the utterances of a dialogue in which the API says ``says``."""
    (tmp_path / "shelf_of_tools.py").write_text(MODULE)

    def run(says, sections=None, **agent):
        told = [one if isinstance(one, tuple) else (one, "stop") for one in says]
        choices = [{"finish_reason": reason, "message": {"role": "assistant", "content": one}} for one, reason in told]
        api.script[:] = [{"choices": [choice], "usage": api.usage} for choice in choices]
        api.asked.clear()
        section = {"model": "m", "base_url": f"{api.url}/v1", "cache": False, "retries": 0}
        config = {
            "output_dir": str(tmp_path / "run"),
            "task": {"name": "toy_sum"},
            "tools": {"double": {"use": "shelf_of_tools:double"}},
            "environments": {"counter": {"use": "shelf_of_tools:Counter"}},
            "agents": {
                "ann": {"engine": "openai", "api": section, "tools": ["double", "counter"], **agent},
                "bob": {"tiny": {}},
            },
            "protocol": {"name": "debate", "turns": 1, "opening": "{question}"},
            "reward": {"sources": {"label": 1.0, "counter": 0.5}},
            "ppo": {"response_length": 4},
            "pythonpath": [str(tmp_path)],
            **(sections or {}),
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        player = build_player(load(tmp_path / "config.yaml"))
        task = build_task({"name": "toy_sum"}, "train", 0)
        [dialogue] = player.play([task[0]], task, Decoding(1.0))
        assert len(api.asked) == len(says)
        return [u for u in dialogue.utterances if u.agent == "ann"]

    return run


def test_it_calls_and_is_told_the_result(play, api):
    first, second, third = play([DOUBLE, UP, "Answer: 8"])
    assert [[call.result.text for call in u.calls] for u in (first, second, third)] == [["8"], ["1"], []]
    assert [u.stop for u in (first, second, third)] == [Stop.STOP, Stop.STOP, Stop.EOS]
    assert third.turn_end is TurnEnd.ANSWER and third.answers and third.rewards["counter"] == 1.0
    assert not first.trainable and not first.response_ids
    system, _, *rest = asked(api)[-1]["messages"]
    assert "double(n: integer): Double a number." in system["content"] and "up(): Count up." in system["content"]
    assert rest == [
        {"role": "assistant", "content": DOUBLE},
        {"role": "user", "content": "double returned: 8"},
        {"role": "assistant", "content": UP},
        {"role": "user", "content": "up returned: 1"},
    ]
    assert not any("stop" in body or "tools" in body for body in asked(api))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_result_that_it_makes_up_is_left_out(play, api, reason):
    """A completion of weights ends at the call's last tag. An API goes on, and then its answer is cut there."""
    first, second = play([(f"{DOUBLE}\ndouble returned: 9\n{UP}", reason), "Answer: 8"])
    assert first.text == DOUBLE and first.stop is Stop.STOP and [call.name for call in first.calls] == ["double"]
    assert asked(api)[1]["messages"][-2:] == [
        {"role": "assistant", "content": DOUBLE},
        {"role": "user", "content": "double returned: 8"},
    ]
    assert second.answers


def test_an_answer_without_text_is_recorded_and_the_dialogue_goes_on(play, api):
    first, second = play([DOUBLE, (None, "content_filter")])
    assert second.text == "" and second.stop is Stop.FILTERED and second.tags["no_text"] == "content_filter"
    assert "no_text" not in first.tags and second.grade is None
    (only,) = play([([{"type": "text", "text": "Answer: 8"}], "stop")])
    assert only.text == "Answer: 8" and only.tags == first.tags


def test_a_call_that_is_cut_by_length_is_not_carried_out(play):
    (only,) = play([(DOUBLE[:-8], "length")])
    assert only.turn_end is TurnEnd.LENGTH and not only.calls


def test_its_own_stop_strings_are_sent_and_those_of_calls_are_not(play, api):
    first, second = play([DOUBLE, "Answer: 8"], sampling={"stop": ["END"]})
    assert [body["stop"] for body in asked(api)] == [["END"], ["END"]]
    assert first.stop is Stop.STOP and first.calls[0].result.text == "8" and second.stop is Stop.EOS


def test_several_calls_in_one_answer(play, api):
    first, _ = play([f"{DOUBLE}{UP}", "Answer: 8"], limits={"parallel": True})
    assert [call.result.text for call in first.calls] == ["8", "1"] and first.stop is Stop.EOS
    assert asked(api)[1]["messages"][-1]["content"] == "double returned: 8\nup returned: 1"


TOLD = []


def program(question, base_url):
    """Ann is asked for calls, for one call with a seed, for two samples and for log-probabilities."""
    tool = {"type": "function", "function": {"name": "double", "parameters": {"type": "object"}}}
    body = {"model": "ann", "messages": [{"role": "user", "content": "?"}], "tools": [tool]}
    more = {"seed": 7, "parallel_tool_calls": False}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}
    TOLD[:] = [post(base_url, "chat/completions", body | fields)[1] for fields in ({}, *more)]
    return "8"


def test_a_program_is_told_all_calls_of_an_answer_its_tokens_and_what_an_api_cannot_do(play, api):
    api.usage = {"prompt_tokens": 50, "completion_tokens": 9}
    calls = f"Both. {DOUBLE}\n{DOUBLE} double returned: 9 {UP}"
    sections = {"protocol": {"name": "program", "run": "test_openai_tools:program"}, "environments": {}, "tools": {}}
    first, second, *refused = play([calls, calls], sections | {"reward": {"sources": {"label": 1.0}}}, tools=[])
    assert first.text == f"Both. {DOUBLE}\n{DOUBLE}" and second.text == f"Both. {DOUBLE}"
    assert [[len(c["message"].get("tool_calls", ())) for c in told.get("choices", ())] for told in TOLD] == [
        [2],
        [1],
        [],
        [],
    ]
    assert TOLD[0]["usage"] == {"prompt_tokens": 50, "completion_tokens": 9, "total_tokens": 59}
    assert first.tags["usage"] == [50, 9] and [body.get("seed") for body in asked(api)] == [None, 7]
    assert [u.tags["refused"].partition(":")[0] for u in refused] == ["n", "n", "logprobs"]
    assert TOLD[2]["error"]["message"] == refused[0].tags["refused"]


def test_the_format_of_a_chat_template_is_refused(play):
    with pytest.raises(ConfigError, match=r"agents\.ann\.call_format: native: .*; use auto, json or tags"):
        play([], call_format="native")
