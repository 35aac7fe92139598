"""Advantages that count actions by the time that they take."""

import random

import pytest
import torch
from perturbed_training import looking_up
from scripted_training import recipe_values, rows, scripted_trainer

from maporl.advantages import TurnBatch, estimate
from maporl.advantages.transforms import Duration
from maporl.config.schema import AdvantageConfig
from maporl.errors import ConfigError
from maporl.validation.load import from_dict

AS_IS = {"returns": "utterance", "baseline": "none", "scale": "none", "key": ("prompt",)}


def searching(request):
    """Search as long as one may, and then give the right name or the wrong one."""
    rng = random.Random(str(request.rng_key))
    said = looking_up(request, rng.random() < 0.5)
    if said[0].startswith("<verify>"):
        return "<verify>no</verify>" if "1" not in request.ask.messages[-1]["content"] else "<verify>yes</verify>"
    return said[0]


def shaped(reward, seconds, tokens, **options):
    batch = TurnBatch(reward=reward, prompt=[0] * len(reward), seconds=seconds, tokens=tokens)
    return estimate(batch, AdvantageConfig(**AS_IS, post=({"duration": options},))).tolist()


def test_an_action_of_three_times_the_duration_counts_three_times():
    assert shaped([0.5, -0.5], [1, 3], [9, 2]) == pytest.approx([0.25, -0.75])


def test_sampling_takes_time_too():
    assert shaped([0.5, -0.5], [0, 2], [10, 10], token_seconds=0.1) == pytest.approx([0.25, -0.75])
    assert shaped([0.5, -0.5], [0, 2], [10, 10]) == pytest.approx([0, -1])


def test_a_batch_in_which_nothing_took_time_stays_as_it_is():
    assert shaped([0.5, -0.5], [0, 0], [10, 10]) == [0.5, -0.5]


def test_padding_has_no_duration():
    mask = [True, True, False]
    batch = TurnBatch(reward=[0.5, -0.5, 0.0], prompt=[0] * 3, seconds=[1, 3, 99], tokens=[1] * 3, mask=mask)
    found = estimate(batch, AdvantageConfig(**AS_IS, post=("duration",))).tolist()
    assert found == pytest.approx([0.25, -0.75, 0.0])


def test_a_run_with_tools_counts_calls_by_their_time(tmp_path):
    """Through the trainer: a search that took 3 s counts three times as much as one that took 1 s, and an answer 0."""

    def found(folder, post):
        values = recipe_values("dr_mas_search", folder, advantage={"post": post})
        trainer = scripted_trainer(values, searching)
        batch = trainer.score(trainer.collected())
        calls = [call for d in batch.dialogues for u in d.utterances for call in u.calls or ()]
        assert calls and all(call.result.seconds > 0 for call in calls)
        for dialogue in batch.dialogues:
            for u in dialogue.utterances:
                for call in u.calls or ():
                    object.__setattr__(call.result, "seconds", 3.0 if dialogue.rollout else 1.0)
        return rows(trainer.advantage(batch))

    plain, by_time = found(tmp_path / "plain", []), found(tmp_path / "time", ["duration"])
    took = torch.tensor([sum(c.result.seconds for c in row.utterance.calls or ()) for row in by_time])
    assert len(set(took.tolist())) > 1 and len({row.advantage for row in by_time}) > 2
    expected = torch.tensor([row.advantage for row in plain]) * took / took.mean()
    assert [row.advantage for row in by_time] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("token_seconds", [-1.0, float("inf"), float("nan")])
def test_a_time_that_cannot_be_is_refused(token_seconds, tmp_path):
    with pytest.raises(ValueError, match="token_seconds: expected a number"):
        Duration(token_seconds)
    values = recipe_values("grpo", tmp_path, advantage={"post": [{"duration": {"token_seconds": token_seconds}}]})
    with pytest.raises(ConfigError, match="token_seconds"):
        from_dict(values)
