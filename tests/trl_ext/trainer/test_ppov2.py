"""The single-policy trainer: TRL's interface, its numbers, and the faults that users of TRL's trainer reported."""

import asyncio
import copy
import json
import math

import pytest
import torch
from datasets import Dataset
from one_policy import QUESTIONS, StopAfter, classifier, config, count_a, same, trainer_of, weights
from peft import LoraConfig, PeftModel
from tiny_models import Plain
from transformers import AutoModelForCausalLM, DataCollatorWithPadding

from trl_ext import Learner, PPOv2Trainer
from trl_ext.files.manifest import CheckpointError
from trl_ext.learning.policy import Policy
from trl_ext.learning.trained import NonFiniteError
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.sampling.options import stop_ids_of
from trl_ext.sampling.request import Draw
from trl_ext.sampling.sample import generate
from trl_ext.trainer.scoring import RewardError


def rows_of(learner, number=5):
    generator = torch.Generator().manual_seed(1)
    answers = [
        Completion(
            torch.randint(3, 20, (3 + i,), generator=generator).tolist(),
            torch.randint(3, 20, (6 - i,), generator=generator).tolist(),
            ended=False, label=f"row {i}", score=float(i),
        )
        for i in range(number)
    ]  # fmt: skip
    return build_token_batch(answers, "cpu")


def test_log_probabilities_equal_a_plain_forward_of_each_row_alone(tiny, tmp_path):
    for architecture in ("llama", "gpt_neox", "qwen3"):
        model, tokenizer = tiny(architecture)
        learner = Learner(Policy("p", model, tokenizer), config(tmp_path))
        rows = rows_of(learner)
        got = learner.forward(rows, entropies=True)
        position = 0
        for ids, mask in zip(rows.input_ids, rows.sampled_mask, strict=True):
            ids = ids[: int(mask.nonzero().max()) + 1]
            logits = model(ids.unsqueeze(0)).logits[0].float() / 0.9
            for column in mask.nonzero().flatten().tolist():
                distribution = torch.distributions.Categorical(logits=logits[column - 1])
                assert got.logprobs[position].item() == pytest.approx(
                    distribution.log_prob(ids[column]).item(), abs=1e-5
                )
                assert got.entropies[position].item() == pytest.approx(distribution.entropy().item(), abs=1e-5)
                position += 1
        assert position == len(got.logprobs)


def test_the_gradient_does_not_depend_on_micro_batches_and_equals_the_loss_written_out(tiny, tmp_path):
    from trl_ext.ppo import maths
    from trl_ext.ppo.advantages import assign_advantages

    gradients = []
    for micro in (5, 2):
        model, tokenizer = tiny()
        args = config(tmp_path, per_device_train_batch_size=micro)
        learner = Learner(Policy("p", model, tokenizer), args)
        learner.prepare(Plain(), 1)
        rows = rows_of(learner)
        learner.annotate(rows)
        assign_advantages(rows, args)
        statistics = learner.accumulate(rows, torch.arange(5))
        assert statistics["ratio"] == pytest.approx(1.0, abs=1e-5)
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)
    model.zero_grad()
    mask = rows.sampled_mask
    out = learner.forward(rows)
    ratio = torch.exp(out.logprobs - rows.old_logprobs[mask])
    loss = maths.policy_loss_terms(ratio, rows.advantages[mask], 0.2, 0.2)[0]
    loss = loss + 0.1 * maths.value_loss_terms(out.values, rows.values[mask], rows.returns[mask], 0.2)[0]
    loss.mean().backward()
    torch.testing.assert_close(gradients[0], model.model.layers[0].mlp.up_proj.weight.grad, atol=1e-6, rtol=1e-4)


def test_padding_equal_to_eos_changes_nothing(tiny, tmp_path):
    """Masks are explicit. TRL inferred them from `!= pad`, and lost the learned EOS if padding equals EOS."""
    ends = []
    for pad in ("<pad>", "<eos>"):
        model, tokenizer = tiny()
        tokenizer.pad_token = pad
        torch.manual_seed(0)
        trainer = PPOv2Trainer(
            config(tmp_path / pad[1:4]), tokenizer, model, train_dataset=QUESTIONS, reward_funcs=count_a
        )
        trainer.train()
        ends.append(model.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], msg=name)


