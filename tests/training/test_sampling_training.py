"""Training on answers of different temperatures: log-probabilities are taken at the temperature of each row."""

from dataclasses import replace

import pytest
import torch
from fast_cases import some
from tiny_runs import config_of

from maporl.decoding import Sampling, SpeakerSampling
from maporl.errors import ConfigError
from maporl.rollout.episode import SpeakerSpec
from maporl.runs.build import build_trainer
from maporl.types import Ask
from trl_ext.models.forward import base_of, tree_limits
from trl_ext.ppo import maths
from trl_ext.ppo.batch import Completion, build_token_batch, concatenated
from trl_ext.ppo.options import Decoding


def test_log_probabilities_entropies_and_gradients_at_a_temperature_of_each_row():
    torch.manual_seed(0)
    logits, ids = torch.randn(6, 11, dtype=torch.float64), torch.arange(6)
    at = [0.5, 1.0, 1.7, 0.5, 1.0, 1.7]
    one = logits.clone().requires_grad_()
    each = logits.clone().requires_grad_()
    together = maths.token_logprobs(one, ids, torch.tensor(at, dtype=torch.float64))
    alone = torch.cat([maths.token_logprobs(each[i : i + 1], ids[i : i + 1], t) for i, t in enumerate(at)])
    assert together.tolist() == pytest.approx(alone.tolist())
    together.square().sum().backward(), alone.square().sum().backward()
    assert torch.allclose(one.grad, each.grad)
    entropies = [float(maths.token_entropies(logits[i : i + 1], t)) for i, t in enumerate(at)]
    assert maths.token_entropies(logits, torch.tensor(at)).tolist() == pytest.approx(entropies, abs=1e-5)
    assert maths.token_entropies(logits[:0], 0.7).tolist() == []


def test_the_column_names_one_temperature_where_there_is_one():
    rows = [Completion([1, 2], [3, 4], True, "a"), Completion([1], [5], True, "b", temperature=0.5)]
    batch = build_token_batch(rows, "cpu")
    assert batch.temperatures(0.7).tolist() == pytest.approx([0.7, 0.7, 0.5])
    assert batch.temperatures(0.5) == 0.5 and batch.take(torch.tensor([1])).temperatures(0.7) == 0.5
    assert batch.take(torch.tensor([0])).temperatures(0.7) == 0.7
    assert concatenated([batch, batch]).temperatures(0.7).tolist() == pytest.approx([0.7, 0.7, 0.5] * 2)
    assert batch.without_prompts().temperatures(0.7).tolist() == pytest.approx([0.7, 0.7, 0.5])
    with pytest.raises(ValueError, match="b: it was sampled at temperature 0"):
        build_token_batch([replace(rows[1], temperature=0.0)], "cpu")


def two_temperatures(folder, **ppo):
    """Two agents with one policy. The answers to one prompt share it, and so do turns."""
    tiny = {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1}, "policy": "shared"}
    agents = {
        "ann": {"sampling": {"temperature": 0.5}},
        "bob": {"sampling": {"temperature": [1.6, 2.0], "max_tokens": 5}},
    }
    sections = {
        "agents": {name: {**tiny, **own} for name, own in agents.items()},
        "agent_defaults": {},
        "ppo": {
            "response_length": 3,
            "num_ppo_epochs": 1,
            "temperature": 1.0,
            "kl_in": "loss",
            "kl_estimator": "k3",
            **ppo,
        },
        "protocol": {
            "name": "debate",
            "opening": "1+1=2;" * 12 + "{question}",
            "later": "{others};{question}",
            "quote": "{text}",
        },
        "branching": {"group": 3},
        "advantage": {"returns": "utterance", "baseline": "mean", "key": ["prompt", "agent", "turn"]},
    }
    config = config_of(folder, updates=1, sections=sections, save_steps=0, per_device_train_batch_size=4, critic="none")
    return build_trainer(config, quiet=True)


LAYOUTS = [
    {},
    {"num_mini_batches": 2},
    {"max_tokens_per_microbatch": 90},
    {"logits_chunk": 5, "entropy_coef": 0.01},
    {"kl_coef": 0.0},
]


def first_ratios(learner):
    """The largest difference of log-probabilities in each call of the objective, as they come."""
    seen, kept = [], learner.objective

    def objective(new, old, *others, **more):
        seen.append((new - old).detach().abs().max().item())
        return kept(new, old, *others, **more)

    learner.objective = objective
    return seen


@pytest.mark.parametrize("ppo", some(LAYOUTS, 0), ids=str)
def test_the_first_ratio_is_one_and_the_engine_agrees_for_two_temperatures_of_one_policy(
    tmp_path,
    monkeypatch,
    ppo,
):
    batches = []
    trainer = two_temperatures(tmp_path, **ppo)
    learner = trainer.learners["shared"]
    seen = first_ratios(learner)
    computed = type(learner).annotate

    def kept(self, rows):
        found = computed(self, rows)
        batches.append((rows, rows.to_read(tree_limits(base_of(self.model)))))
        return found

    monkeypatch.setattr(type(learner), "annotate", kept)
    metrics = trainer.train()
    [(rows, read)] = batches
    assert read.layout is not None and len(read.input_ids) < len(rows)  # a forward reads trees of rows
    assert set(rows.temperature.tolist()) == {0.5, 1.6, 2.0}
    at = rows.temperatures(1.0)
    gap = (rows.old_logprobs - rows.sampler_logprobs)[rows.sampled].abs()
    for temperature in (0.5, 1.6, 2.0):
        assert gap[at == temperature].max() < 1e-4
    assert seen and seen[0] < 1e-5
    assert metrics["shared/policy/engine_gap"] < 1e-4


def test_a_request_of_a_protocol_for_a_greedy_answer_of_a_learner_stops_the_run():
    spec = SpeakerSpec("transformers", ("shared",), frozenset({"shared"}))
    ask = Ask("ann", [], sampling=Sampling(temperature=0))
    assert spec.sampling_of(Ask("ann", []), 0, Decoding(1.0)) is None
    with pytest.raises(ConfigError, match="agent 'ann', turn 1: its sampling has temperature 0, and it is trained"):
        replace(spec, sampling=SpeakerSampling(training=True)).sampling_of(ask, 0, Decoding(1.0))
