"""Sampling with top-p and top-k, and the learning rate of AT-GRPO, through the trainer's own steps."""

import pytest
import torch
from scripted_training import played, recipe_values
from vllm_engines import fake, fake_vllm  # noqa: F401  # fixtures

from maporl import Agent, Team
from maporl.config.schema import ApiSection
from maporl.engines.base import Request
from maporl.engines.openai import OpenAIEngine
from maporl.engines.transcript import Transcript
from maporl.errors import ConfigError
from maporl.runs.build import build_trainer
from maporl.runs.evaluate import evaluate_suite
from maporl.types import Ask, Example
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run, training_arguments
from trl_ext.ppo.losses import engine_weights
from trl_ext.ppo.options import Decoding, PPOOptions
from trl_ext.sampling.batch import truncated
from trl_ext.sampling.request import Draw, TokenRequest


def at_grpo(folder, **sections):
    return recipe_values("at_grpo_roles", folder, **sections)


def nucleus(logits, top_p, top_k):
    """Return the likeliest tokens by the definition, in plain Python, and their probabilities."""
    probabilities = torch.softmax(logits.double(), -1).tolist()
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[:top_k]
    mass, kept = sum(probabilities[token] for token in ranked), []
    for token in ranked:
        if sum(probabilities[k] for k in kept) / mass >= top_p:
            break
        kept.append(token)
    return {token: probabilities[token] for token in kept}


def test_truncated_keeps_the_likeliest_tokens_and_top_k_cuts_first():
    probabilities = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])
    cases = {
        (1.0, 0): [0.1, 0.4, 0.05, 0.3, 0.15],
        (1.0, 9): [0.1, 0.4, 0.05, 0.3, 0.15],
        (1.0, 2): [0, 4 / 7, 0, 3 / 7, 0],
        (0.7, 0): [0, 0.4 / 0.7, 0, 0.3 / 0.7, 0],  # 0.4 + 0.3 has the share already
        (0.71, 0): [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85],
        (0.8, 3): [0, 4 / 7, 0, 3 / 7, 0],  # of the three, these two have 0.82
        (1e-9, 0): [0, 1, 0, 0, 0],
    }
    for (top_p, top_k), expected in cases.items():
        assert truncated(probabilities, top_p, top_k)[0].tolist() == pytest.approx(expected, abs=1e-6), (top_p, top_k)


def test_an_agent_that_learns_never_says_what_its_recipe_cuts_off(tmp_path):
    trainer = build_trainer(from_dict(at_grpo(tmp_path)), quiet=True)
    assert trainer.args.decoding == Decoding(1.0, 0.9, 20)
    batch = played(trainer)
    kept_shares, tokens = [], 0
    for name, rows in batch.token_batches.items():
        model = trainer.team.policies[name].model
        weights = engine_weights(rows, 2.0)
        for i, sample in enumerate(rows.sample.tolist()):
            said = batch.samples[name][sample].utterance
            ids = said.prompt_ids + said.response_ids
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, len(said.prompt_ids) - 1 : -1]
            whole = torch.log_softmax(logits, -1)
            old = rows.old_logprobs[i][rows.sampled_mask[i]].tolist()
            sampled = rows.sampler_logprobs[i][rows.sampled_mask[i]].tolist()
            weighed = weights[i][rows.sampled_mask[i]].tolist()
            for step, token in enumerate(said.response_ids):
                kept = nucleus(logits[step], 0.9, 20)
                assert token in kept
                mass = sum(kept.values())
                assert old[step] == pytest.approx(float(whole[step, token]), abs=1e-4), (
                    "PPO's are the whole distribution's"
                )
                assert sampled[step] == pytest.approx(old[step], abs=1e-4), "the sampler tells the same distribution's"
                assert weighed[step] == pytest.approx(1.0, abs=1e-4)
                kept_shares.append(mass)
                tokens += 1
    assert tokens > 100 and max(kept_shares) < 0.9, "models that know nothing would often say one of the other tokens"


def test_the_ratio_of_the_first_step_is_one(tmp_path):
    one = {"num_mini_batches": 1, "num_ppo_epochs": 1}
    trainer = build_trainer(from_dict(at_grpo(tmp_path, ppo=at_grpo(tmp_path)["ppo"] | one)), quiet=True)
    metrics = trainer.update(played(trainer)).metrics
    for name in ("tool", "planner"):
        assert metrics[f"{name}/val/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert metrics[f"{name}/policy/clipfrac_avg"] == 0.0


def test_an_evaluation_has_options_of_its_own(tmp_path):
    def said(**evaluation):
        values = at_grpo(tmp_path, evaluation={"questions": 4} | evaluation)
        return [
            u.response_ids for d in build_trainer(from_dict(values), quiet=True).play_evaluation() for u in d.utterances
        ]

    greedy = said()
    assert said(temperature=1.0, top_k=1) == said(temperature=1.0, top_p=1e-6) == greedy != said(temperature=1.0)


def test_vllm_is_asked_for_the_same(fake, tmp_path):  # a fixture
    server, engine, _ = fake
    request = Request(
        Ask("ann", [{"role": "user", "content": "4"}]), Example("1", "4", "4"), 0, 0, Transcript(), "one", "ann"
    )
    engine(tmp_path).generate([request], Decoding(0.7, 0.9, 20))
    bodies = [body for path, body in server.requests if path == "/v1/completions"]
    assert [(body["temperature"], body["top_p"], body["top_k"]) for body in bodies] == [
        (0.7, 1.0, 0), (0.7, 0.9, 20),
    ], "the probe of the policy that speaks compares whole distributions"  # fmt: skip


def test_vllm_in_this_process_is_asked_for_the_same(fake_vllm, tiny):  # a fixture
    server = fake_vllm(Team([Agent("ann", *tiny(), engine="vllm")]))
    server.sample([TokenRequest("base", [1], Draw(5, 0.7, 0.9, 20))])
    [(_, asked)] = server._llm.told
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.7, 0.9, 20)


