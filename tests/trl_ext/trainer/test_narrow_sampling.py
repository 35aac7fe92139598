"""Sampling that leaves out the tail of a distribution, beside every ratio to the policy that sampled.

The sampler tells the log-probabilities of the whole distribution, which is the one that is trained: no ratio, mask or
bound sees the cut.
"""

import itertools

import pytest
import torch
from fast_cases import some
from one_policy import small_trainer

from trl_ext.learning.audit import VoidRun
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.sample import sample
from trl_ext.trainer.ppov2 import Sampler

CUTS = {"whole": {}, "top_k": {"top_k": 3}, "top_p": {"top_p": 0.6}, "both": {"top_p": 0.8, "top_k": 4}}
RATIOS = {
    "update": {},
    "sampler": {"ratio_to": "sampler"},
    "dis": {"ratio_to": "sampler", "objective": "dis"},
    "sequence": {"ratio_to": "sampler", "ratio": "sequence_mean"},
    "reinforce": {"ratio_to": "sampler", "objective": "reinforce", "tis_cap": 2.0},
    "cap": {"engine_tis_cap": 2.0},
    "token mask": {"engine_tis_cap": 1.01, "engine_tis_mode": "token_mask"},
    "sequence mask": {"engine_tis_cap": 1.01, "engine_tis_mode": "sequence_mask"},
}


def ppo(tiny, folder, sampler=None, **options):
    given = {"per_device_train_batch_size": 8, "response_length": 4, "critic": "none", "learning_rate": 1e-2}
    given |= {"lr_scheduler_type": "constant", "sampler": sampler}
    return small_trainer(tiny, folder, **given | options)


PAIRS = list(itertools.product(RATIOS, CUTS))


# each ratio and each cut, and not each with each
@pytest.mark.parametrize(("ratio", "cut"), some(PAIRS, *range(0, len(PAIRS), len(CUTS) + 1), 28))
def test_each_ratio_begins_at_one_and_learns_however_sampling_is_cut(tiny, tmp_path, ratio, cut):
    for rate in (0.0, 1e-2):
        trainer = ppo(tiny, tmp_path / f"{rate}", **RATIOS[ratio], **CUTS[cut], learning_rate=rate)
        before = torch.cat([p.detach().flatten() for p in trainer.model.policy.parameters()])
        trainer.train()
        moved = torch.cat([p.detach().flatten() for p in trainer.model.policy.parameters()]) - before
        counts = {key.removeprefix("learner/policy/"): n for key, n in trainer.audit.counts.items() if "policy" in key}
        assert counts["learned"] == counts["advantaged"] > 0, "no mask and no bound leaves out a token"
        assert bool(moved.norm() > 0) == (counts["moved"] == 2) == (rate > 0)
        for metrics in (record for record in trainer.state.log_history if "grad_norm" in record):
            assert metrics["val/first_ratio"] == pytest.approx(1.0, abs=1e-4) and metrics["grad_norm"] > 0
            assert metrics["policy/engine_gap"] < 1e-4


class Sure(Sampler):
    """Samples with the policy, and says that every token was sure."""

    def attach(self, learner, args):
        self.learner = learner

    def submit(self, requests):
        return [Ready(Sampled(s.ids, [0.0] * len(s.ids))) for s in sample(self.learner.model, requests)]


class OfTheCut(Sure):
    """Says that it knows no others."""

    tells_cut = True


def test_a_sampler_that_knows_the_cut_distribution_alone_is_refused_where_it_would_be_compared(tiny, tmp_path):
    for ratio, cut in itertools.product(RATIOS, CUTS):
        compared = ratio != "update" and cut != "whole"
        try:
            ppo(tiny, tmp_path / "run", OfTheCut(), **RATIOS[ratio], **CUTS[cut])
        except ValueError as error:
            assert compared and "OfTheCut gives the log-probabilities of what they leave" in str(error), error
        else:
            assert not compared, (ratio, cut)


def test_a_run_whose_tokens_are_all_masked_stops_after_the_first_update_and_can_go_on(tiny, tmp_path):
    masks = RATIOS["token mask"] | {"top_k": 2, "total_episodes": 32}
    trainer = ppo(tiny, tmp_path / "run", Sure(), **masks)
    with pytest.raises(VoidRun, match=r"update 1: nothing can come of this run: policy had .* clips left none") as told:
        trainer.train()
    assert "saved in" in told.value.__notes__[0] and (tmp_path / "run/checkpoint-1").exists()
    trainer = ppo(tiny, tmp_path / "run", Sure(), **masks, on_void="warn")
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4 and trainer.audit.counts["learner/policy/due"] == 4, "it goes on counting"
    assert trainer.audit.status() == 1


@pytest.mark.parametrize(
    ("mode", "learns"), [("token_truncate", True), ("token_mask", False), ("sequence_mask", False)]
)
def test_weights_above_the_cap_are_cut_and_what_masks_leave_out_is_not_learned(tiny, tmp_path, mode, learns):
    """The sampler says 1 of tokens that are unlikely, so that their weights are far below 1 / cap."""
    options = {"engine_tis_cap": 1.01, "engine_tis_mode": mode, "top_k": 2, "on_void": "warn"}
    trainer = ppo(tiny, tmp_path / "run", Sure(), **options)
    trainer.train()
    counts = trainer.audit.counts
    assert counts["learner/policy/learned"] == (counts["learner/policy/advantaged"] if learns else 0)
