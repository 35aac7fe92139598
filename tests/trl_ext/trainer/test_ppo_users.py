"""What a user of TRL's PPO met: scores changed in a loop of one's own, steps left out, options that did nothing or
changed on resuming."""

import dataclasses
import math
import re

import pytest
import torch
from folders import ROOT
from one_policy import QUESTIONS, classifier, config, count_a, same, trainer_of, weights
from transformers import DataCollatorWithPadding, TrainingArguments

from maporl import MultiAgentPPOConfig
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.chat.encoding import PromptTooLong
from trl_ext.files.manifest import CheckpointError
from trl_ext.learning.arguments import COUNTS, DECIDING, REFUSED
from trl_ext.learning.trained import NonFiniteError
from trl_ext.ppo.batch import Completion
from trl_ext.ppo.losses import OBJECTIVES
from trl_ext.trainer.prompts import MOST_READ, longest_first

FROM_TRL = ROOT / "docs/howto/from_trl.md"


# -- a loop of one's own ------------------------------------------------------------------------------------------


def looped(trainer, change):
    """The weights after a run in which ``change`` was called with each scored completion, and the first mean score."""
    with trainer.training():
        while trainer.goes_on():
            batch = trainer.score(trainer.collected())
            for completion in batch.completions:
                change(completion)
            batch = trainer.update(trainer.advantage(batch))
            trainer.finish_update(batch)
    return weights(trainer), trainer.state.log_history[0]["objective/scores"]


def test_a_score_that_is_changed_after_scoring_is_what_is_trained_on(tiny, tmp_path):
    def change(completion):
        completion.score = -3.0 * completion.score - 1.0

    kept, score = looped(trainer_of(tiny, tmp_path / "kept", missing_eos_penalty=1.0), lambda completion: None)
    changed, other = looped(trainer_of(tiny, tmp_path / "changed", missing_eos_penalty=1.0), change)
    assert not same(kept, changed) and other == pytest.approx(-3.0 * score - 1.0, abs=1e-4)


