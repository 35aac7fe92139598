"""A reward model behind a real server as a reward function, for PPOv2Trainer and for TRL's trainers."""

import inspect

import pytest
from one_policy import QUESTIONS, config
from served_verifiers import free_port, serving, verifier_folder  # noqa: F401  # a fixture

from maporl import Arithmetic, ServedReward
from maporl.errors import ConfigError
from maporl.rewards.base import RewardFailure
from maporl.verifier.client import VerifierFailure
from maporl.verifier.encoding import chat_of
from maporl.verifier.model import Verifier
from reward_server.scorers import LabelScorer
from reward_server.serve import verifier_scorers
from trl_ext import PPOv2Trainer
from trl_ext.trainer.scoring import RewardError


@pytest.fixture(scope="module")
def served(verifier_folder):  # a fixture
    with serving(verifier_scorers(verifier_folder, ["cpu"], "float32", None)) as url:
        yield url


@pytest.fixture(scope="module")
def labels():
    with serving([LabelScorer(Arithmetic(largest=9), "toy_sum")]) as url:
        yield url


def test_a_policy_is_trained_on_what_a_server_says(tiny, tmp_path, served, verifier_folder):
    model, tokenizer = tiny()
    reward = ServedReward(served, batch_size=3)
    trainer = PPOv2Trainer(
        config(tmp_path), tokenizer, model, train_dataset=QUESTIONS, reward_funcs=[reward, lambda p, c, **k: [1.0] * len(c)],
        reward_weights=[10, 1],
    )  # fmt: skip
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    here = Verifier.load(verifier_folder, device="cpu")
    expected = here.score([chat_of(c.prompt.prompt, c.text) for c in batch.completions])
    assert len(set(expected)) > 4
    assert trainer.rewards["served_reward"] == pytest.approx(expected, abs=1e-5)
    assert [c.score for c in batch.completions] == pytest.approx([10 * e + 1 for e in expected], abs=1e-4)
    assert batch.metrics["reward/served_reward"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    trainer.train()


def test_it_has_trls_signature(labels):
    """TRL's GRPOTrainer passes keywords only, with ids, columns and its state, and texts or messages."""
    reward = ServedReward(labels, reference="answer", name="grader")
    assert reward.__name__ == "grader" and not inspect.iscoroutinefunction(reward)
    more = {"completion_ids": [[1], [2]], "answer": [3, "4"], "trainer_state": None, "log_metric": print}
    assert reward(prompts=["1+2", "2+2"], completions=["Answer: 3", "Answer: 5"], **more) == [1.0, 0.0]
    chats = {
        "prompts": [[{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"}]] * 2,
        "completions": [[{"role": "assistant", "content": f"Answer: {n}"}] for n in (3, 4)],
    }
    assert reward(**chats, **more) == [1.0, 1.0]


def test_a_server_that_grades_needs_the_right_answers(tiny, tmp_path, labels):
    with pytest.raises(RewardFailure, match=r"no column 'answer' .reference.; it has \['number'\]"):
        ServedReward(labels, reference="answer")(["1+1"], ["2"], number=[1])
    with pytest.raises(RewardFailure, match=r"the data set has \['2'\] of the type list in the column 'answer'"):
        ServedReward(labels, reference="answer")(["1+1"], ["2"], answer=[["2"]])
    for reward, answers in ((ServedReward(labels), ["2"]), (ServedReward(labels, reference="answer"), [None])):
        with pytest.raises(VerifierFailure, match=r"could not score an answer: no_reference"):
            reward(["1+1"], ["2"], answer=answers)


def test_a_server_that_is_not_there_ends_the_run_and_is_never_a_zero(tiny, tmp_path):
    model, tokenizer = tiny()
    reward = ServedReward(f"http://127.0.0.1:{free_port()}", retries=0)
    trainer = PPOv2Trainer(config(tmp_path), tokenizer, model, train_dataset=QUESTIONS, reward_funcs=reward)
    before = model.lm_head.weight.clone()
    with pytest.raises(RewardError, match=r"'served_reward' raised VerifierFailure|raised Unavailable: verifier"):
        trainer.train()
    assert before.equal(model.lm_head.weight)


def test_one_of_two_servers_may_be_away(labels):
    away = f"http://127.0.0.1:{free_port()}"
    reward = ServedReward([away, labels], reference="answer", retries=2, batch_size=1)
    assert reward(["1+2"] * 4, ["3"] * 4, answer=[3] * 4) == [1.0] * 4


def test_the_environment_may_name_the_servers(labels, monkeypatch):
    monkeypatch.setenv("MAPORL_VERIFIER_URLS", labels)
    assert ServedReward(reference="answer")(["1+2"], ["3"], answer=["3"]) == [1.0]


@pytest.mark.parametrize("options, message", [
    ({}, r"ServedReward: expected the urls of servers, or MAPORL_VERIFIER_URLS in the environment; got neither"),
    ({"urls": "127.0.0.1:8501"}, r"ServedReward: .*http"),
    ({"urls": "http://127.0.0.1:1", "timeout": 0}, r"ServedReward: timeout: "),
    ({"urls": "http://127.0.0.1:1", "timout": 3}, r"ServedReward: unknown key 'timout'; did you mean 'timeout'"),
    ({"urls": "http://127.0.0.1:1", "on_failure": "label"}, r"on_failure: label and learn_every need a team's task"),
    ({"urls": "http://127.0.0.1:1", "learn_every": 2}, r"on_failure: label and learn_every need a team's task"),
    ({"urls": "http://127.0.0.1:1", "api": "vllm"}, r"ServedReward: .*api: vllm needs 'model' too"),
])  # fmt: skip
def test_options_that_cannot_work_are_refused_in_one_line(options, message, monkeypatch):
    monkeypatch.delenv("MAPORL_VERIFIER_URLS", raising=False)
    with pytest.raises(ConfigError, match=message) as caught:
        ServedReward(**options)
    assert "\n" not in str(caught.value)