def test_an_api_gets_top_p_and_has_no_top_k(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    engine = OpenAIEngine({"bob": ApiSection("m", cache=False)}, 5)
    request = Request(Ask("bob", []), Example("1", "4", "4"), 0, 0, Transcript(), "one")
    assert engine._query(request, Decoding(0.7, 0.9, 20))["top_p"] == 0.9
    plain = engine._query(request, Decoding(0.7))
    assert plain.keys() == {"model", "messages", "temperature", "max_tokens", "base_url"}


def test_the_check_says_which_distribution_is_trained(tmp_path):
    lines = [line for line in check_run(from_dict(at_grpo(tmp_path))) if line.startswith("sampling: ")]
    assert lines and "ppo.top_p=0.9 and ppo.top_k=20" in lines[0]
    whole = at_grpo(tmp_path, ppo=at_grpo(tmp_path)["ppo"] | {"top_p": 1.0, "top_k": 0})
    assert not [line for line in check_run(from_dict(whole)) if line.startswith("sampling: ")]


@pytest.mark.parametrize("options, message", [
    ({"top_p": 0.0}, r"top_p: expected a number above 0 and at most 1, got 0\.0"),
    ({"top_p": 1.5}, r"top_p: expected a number above 0 and at most 1, got 1\.5"),
    ({"top_k": -1}, r"top_k: expected a whole number of at least 0, got -1"),
])  # fmt: skip
def test_values_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PPOOptions(**options)


def test_the_learning_rate_rises_for_ten_updates_and_falls_along_a_cosine_to_a_third(tmp_path):
    training = at_grpo(tmp_path)["training"] | {"learning_rate": 5e-6, "warmup_steps": 10}
    values = at_grpo(tmp_path, training=training) | {"updates": 200}
    trainer = build_trainer(from_dict(values), quiet=True)
    learner = trainer.learners["planner"]
    scheduler, rates = learner.scheduler, {}
    for update in range(1, 202):
        learner.optimizer.step()  # without gradients it changes nothing
        rates[update] = scheduler.get_last_lr()[0]
        scheduler.step()
    # the middle of the cosine is update 106, where the factor is (1 + 0.3) / 2
    expected = {1: 0.0, 2: 5e-7, 6: 2.5e-6, 11: 5e-6, 106: 3.25e-6, 201: 1.5e-6}
    assert {update: rates[update] for update in expected} == pytest.approx(expected, rel=1e-6)
    assert min(rates[update] for update in range(11, 202)) == pytest.approx(1.5e-6)


@pytest.mark.parametrize("training, message", [
    ({"lr_scheduler_kwargs": None}, r"cosine_with_min_lr cannot be used with lr_scheduler_kwargs \{\}: One of min_lr or min_lr_rate"),
    ({"lr_scheduler_kwargs": {"min_rate": 0.3}}, r"cosine_with_min_lr cannot be used with lr_scheduler_kwargs \{'min_rate': 0\.3\}: got an unexpected"),
    ({"lr_scheduler_type": "constant"}, r"constant cannot be used with lr_scheduler_kwargs \{'min_lr_rate': 0\.3\}: got an unexpected"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": None}, r"reduce_lr_on_plateau cannot be used"),
    ({"lr_scheduler_type": "cosin", "lr_scheduler_kwargs": None}, r"unknown 'cosin'; did you mean 'cosine'"),
])  # fmt: skip
def test_a_schedule_that_cannot_be_made_is_refused_before_a_model_loads(training, message, tmp_path):
    config = from_dict(at_grpo(tmp_path, training=at_grpo(tmp_path)["training"] | training))
    with pytest.raises(ConfigError, match=r"training\.lr_scheduler_type: " + message):
        training_arguments(config)


def test_an_option_that_changes_nothing_is_named(tmp_path):
    def warned(**evaluation):
        lines = check_run(from_dict(at_grpo(tmp_path, evaluation={"questions": 4} | evaluation)))
        return [line for line in lines if "evaluation.temperature is 0, which takes the likeliest token" in line]

    assert warned(top_p=0.9) and warned(top_k=5)
    assert not warned() and not warned(temperature=0.6, top_p=0.9)


@pytest.mark.parametrize("samples, evaluation, expected", [
    (1, {}, Decoding(0.0)),
    (4, {}, Decoding(1.0, 0.9, 20)),  # four greedy answers would be equal, so these are sampled as in training
    (4, {"temperature": 0.6, "top_p": 0.95}, Decoding(0.6, 0.95)),
    (1, {"temperature": 0.6, "top_p": 0.95}, Decoding(0.6, 0.95)),
])  # fmt: skip
def test_a_suite_is_sampled_as_the_evaluation_says(samples, evaluation, expected, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "maporl.runs.evaluate.play_suite", lambda player, tasks, samples, decoding, seed: seen.append(decoding)
    )
    values = at_grpo(tmp_path, evaluation={"questions": 4} | evaluation)
    evaluate_suite(from_dict(values), None, {}, samples)
    assert seen == [expected]