def test_own_measures_are_logged_and_a_loss_that_is_no_number_names_the_objective(tiny, tmp_path, monkeypatch):
    made = []

    def trusting(new, old, advantages, mask, options):
        made.append(math.nan if len(made) == 3 else 1.0)  # made-up tokens, the first update in two parts, the second
        return -advantages * (new - old).exp() * made[-1], {"trust": 2.0 * mask}

    monkeypatch.setitem(OBJECTIVES, "trusting", trusting)
    trainer = trainer_of(tiny, tmp_path, objective="trusting", num_ppo_epochs=1, num_mini_batches=1)
    with pytest.raises(NonFiniteError, match="the loss by objective trusting is nan on update 2"):
        trainer.train()
    first = trainer.state.log_history[0]
    assert first["measure/trust"] == pytest.approx(2.0) and first["val/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert "policy/clipfrac_avg" not in first


@pytest.mark.parametrize("given, error, message", [
    ({"score": None}, ValueError, r"c0: has no score; call score\(batch\) before advantage\(batch\)"),
    ({"score": float("nan")}, NonFiniteError, "c0: score is nan"),
    ({"score": "good"}, ValueError, "c0: score: expected a number, got 'good'"),
    ({"score": torch.ones(2)}, ValueError, r"c0: score: expected a number, got tensor"),
    ({"score": 9.0, "token_scores": [1.0, 1.0]}, ValueError, "c0: score is 9, but its token_scores have the sum 2"),
    ({"score": 1.0, "token_scores": [1.0]}, ValueError, "c0: expected 2 token_scores, as tokens, got 1"),
    ({"score": 1.0, "token_scores": [1.0, float("inf")]}, NonFiniteError, "c0: token_scores is inf"),
    ({"prompt_ids": torch.tensor([3, 4])}, ValueError, r"c0: prompt_ids: expected a list of token ids, got tensor\(.*tolist"),
    ({"response_ids": "ab"}, ValueError, r"c0: response_ids: expected a list of token ids, got 'ab'; a tensor has tolist\(\)"),
    ({"response_ids": []}, ValueError, "c0: response_ids: expected at least one token"),
    ({"response_ids": [60000]}, ValueError, "c0: response_ids: token id 60000 is outside the model's vocabulary of"),
    ({"response_ids": [-1]}, ValueError, "c0: response_ids: token id -1 is outside"),
])  # fmt: skip
def test_completions_that_cannot_be_trained_on_are_named(tiny, tmp_path, given, error, message):
    trainer = trainer_of(tiny, tmp_path)
    batch = trainer.next_batch()
    own = {"prompt_ids": [3, 4], "response_ids": [5, 6], "ended": True, "label": "c0", "score": 1.0} | given
    batch.completions = [Completion(**own)]
    with pytest.raises(error, match=message):
        trainer.advantage(batch)


def test_scores_may_be_tensors_and_the_score_may_be_left_to_its_parts(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path)
    batch = trainer.next_batch()
    batch.completions = [
        Completion([3, 4], [5, 6], True, "c0", score=torch.tensor(2.0)),
        Completion([3, 4], [5], True, "c1", token_scores=[1.5]),
    ]
    assert trainer.advantage(batch).token_batches["policy"].score.tolist() == [2.0, 1.5]


def test_steps_that_are_left_out_or_made_twice_are_named(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path, total_episodes=48)

    def scored():
        return trainer.score(trainer.collected())

    with trainer.training():
        with pytest.raises(ValueError, match="advantage: the batch has no completions; call collect"):
            trainer.advantage(trainer.next_batch())
        with pytest.raises(ValueError, match="completion 0: has no score; call score"):
            trainer.advantage(trainer.collected())
        with pytest.raises(RuntimeError, match=r"no token_batches; call advantage\(batch\) before update"):
            trainer.update(scored())
        batch = trainer.advantage(scored())
        with pytest.raises(RuntimeError, match=r"finish_update: no update was made since the last one; call update"):
            trainer.finish_update(batch)
        assert trainer.state.global_step == 0
        trainer.update(batch)
        with pytest.raises(RuntimeError, match=r"update 1 is made, and not finished; call finish_update"):
            trainer.update(batch)
        trainer.finish_update(batch)
        with pytest.raises(RuntimeError, match="expected the batch of update 2, got that of update 1"):
            trainer.update(batch)
        trainer.finish_update(trainer.update(trainer.advantage(scored())))
        trainer.finish_update(trainer.update(trainer.advantage(scored())))
        with pytest.raises(RuntimeError, match=r"all 3 updates are made"):
            trainer.update(trainer.advantage(scored()))
    assert trainer.state.global_step == 3


def test_a_last_update_that_is_not_finished_is_named(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path)
    with pytest.raises(RuntimeError, match="the last update was not finished"), trainer.training():
        trainer.update(trainer.advantage(trainer.score(trainer.collected())))


def test_an_override_of_update_may_make_the_whole_of_it(tiny, tmp_path):
    class Own(PPOv2Trainer):
        def update(self, batch):
            self.learning.update(batch.token_batches, self.state.global_step)
            return batch

    model, tokenizer = tiny()
    trainer = Own(config(tmp_path), tokenizer, model, train_dataset=QUESTIONS, reward_funcs=count_a)
    trainer.train()
    assert trainer.state.global_step == trainer.args.num_total_batches


@pytest.mark.parametrize("name", ["compute_loss", "training_step", "create_optimizer"])
def test_an_override_that_nothing_would_call_is_refused(tiny, tmp_path, name):
    own = type("Own", (PPOv2Trainer,), {name: lambda self, *args, **kwargs: None})
    model, tokenizer = tiny()
    with pytest.raises(ValueError, match=rf"^Own\.{name}: nothing would call it; override collect, score, advantage"):
        own(config(tmp_path), tokenizer, model, train_dataset=QUESTIONS, reward_funcs=count_a)


# -- what is given --------------------------------------------------------------------------------------------------


def test_an_optimizer_that_leaves_weights_out_is_refused(tiny, tmp_path):
    def made(folder, chosen, **options):
        model, tokenizer = tiny()
        value_model = options.pop("value_model", lambda tokenizer: None)(tokenizer)
        optimizer = torch.optim.SGD(chosen(model, value_model), lr=0.1)
        parts = {"value_model": value_model, "optimizers": (optimizer, None), "reward_funcs": count_a}
        return PPOv2Trainer(config(folder, **options), tokenizer, model, train_dataset=QUESTIONS, **parts)

    message = (
        r"policy 'policy': optimizers: the optimizer does not step value_head.linear.weight, value_head.linear.bias, so"
    )
    with pytest.raises(ValueError, match=message):
        made(tmp_path, lambda model, _: model.parameters())
    with pytest.raises(ValueError, match=r"does not step model\.\S+, model\.\S+, model\.\S+ and \d+ more"):
        made(tmp_path, lambda model, _: [model.lm_head.weight], critic="none")
    both = made(
        tmp_path / "both", lambda model, value: [*model.parameters(), *value.parameters()], value_model=classifier
    )
    before = both.model.value_model.score.weight.clone()
    both.train()
    assert not torch.equal(before, both.model.value_model.score.weight)

    def frozen(model, _):
        model.requires_grad_(False).lm_head.requires_grad_(True)
        return [model.lm_head.weight]

    made(tmp_path / "frozen", frozen, critic="none").train()


@pytest.mark.parametrize("column", ["prompt", "input_ids", "messages"])
def test_one_prompt_that_is_too_long_is_named_before_the_run(tiny, tmp_path, column):
    model, tokenizer = tiny()
    texts = ["1+1="] * 40
    texts[33] = "1" * 126
    made = {"prompt": str, "input_ids": tokenizer.encode, "messages": lambda text: [{"role": "user", "content": text}]}
    rows = [{column: made[column](text)} for text in texts]
    message = (
        r"^train_dataset\[33\], prompt .*but the model reads at most 128; .* leave such rows out \(Dataset.filter\)"
    )
    with pytest.raises(PromptTooLong, match=message):
        PPOv2Trainer(config(tmp_path), tokenizer, model, train_dataset=rows, reward_funcs=count_a)
    collator = lambda rows: [{"prompt": row[column][:4] if column == "prompt" else "1+1="} for row in rows]  # noqa: E731
    PPOv2Trainer(
        config(tmp_path), tokenizer, model, train_dataset=rows, reward_funcs=count_a, data_collator=collator
    ).train()


def test_of_a_large_data_set_rows_at_even_distances_are_looked_at():
    read = []

    class Rows:
        def __len__(self):
            return 5 * MOST_READ

        def __getitem__(self, number):
            read.append(number)
            return {"prompt": "x" * (number % 7)}

    numbers = longest_first(Rows())
    assert len(read) == len(numbers) == MOST_READ and max(read) > 4.9 * MOST_READ
    assert [number % 7 for number in numbers[:3]] == [6, 6, 6] and numbers[-1] % 7 == 0


def test_padding_that_nothing_tells_from_the_end_is_said(tiny, tmp_path, caplog):
    model, tokenizer = tiny()
    tokenizer.pad_token = tokenizer.eos_token
    end, ids = tokenizer.eos_token_id, tokenizer.encode("1+1=")

    def warned(data_collator=None, **row):
        caplog.clear()
        parts = {"train_dataset": [{"input_ids": ids}] * 5 + [row], "reward_funcs": count_a}
        PPOv2Trainer(config(tmp_path), tokenizer, model, **parts, data_collator=data_collator)
        return [r.getMessage() for r in caplog.records if "padding" in r.getMessage()]

    for padded, collator in (([end, end, *ids], None), ([*ids, end, end, end], DataCollatorWithPadding(tokenizer))):
        (line,) = warned(collator, input_ids=padded)
        assert (
            line.startswith("train_dataset[5]: the prompt begins or ends with several tokens")
            and "attention_mask" in line
        )
    assert not warned(input_ids=[end, *ids, end])
    assert not warned(input_ids=[end, end, *ids], attention_mask=[0, 0, *([1] * len(ids))])


# -- options that do nothing -------------------------------------------------------------------------------------------

USED = {
    "use_liger_kernel", "liger_kernel_config",
    *DECIDING, "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed",
    "full_determinism", "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "fp16", "tf32", "use_cache", "logging_strategy", "logging_steps", "logging_first_step",
    "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "save_strategy", "save_steps",
    "save_total_limit", "load_best_model_at_end", "metric_for_best_model", "greater_is_better", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "use_cpu", "accelerator_config",
    "parallelism_config", "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config", "deepspeed", "local_rank",
}  # fmt: skip


def test_every_training_argument_is_used_or_refused_or_listed_as_without_effect():
    section = FROM_TRL.read_text().split("## Arguments without effect")[1].split("\n## ")[0]
    listed = set(re.findall(r"`(\w+)`", section))
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    names -= {"warmup_ratio", "logging_dir"}  # other names, in older transformers only
    assert names - USED - set(REFUSED) == listed & names - set(REFUSED)
    assert not USED & set(REFUSED) and not USED & listed
    assert set(REFUSED) | set(COUNTS) <= listed


OTHERS = {
    "metric_for_best_model": "loss",
    "train_sampling_strategy": "group_by_length",
    "debug": "underflow_overflow",
    "include_for_metrics": ["loss"],
}


@pytest.mark.parametrize("name", sorted(REFUSED))
@pytest.mark.filterwarnings("ignore")
def test_an_argument_that_would_do_nothing_is_refused(tmp_path, name):
    (field,) = [f for f in dataclasses.fields(TrainingArguments) if f.name == name]
    value = OTHERS.get(name, not field.default if isinstance(field.default, bool) else 3)
    strategies = {"save_strategy": "no"} if name == "load_best_model_at_end" else {}
    for kind in (PPOv2Config, MultiAgentPPOConfig):
        with pytest.raises(ValueError, match=rf"^(torch_compile|{name}): would do nothing here; leave it out: "):
            kind(output_dir=str(tmp_path), use_cpu=True, report_to=[], **{name: value}, **strategies)


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_a_count_that_the_trainer_fills_in_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=rf"^{name}: the trainer fills it in; set {COUNTS[name]} instead"):
        PPOv2Config(output_dir=str(tmp_path), use_cpu=True, report_to=[], **{name: 3})


