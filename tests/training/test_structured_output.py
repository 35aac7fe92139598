"""Teams whose answers are held to schemas, expressions and grammars, from their sampling to their update."""

import json

import pytest
import torch
from tiny_runs import TINY_SECTION, one_update, scheduled_config

from maporl.decoding import Sampling, StructuredOutput
from maporl.errors import ConfigError
from maporl.runs.build import build_trainer
from maporl.types import Ask, from_json, to_json
from maporl.validation.preflight import check_run
from trl_ext.ppo.options import GREEDY

NUMBER = {
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 19}},
        "required": ["a"],
        "additionalProperties": False,
    }
}
HELD = {"tiny": TINY_SECTION | {"alphabet": TINY_SECTION["alphabet"] + '{}",'}}


def settings_of(folder, ann, bob, **changes):
    changes = {
        "agent_defaults": HELD, "agents": {"ann": ann, "bob": bob},
        "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}"},
        "ppo": {"response_length": 16, "temperature": 1.0, "kl_coef": 0.1, "num_ppo_epochs": 2},
        "branching": {"group": 2}, "evaluation": {"questions": 4},
    } | changes  # fmt: skip
    return scheduled_config(folder, **changes)


def is_number(text):
    return json.loads(text).keys() == {"a"} and 0 <= json.loads(text)["a"] <= 19


@pytest.mark.parametrize("rate", [0.0, 1e-2])
def test_a_team_is_trained_under_the_masks_by_which_it_was_sampled(tmp_path, rate):
    """Two turns of conversations that go on, and two dialogues a question, which begin alike."""
    settings = settings_of(
        tmp_path, {"structured_output": NUMBER}, {"structured_output": [{"regex": "[0-9]{2}"}, {"grammar": 'start: "a" | "b"'}]},
        training={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": rate},
    )  # fmt: skip
    told = " ".join(check_run(settings))
    assert "held to a JSON schema" in told and "held to a regular expression" in told
    trainer = build_trainer(settings, quiet=True)
    for update in range(2):
        answers, rows, metrics = one_update(trainer)
        for dialogue in answers:
            said = {(u.agent, u.turn): u.text for u in dialogue.utterances}
            assert is_number(said["ann", 0]) and is_number(said["ann", 1])
            assert len(said["bob", 0]) == 2 and said["bob", 0].isdigit() and said["bob", 1] in ("a", "b")
            assert from_json(to_json(dialogue)).utterances[0].grammar == dialogue.utterances[0].grammar
        for name in ("ann", "bob"):
            assert metrics[f"{name}/val/first_ratio"] == pytest.approx(1.0, abs=1e-6), update
            if rate == 0:
                assert metrics[f"{name}/val/ratio"] == pytest.approx(1.0, abs=1e-6)
            if rate == 0 or update == 0:
                assert metrics[f"{name}/objective/kl"] == 0.0
            sampled = rows[name].sampled_mask
            assert torch.allclose(rows[name].sampler_logprobs[sampled], rows[name].old_logprobs[sampled], atol=1e-5)
            share = metrics[f"{name}/policy/forced_tokens"]
            assert share == pytest.approx(float(rows[name].forced.sum() / sampled.sum()))


def test_the_nearest_structured_output_wins_and_evaluations_keep_it(tmp_path):
    settings = settings_of(
        tmp_path, {"role": "judge"}, {"structured_output": {"regex": "b"}},
        protocol={"name": "debate", "turns": 1, "sampling": {"judge": {"structured_output": {"regex": "a"}}}},
    )  # fmt: skip
    trainer = build_trainer(settings, quiet=True)
    trainer.train()
    audit = json.loads((tmp_path / "run/audit.json").read_text())
    assert audit["counts"]["learner/ann/forced"] == audit["counts"]["learner/ann/tokens"] == 48
    assert "ann chose none of its 48 tokens" in " ".join(f"{f['subject']} {f['text']}" for f in audit["findings"])
    played = trainer.player.play(list(trainer.task)[:2], trainer.task, GREEDY)
    assert {(u.agent, u.text) for d in played for u in d.utterances} == {("ann", "a"), ("bob", "b")}
    asked = Ask("ann", [], structured_output=StructuredOutput(regex="c"))
    assert asked.sampling == Sampling(structured_output=StructuredOutput(regex="c"))


@pytest.mark.parametrize(("section", "told"), [
    ({"structured_output": {"json_schema": {"not": {}}}}, r"agents.ann.*structured_output.json_schema: the schema: Unimplemented keys"),
    ({"structured_output": {"regex": "a", "grammar": "start: a"}}, "expected one of json_schema, regex and grammar"),
    ({"structured_output": {"regex": "a"}, "sampling": {"structured_output": {"regex": "b"}}}, "structured_output differ"),
    ({"structured_output": {"json_schema": "nowhere.json"}}, "nowhere.json"),
    ({"structured_output": {"regex": "a"}, "engine": "openai", "tiny": None, "api": {"model": "m", "base_url": "http://127.0.0.1:9/v1"}},
     "an API is asked for JSON schemas alone"),
])  # fmt: skip
def test_a_wrong_structured_output_is_refused_before_models_load(tmp_path, section, told):
    with pytest.raises(ConfigError, match=told):
        check_run(settings_of(tmp_path, section, {}))


def test_a_policy_without_a_stop_token_has_no_end_of_a_grammar(tmp_path):
    ppo = {"response_length": 4, "temperature": 1.0, "stop_token": "none"}
    with pytest.raises(ValueError, match=r"agent 'ann': structured_output: .*ppo.stop_token: none"):
        build_trainer(settings_of(tmp_path, {"structured_output": {"regex": "a"}}, {}, ppo=ppo), quiet=True)