def test_optimizer_steps_are_epochs_times_minibatches(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, num_ppo_epochs=3, num_mini_batches=4)
    trainer.train()
    assert trainer.args.num_total_batches == 2
    assert {int(s["step"]) for s in trainer.optimizer.state.values()} == {2 * 3 * 4}


def test_samples_are_cut_to_the_likeliest_tokens(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, top_k=1, num_sample_generations=0, eval_dataset=QUESTIONS)
    args = trainer.args
    assert trainer.generate_completions(sampling=True) == trainer.generate_completions()
    args.top_k, args.top_p = 0, 1e-9
    assert trainer.generate_completions(sampling=True) == trainer.generate_completions()
    args.top_p = 0.5
    assert trainer.generate_completions(sampling=True) != trainer.generate_completions()


def test_it_learns_to_say_a(tiny, tmp_path):
    trainer = trainer_of(
        tiny, tmp_path, total_episodes=16 * 30, learning_rate=3e-3, kl_coef=0.0, eval_dataset=QUESTIONS
    )
    before = trainer.evaluate()["eval_count_a"]
    trainer.train()
    assert before < 0.5
    assert trainer.evaluate()["eval_count_a"] > 1.0
    samples = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(samples) == 16 * 10 and samples[0]["step"] == 1 and samples[-1]["completion"].count("a") >= 4


@pytest.mark.parametrize("critic", ["head", "model", "none"])
def test_every_kind_of_critic_trains_and_is_saved(tiny, tmp_path, critic):
    trainer = trainer_of(tiny, tmp_path, critic=critic)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    learner = trainer.learners["policy"]
    model = learner.model
    assert (tmp_path / "out/critic/value_head.safetensors").exists() == (critic != "none")
    if critic != "none":
        assert learner.value_head.linear.weight.abs().sum() > 0
    if critic == "model":
        trunk = copy.deepcopy(learner.critic.model.model.state_dict())
        assert any(not torch.equal(v, model.model.state_dict()[k]) for k, v in trunk.items())
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(value, reloaded.state_dict()[name]), name


def test_an_adapter_critic_learns_beside_the_policys_adapter(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, lora=True, critic="adapter")
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert any(".default." in n for n in changed)
    assert any(".default_critic." in n for n in changed)
    assert all("lora_" in n for n in changed)