# -- resuming with other options ---------------------------------------------------------------------------------------


def test_a_run_resumes_with_its_own_options_only(tiny, tmp_path, capfd):
    options = {"save_strategy": "steps", "save_steps": 1, "total_episodes": 48}
    first = trainer_of(tiny, tmp_path, **options)
    with first.training():
        first.finish_update(first.update(first.advantage(first.score(first.collected()))))
    entries = {p.name for p in tmp_path.iterdir()}
    for changed, message in (
        ({"learning_rate": 1e-2}, r"checkpoint-1: was made with other options \(learning_rate was .* and is 0.01\); resume"),
        ({"per_device_train_batch_size": 16}, r"num_total_batches was 3 and is 2, batch_size was 16 and is 32"),
        ({"total_episodes": 32}, "num_total_batches was 3 and is 2"),
        ({"kl_coef": 0.5, "lam": 0.5, "stop_strings": ["a"]}, r"kl_coef was .*lam was .*stop_strings was None and is \['a'\]|stop_strings was"),
        ({"optim": "sgd"}, r"optim was 'adamw_torch\w*' and is 'sgd'"),
        ({"num_generations": 2}, "num_generations was 1 and is 2"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            trainer_of(tiny, tmp_path, **options | changed).train(resume_from_checkpoint=True)
    assert {p.name for p in tmp_path.iterdir()} == entries
    free = {"save_steps": 2, "logging_steps": 2, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 16}
    again = trainer_of(tiny, tmp_path, **options | free, logits_chunk=4)
    capfd.readouterr()
    again.train(resume_from_checkpoint=True)
    assert f"{tmp_path}: resumes after update 1\n" in capfd.readouterr().err
    assert again.state.global_step == 3


@pytest.mark.slow
def test_a_run_with_a_constant_learning_rate_may_be_made_longer(tiny, tmp_path):
    """Nothing that a longer run has done by then would differ."""
    options = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    trainer_of(tiny, tmp_path, total_episodes=16, **options).train()
    longer = trainer_of(tiny, tmp_path, total_episodes=32, **options)
    longer.train(resume_from_checkpoint=True)
    whole = trainer_of(tiny, tmp_path / "whole", total_episodes=32, **options)
    whole.train()
    for one, other in zip(longer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_that_is_made_longer_has_the_schedule_of_its_new_length(tiny, tmp_path, capfd):
    options = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.01}
    first = trainer_of(tiny, tmp_path, total_episodes=32, **options)
    first.train()
    longer = trainer_of(tiny, tmp_path, total_episodes=64, **options)
    longer.train(resume_from_checkpoint=True)
    rates = [record["lr"] for record in first.state.log_history + longer.state.log_history if "lr" in record]
    assert rates == pytest.approx([0.01, 0.005, 0.005, 0.0025]), "half of 4 updates are made, and then a half of those"
    assert (
        f"{tmp_path}: made longer, to 4 updates in place of 2; from update 3 on the learning rate is that of schedule "
        "linear over 4 updates\n"
    ) in capfd.readouterr().err


def test_recomputing_activations_warns_of_nothing(tiny, tmp_path, recwarn):
    """Transformers warned of the old name of the option at the start, and twice in every update."""
    trainer_of(tiny, tmp_path, gradient_checkpointing=True, total_episodes=16).train()
    assert [str(w.message) for w in recwarn if "checkpointing" in str(w.message)] == []
