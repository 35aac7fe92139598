"""What users of PPO asked for beyond TRL's trainer: a loop of one's own, several completions a prompt, critics that
learn first."""

import json
import os
import subprocess
import sys

import pytest
import torch
from fast_cases import some
from folders import SUPPORT
from one_policy import QUESTIONS, same, trainer_of, weights
from safetensors.torch import load_file

from trl_ext.ppo.batch import Completion
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.options import Sampled
from trl_ext.trainer.ppov2 import Sampler

# -- a loop of one's own ------------------------------------------------------------------------------------------


def test_a_loop_of_ones_own_is_train_bit_by_bit(tiny, tmp_path):
    def options(name):
        return {"folder": tmp_path / name, "total_episodes": 48, "save_strategy": "steps", "save_steps": 2}

    whole = trainer_of(tiny, **options("train"))
    last = whole.train()
    own = trainer_of(tiny, **options("own"))
    with own.training():
        while own.goes_on():
            batch = own.collected()
            batch = own.score(batch)
            batch = own.advantage(batch)
            batch = own.update(batch)
            own.finish_update(batch)
    assert same(weights(whole), weights(own))
    logged = [{k: v for k, v in entry.items() if k in batch.metrics} for entry in own.state.log_history]
    assert [entry["loss/policy_avg"] for entry in logged] == [e["loss/policy_avg"] for e in whole.state.log_history]
    assert set(last) - set(batch.metrics) == {"tokens_per_second", *(f"time/{n}" for n in ("collect", "score", "advantage", "update"))}  # fmt: skip
    assert sorted(p.name for p in (tmp_path / "own").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


def test_a_loop_of_ones_own_resumes(tiny, tmp_path):
    options = {"total_episodes": 64, "num_generations": 2}
    whole = trainer_of(tiny, tmp_path / "whole", **options)
    whole.train()
    assert (whole.state.global_step, whole.state.epoch, whole.state.num_train_epochs) == (4, 2.0, 2)
    options |= {"save_strategy": "steps", "save_steps": 1}

    def run(resume=None, most=4):
        own = trainer_of(tiny, tmp_path / "own", **options)
        with own.training(resume):
            while own.goes_on() and own.state.global_step < most:
                own.finish_update(own.update(own.advantage(own.score(own.collected()))))
        return own

    run(most=2)
    assert same(weights(run(resume=True)), weights(whole))


def test_completions_and_scores_may_come_from_elsewhere(tiny, tmp_path):
    """The ``step(queries, responses, scores)`` of TRL before 0.12."""
    trainer = trainer_of(tiny, tmp_path, lam=1.0, kl_coef=0.0, critic="none")
    tokenizer = trainer.learners["policy"].tokenizer
    with trainer.training():
        batch = trainer.next_batch()
        batch.completions = [
            Completion(tokenizer.encode("1+1="), tokenizer.encode(text), True, text, score=score)
            for text, score in (("2a", 1.0), ("3", -1.0))
        ]
        batch = trainer.advantage(batch)
        rows = batch.token_batches["policy"]
        assert rows.returns[rows.sampled_mask].tolist() == [1.0, 1.0, -1.0]
        before = trainer.model.lm_head.weight.clone()
        trainer.finish_update(trainer.update(batch))
    assert trainer.state.global_step == 1 and not torch.equal(before, trainer.model.lm_head.weight)


# -- several completions a prompt ---------------------------------------------------------------------------------


def test_each_prompt_has_its_number_of_different_completions(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, num_generations=4, temperature=2.0)
    batch = trainer.collect(trainer.next_batch())
    asked = [row["number"] for row in batch.examples]
    assert len(asked) == 16 and [asked[i : i + 4] for i in range(0, 16, 4)] == [[n] * 4 for n in asked[::4]]
    assert len(set(asked)) == 4
    for start in range(0, 16, 4):
        assert len({tuple(c.response_ids) for c in batch.completions[start : start + 4]}) > 1
    assert [c.prompt.prompt for c in batch.completions] == [f"{n}+1=" for n in asked]


def test_the_prompts_and_the_counts_are_those_of_the_documentation(tiny, tmp_path):
    """16 completions an update are 4 prompts. Two epochs of 16 prompts are 128 completions in 8 updates."""
    plain = trainer_of(tiny, tmp_path / "a")
    order = [row["number"] for row in plain.next_batch().examples]
    trainer = trainer_of(tiny, tmp_path / "b", num_generations=4, total_episodes=None, num_train_epochs=2)
    assert (trainer.args.total_episodes, trainer.args.num_total_batches, trainer.args.batch_size) == (128, 8, 16)
    asked = []
    for _ in range(8):
        asked += [row["number"] for row in trainer.next_batch().examples[::4]]
        trainer.episodes += 16
        trainer.state.global_step += 1
    assert asked[:16] == order and sorted(asked[16:]) == sorted(order) and asked[16:] != order
    ahead = trainer_of(tiny, tmp_path / "c", num_generations=4)
    assert [row["number"] for row in ahead.next_batch(ahead=2).examples[::4]] == asked[8:12]


class Recorder(Sampler):
    """Says the EOS token, and remembers the keys of the random numbers."""

    def __init__(self):
        self.keys = []

    def submit(self, requests):
        self.keys += [request.key for request in requests]
        return [Ready(Sampled([min(request.draw.stop_ids)])) for request in requests]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_prompt_is_on_one_process_and_the_batch_does_not_depend_on_their_number(
    tiny, tmp_path, processes, monkeypatch
):
    """The same 16 completions, with the same random numbers, on 1, 2 or 4 processes."""
    recorder, asked = Recorder(), []
    for rank in range(processes):
        sizes = {"per_device_train_batch_size": 16 // processes, "gradient_accumulation_steps": 1}
        trainer = trainer_of(tiny, tmp_path / f"{rank}", num_generations=4, sampler=recorder, **sizes)
        trainer.args.count_batches(processes, len(QUESTIONS))
        with monkeypatch.context() as patch:
            patch.setattr("trl_ext.process.distributed.rank", lambda rank=rank: rank)
            asked.append([row["number"] for row in trainer.collect(trainer.next_batch()).examples])
    assert all(len(set(part[i : i + 4])) == 1 for part in asked for i in range(0, len(part), 4))
    reference = trainer_of(tiny, tmp_path / "one", num_generations=4).next_batch().examples
    assert [number for part in asked for number in part] == [row["number"] for row in reference]
    assert recorder.keys == [(3, number) for number in range(16)]


# -- critics that learn first -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "critic, lora", some([("head", False), ("head", True), ("model", False), ("adapter", True)], 1, 3)
)
def test_in_the_first_updates_only_the_critic_learns(tiny, tmp_path, critic, lora):
    options = {"critic": critic, "critic_warmup": 2, "total_episodes": 48, "weight_decay": 0.1, "entropy_coef": 0.1}
    trainer = trainer_of(tiny, tmp_path, lora, **options)
    learner = trainer.learners["policy"]

    def policy():
        named = learner.model.named_parameters()
        return {
            n: p.detach().clone() for n, p in named if learner.critic.adapter is None or learner.critic.adapter not in n
        }

    def values():
        named = dict(learner.value_head.named_parameters())
        if learner.critic.model is not None:
            named |= {f"model.{n}": p for n, p in learner.critic.model.named_parameters()}
        return {n: p.detach().clone() for n, p in named.items()}

    with trainer.training():
        for update in (1, 2, 3):
            before = policy(), values()
            trainer.finish_update(trainer.update(trainer.advantage(trainer.score(trainer.collected()))))
            assert same(before[0], policy()) == (update <= 2), f"update {update}"
            assert not same(before[1], values()), f"update {update}"


def test_a_strategy_that_would_decay_the_policy_is_refused(tiny, tmp_path):
    """DeepSpeed decays weights without a gradient: measured with two processes, where the policy moved by 0.04."""
    for decay in (0.1, 0.0):
        trainer = trainer_of(tiny, tmp_path / str(decay), critic_warmup=1, weight_decay=decay)
        trainer.learners["policy"].strategy.steps_all = True
        if decay:
            with pytest.raises(ValueError, match="critic_warmup: DeepSpeed would decay the weights of policy 'policy'"):
                trainer.train()
        else:
            trainer.train()


# -- two processes ------------------------------------------------------------------------------------------------


def train_in_processes(number, out, *options):
    """Start ``one_policy.py`` on 16 completions an update in ``number`` processes, and wait for their end."""
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
    worker = SUPPORT / "one_policy.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command += [worker, out, str(16 // number), *options]
    return subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)


@pytest.mark.slow
def test_a_reward_that_fails_in_the_main_process_ends_both(tmp_path):
    """The other process waited for the main one, half an hour long."""
    done = train_in_processes(2, tmp_path / "out", "fails")
    assert done.returncode == 1 and "ValueError: no reward today" in done.stderr
    assert done.stderr.count("RewardError: ") >= 2, done.stderr[-3000:]


@pytest.mark.slow
def test_two_processes_end_with_the_weights_and_the_metrics_of_one(tmp_path):
    """Per-token rewards, several completions a prompt, stop strings and a critic that learns first, by real
    processes."""
    found = []
    for number in (1, 2):
        out = tmp_path / str(number)
        done = train_in_processes(number, out)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append((load_file(out / "w"), json.loads((out / "metrics.json").read_text())))
        records = (out / "run" / "completions.jsonl").read_text().splitlines()
        assert len(records) == 3 * 3 and all({"score", "rewards"} <= json.loads(line).keys() for line in records)
    (alone, logged), (together, others) = found
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, atol=1e-5, rtol=1e-4, msg=name)
    assert len(logged) == len(others) == 4
    for one, two in zip(logged, others, strict=True):
        assert one == pytest.approx(two, abs=1e-5)