def test_a_lora_policy_keeps_its_base_and_loads_with_peft(tiny, tmp_path):
    model, tokenizer = tiny()
    base = copy.deepcopy(model)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = PPOv2Trainer(
        config(tmp_path), tokenizer, model, train_dataset=QUESTIONS, reward_funcs=count_a, peft_config=lora
    )
    trainer.train()
    assert trainer.learners["policy"].reference is None
    trainer.save_model(str(tmp_path / "adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(reloaded(ids).logits, trainer.model(ids).logits)
    with reloaded.disable_adapter(), trainer.model.disable_adapter():
        assert torch.equal(reloaded(ids).logits, trainer.model(ids).logits)


def test_trls_reward_and_value_models_serve(tiny, tmp_path):
    model, tokenizer = tiny()
    reward, value, reference = classifier(tokenizer), classifier(tokenizer, 1), tiny()[0]
    weight, frozen = value.score.weight.clone(), [*reward.parameters(), *reference.parameters()]
    before = [p.clone() for p in frozen]
    dataset = Dataset.from_list([{"input_ids": tokenizer.encode(row["prompt"])} for row in QUESTIONS])
    trainer = PPOv2Trainer(config(tmp_path), tokenizer, model, reference, reward, dataset, value)
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    answers = batch.completions
    answer = min(answers, key=lambda a: len(a.response_ids))
    ids = torch.tensor([answer.prompt_ids + answer.response_ids])
    assert answer.score == pytest.approx(reward.score(reward.model(ids).last_hidden_state[:, -1]).item(), abs=1e-5)
    trainer.train()
    assert not torch.equal(value.score.weight, weight)
    assert all(map(torch.equal, before, frozen))


def test_reward_functions_may_be_async_see_columns_and_pass(tiny, tmp_path):
    seen = {}

    async def slow(prompts, completions, number, **columns):
        await asyncio.sleep(0)
        seen.update(zip(prompts, number, strict=True))
        return [1.0] * len(completions)

    def sometimes(prompts, completions, **columns):
        return [None if i % 2 else 0.5 for i in range(len(completions))]

    trainer = trainer_of(tiny, tmp_path, reward_funcs=[slow, sometimes], reward_weights=[2, 1])
    batch = trainer.score(trainer.collect(trainer.next_batch()))
    answers = batch.completions
    assert [a.score for a in answers[:2]] == [2.5, 2.0]
    assert all(prompt == f"{number}+1=" for prompt, number in seen.items())


def test_answers_stop_at_the_first_end_of_sequence_and_its_absence_is_penalised(tiny, tmp_path):
    options = {"missing_eos_penalty": 1.0, "response_length": 30}
    trainer = trainer_of(tiny, tmp_path, reward_funcs=lambda p, c, **k: [0.0] * len(c), **options)
    answers = trainer.score(trainer.collect(trainer.next_batch())).completions
    assert {a.ended for a in answers} == {True, False}
    eos = trainer.learners["policy"].tokenizer.eos_token_id
    for answer in answers:
        stops = [i for i, token in enumerate(answer.response_ids) if token == eos]
        assert stops == ([len(answer.response_ids) - 1] if answer.ended else [])
        assert answer.score == (0.0 if answer.ended else -1.0)


def test_sampling_ignores_the_models_own_defaults_and_is_undone_on_failure(tiny):
    model, _ = tiny()
    model.generation_config.top_k = 1  # would make every sample greedy
    torch.manual_seed(0)
    sampling = Draw(8, 5.0, stop_ids=frozenset())
    answers = generate(model, [[5, 6]] * 8, sampling)
    assert len({tuple(a) for a in answers}) == 8 and {len(a) for a in answers} == {8}
    kept = model.generation_config
    with pytest.raises(Exception):  # noqa: B017
        generate(model, [[10**6]], sampling)
    assert model.generation_config is kept


def test_stop_ids_come_from_the_whole_list_of_the_generation_config(tiny, tmp_path):
    model, tokenizer = tiny()
    model.generation_config.eos_token_id = [7, 8]
    assert stop_ids_of(model, tokenizer, None, None) == {tokenizer.eos_token_id, 7, 8}
    assert stop_ids_of(model, tokenizer, "eos", None) == {tokenizer.eos_token_id}
    assert stop_ids_of(model, tokenizer, "none", None) == set()
    assert stop_ids_of(model, tokenizer, None, 0) == {0}
    assert trainer_of(tiny, tmp_path, stop_token_id=5)._stop_ids == {5}


def test_failing_rewards_are_errors_never_zero(tiny, tmp_path):
    def broken(prompts, completions, **columns):
        raise KeyError("label")

    cases = {
        r"'broken' raised KeyError: 'label'": broken,
        "expected 16 values, for each completion, got 1 values": lambda p, c, **k: [1.0],
        r"got float": lambda p, c, **k: 1.0,
        r"no source of \['<lambda>'\] scored completion 0": lambda p, c, **k: [None] * len(c),
    }
    for message, function in cases.items():
        trainer = trainer_of(tiny, tmp_path, reward_funcs=function)
        with pytest.raises(RewardError, match=message):
            trainer.train()


def test_nan_weights_stop_the_run_and_name_the_rows(tiny, tmp_path):
    model, tokenizer = tiny()
    learner = Learner(Policy("p", model, tokenizer), config(tmp_path))
    with pytest.raises(RuntimeError, match=r"policy 'p': the learner is not prepared; call prepare\(accelerator, up"):
        learner.step()
    learner.prepare(Plain(), 1)
    rows = rows_of(learner)
    learner.value_head.linear.bias.data.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="policy 'p': a value is not finite at row 0; row 1"):
        learner.annotate(rows)


def test_checkpoints_are_whole_verified_limited_and_never_overwritten(tiny, tmp_path):
    options = {"total_episodes": 16 * 4, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    trainer_of(tiny, tmp_path, **options).train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    again = trainer_of(tiny, tmp_path)
    with pytest.raises(CheckpointError, match="holds checkpoint-4 of an earlier run"):
        again.train()
    file = tmp_path / "checkpoint-4/policies/policy/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing or damaged"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (tmp_path / ".partial-checkpoint-9").mkdir()
    with pytest.raises(CheckpointError, match=r"no MANIFEST\.json, so this is not a whole checkpoint"):
        again.train(resume_from_checkpoint=str(tmp_path / ".partial-checkpoint-9"))


def test_a_resumed_run_ends_bit_identical(tiny, tmp_path):
    def run(folder, resume=None, stop_at=None):
        options = {"total_episodes": 16 * 6, "save_strategy": "steps", "save_steps": 2, "num_mini_batches": 2}
        trainer = trainer_of(tiny, folder, **options)
        trainer.add_callback(StopAfter(stop_at))
        trainer.train(resume_from_checkpoint=resume)
        return weights(trainer)

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", stop_at=3)  # its last checkpoint is of update 2
    assert same(whole, run(tmp_path / "parts", resume=True))


# -- rows, collators and rewards as people bring them -------------------------------------------------------------


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def test_a_padding_collator_of_transformers_serves(tiny, tmp_path):
    model, tokenizer = tiny()
    rows = [{"input_ids": tokenizer.encode(q["prompt"] * (1 + q["number"] % 2))} for q in QUESTIONS]
    seen = []

    def look(prompts, completions, **columns):
        seen.extend(prompts)
        return [0.0] * len(prompts)

    tokenizer.padding_side = "left"
    collator = DataCollatorWithPadding(tokenizer)
    trainer = PPOv2Trainer(
        config(tmp_path), tokenizer, model, train_dataset=rows, data_collator=collator, reward_funcs=look
    )
    trainer.score(trainer.collect(trainer.next_batch()))
    assert sorted(seen) == sorted(tokenizer.decode(r["input_ids"]) for r in rows)


def test_a_plain_reward_function_may_run_an_event_loop_of_its_own(tiny, tmp_path):
    async def one():
        return 1.0

    def sync(prompts, completions, **columns):
        return [asyncio.run(one()) for _ in completions]

    trainer = trainer_of(tiny, tmp_path, reward_funcs=sync)
    assert {a.score for a in trainer.score(trainer.collect(trainer.next_batch())).completions} == {1.0}


def test_gradient_checkpointing_recomputes_also_for_a_model_that_was_loaded(tiny, tmp_path):
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    args = config(tmp_path / "run", gradient_checkpointing=True)
    trainer = PPOv2Trainer(args, tokenizer, loaded, train_dataset=QUESTIONS, reward_funcs=count_a)
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    rows = batch.token_batches
    forwards = []
    loaded.model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    trainer.learners["policy"].accumulate(rows["policy"], torch.arange(4))
    assert len(forwards) == 2


def test_an_update_ends_early_beyond_the_kl_it_is_allowed(tiny, tmp_path):
    options = {"target_kl": 1e-9, "num_ppo_epochs": 4, "learning_rate": 1e-2}
    trainer, steps = trainer_of(tiny, tmp_path, reward_funcs=length, **options), []
    trainer.learners["policy"].optimizer.register_step_post_hook(lambda *_: steps.append(1))
    metrics = trainer.update(trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))).metrics
    assert len(steps) == 2 and metrics["policy/stopped_early"] == 1.0  # the first step cannot have moved anything yet


def test_a_second_run_does_not_add_to_the_completions_of_the_first(tiny, tmp_path):
    first, second = (trainer_of(tiny, tmp_path, total_episodes=16, eval_dataset=QUESTIONS[:2]) for _ in range(2))
    first.train()
    with pytest.raises(CheckpointError, match=r"holds completions\.jsonl of an earlier run"):
        second.train()


def test_where_one_forward_holds_all_rows_the_first_step_does_not_repeat_it(tiny, tmp_path):
    gradients, forwards = [], []
    for keep in (True, False):
        sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
        trainer = trainer_of(tiny, tmp_path / str(keep), reward_funcs=length, **sizes)
        learner, batch = trainer.learners["policy"], trainer.score(trainer.collect(trainer.next_batch()))
        model = learner.model
        learner.checked = True  # as after the first update, which compares two forwards
        rows = trainer.advantage(batch).token_batches["policy"]
        count = []
        model.lm_head.register_forward_hook(lambda *_, count=count: count.append(1))
        _, forward = learner.annotate(rows)
        metrics = learner.accumulate(rows, torch.randperm(16), forward if keep else None)
        assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
        forwards.append(len(count))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert forwards == [1, 2]
    assert gradients[0].norm() > 0
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)
