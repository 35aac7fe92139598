"""What users of TRL 1.12's ``PPOTrainer`` bring: its options, command lines, scripts, tests and tokenizers.

``TRL_DEFAULTS`` is the table of ``trl.experimental.ppo.PPOConfig`` in TRL 1.12, which TRL 1.13 removed.
"""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from folders import ROOT
from one_policy import QUESTIONS, classifier, config, count_a, trainer_of
from tiny_models import build
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithPadding,
    HfArgumentParser,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    TrainingArguments,
)
from transformers import (
    trainer as transformers_trainer,
)
from trl import ModelConfig, ScriptArguments, TrlParser

from maporl import MultiAgentPPOConfig
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.learning.arguments import COUNTS
from trl_ext.trainer.scoring import RewardError

TRL_DEFAULTS = {
    "dataset_num_proc": None, "num_mini_batches": 1, "total_episodes": None, "local_rollout_forward_batch_size": 64,
    "num_sample_generations": 10, "response_length": 53, "stop_token": None, "stop_token_id": None, "temperature": 0.7,
    "missing_eos_penalty": None, "sft_model_path": "EleutherAI/pythia-160m", "world_size": None,
    "num_total_batches": None, "micro_batch_size": None, "local_batch_size": None, "batch_size": None,
    "local_mini_batch_size": None, "mini_batch_size": None, "push_to_hub": False,
    "reward_model_path": "EleutherAI/pythia-160m", "model_adapter_name": None, "ref_adapter_name": None,
    "num_ppo_epochs": 4, "whiten_rewards": False, "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2,
    "vf_coef": 0.1, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95, "ds3_gather_for_generation": True,
    "learning_rate": 3e-6, "logging_steps": 10, "gradient_checkpointing": True, "bf16": None,
    "lr_scheduler_kwargs": None, "use_liger_kernel": False, "torch_empty_cache_steps": None,
}  # fmt: skip


# -- options ----------------------------------------------------------------------------------------------------------


def test_every_option_of_trl_has_trls_default_or_is_listed_as_different():
    ours = {field.name: field.default for field in dataclasses.fields(PPOv2Config)}
    different = {name for name, value in TRL_DEFAULTS.items() if ours[name] != value}
    page = (ROOT / "docs/howto/from_trl.md").read_text()
    section = page.split("## Defaults that differ")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.M))
    assert different == listed - {"stop_token"}  # its default is TRL's, and means something else
    assert "stop_token" in listed


TRAINING_ARGUMENTS = {f.name for f in dataclasses.fields(TrainingArguments)} - {"learning_rate", "logging_steps"}
OTHER_VALUES = {
    "lr_scheduler_type": "cosine", "objective": "reinforce", "critic": "adapter", "output_dir": "o", "optim": "sgd",
    "kl_in": "loss", "schedule": "x", "top_p": 0.5, "dual_clip": 3.0, "stop_strings": ["</answer>", "a b"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def types():
    """The types of options, as they were. The parsers of transformers and TRL write others into the classes."""
    before = [(own, own.type) for kind in (PPOv2Config, MultiAgentPPOConfig) for own in dataclasses.fields(kind)]
    yield
    for own, kind in before:
        own.type = kind


NEEDED = {"kl_in": ["--kl_estimator", "k3"], "engine_tis_mode": ["--engine_tis_cap", "2"]}


def other_value(name: str, hint, default):
    """A value of the option's type that is not its default."""
    options = [part for part in (*typing.get_args(hint), hint) if part is not type(None)]
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    literal = next((part for part in options if typing.get_origin(part) is typing.Literal), None)
    if literal is not None or typing.get_origin(hint) is typing.Literal:
        return next(value for value in typing.get_args(literal or hint) if value not in (default, None))
    if bool in options:
        return not default
    if str in options:
        return "words"
    for part in options:
        if typing.get_origin(part) is list:
            return ["3", "4"] if typing.get_args(part) == (str,) else [3, 4]
    return 7 if int in options else 0.25


@pytest.mark.parametrize("kind", [PPOv2Config, MultiAgentPPOConfig])
def test_every_option_can_be_set_on_the_command_line_and_in_trls_yaml(kind, tmp_path):
    """The union in ``stop_token_id`` stopped both parsers."""
    refused = set(COUNTS)
    refused |= {"num_generations", "critic_warmup"} if kind is MultiAgentPPOConfig else set()  # of one policy only
    names = {f.name: f.default for f in dataclasses.fields(kind) if f.name not in TRAINING_ARGUMENTS | refused}
    assert {"stop_token_id", "response_length", "critic", "learning_rate"} <= set(names)
    hints = typing.get_type_hints(kind)
    parser = HfArgumentParser(kind)
    for name, default in names.items():
        value = other_value(name, hints[name], default)
        words = [str(v) for v in (value if isinstance(value, list) else [value])]
        line = [f"--{name}", *words, *NEEDED.get(name, []), "--use_cpu", "--output_dir", str(tmp_path)]
        (parsed,) = parser.parse_args_into_dataclasses(line)
        if name != "world_size":  # the launcher decides
            assert getattr(parsed, name) == value, name
    values = {
        n: other_value(n, hints[n], d)
        for n, d in names.items()
        if n not in ("stop_token", "world_size", "ratio_to", *NEEDED)
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    line = ["--config", str(tmp_path / "config.yaml"), "--use_cpu", "--output_dir", str(tmp_path)]
    (parsed,) = TrlParser(kind).parse_args_and_config(line)
    assert {name: getattr(parsed, name) for name in values} == values
    with pytest.raises(ValueError, match="kl_coef: expected a number of at least 0, got -1"):
        parser.parse_args_into_dataclasses(["--kl_coef", "-1", "--use_cpu", "--output_dir", str(tmp_path)])


# -- padding tokens ---------------------------------------------------------------------------------------------------


def with_new_pad(tokenizer):
    """The tokenizer after what TRL's scripts do to it: a padding token that the model has no embedding for."""
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == size
    return tokenizer


def mamba(tiny):
    """A recurrent model, which transformers' own ``generate`` samples from."""
    _, tokenizer = tiny()
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "vocab_size": len(tokenizer)}
    return MambaForCausalLM(MambaConfig(**size, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)), tokenizer


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "gemma2", "mamba"))]
)
def test_a_pad_token_without_an_embedding_changes_nothing(tiny, tmp_path, architecture, side):
    """TRL masks it.

    Here no id of padding reaches a model: not in sampling, in training, or in reward and value models.
    """
    texts, scores = [], []
    for new in (False, True):
        model, tokenizer = mamba(tiny) if architecture == "mamba" else build(tiny, architecture)
        reward, value = classifier(tokenizer), classifier(tokenizer, 1)
        tokenizer = with_new_pad(tokenizer) if new else tokenizer
        tokenizer.padding_side = side
        rows = [{"input_ids": tokenizer.encode(q["prompt"] * (1 + q["number"] % 3))} for q in QUESTIONS]
        args = config(tmp_path / str(new), total_episodes=16)
        collator = DataCollatorWithPadding(tokenizer)
        trainer = PPOv2Trainer(args, tokenizer, model, None, reward, rows, value, collator, rows[:3])
        trainer.train()
        texts.append(trainer.generate_completions())
        scores.append(trainer.evaluate())
    assert texts[0] == texts[1] and scores[0] == scores[1]


def test_padding_in_the_rows_themselves_is_dropped_as_trl_masks_it(tiny, tmp_path):
    model, tokenizer = tiny()
    tokenizer = with_new_pad(tokenizer)
    pad, ids = tokenizer.pad_token_id, tokenizer.encode("1+1=")
    masked = {"input_ids": [0, 0, *ids], "attention_mask": [0, 0, 1, 1, 1, 1]}
    rows = [{"input_ids": [pad, pad, *ids]}, {"input_ids": [*ids, pad]}, masked]
    args = config(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=1)
    trainer = PPOv2Trainer(args, tokenizer, model, train_dataset=rows, reward_funcs=count_a)
    assert [c.prompt_ids for c in trainer.collect(trainer.next_batch()).completions] == [ids] * 3
    with pytest.raises(ValueError, match="its input_ids are padding only"):
        PPOv2Trainer(args, tokenizer, model, train_dataset=[{"input_ids": [pad]}], reward_funcs=count_a)


def test_the_eos_token_of_a_prompt_stays_where_it_is_also_the_pad_token(tiny, tmp_path):
    """TRL masks it, so a model never saw where a message ended. Here masks are never inferred from such an id."""
    model, tokenizer = tiny()
    tokenizer.pad_token = tokenizer.eos_token
    ids = [*tokenizer.encode("1+1="), tokenizer.eos_token_id, *tokenizer.encode("2")]
    trainer = PPOv2Trainer(
        config(tmp_path), tokenizer, model, train_dataset=[{"input_ids": ids}] * 16, reward_funcs=count_a
    )
    assert trainer.collect(trainer.next_batch()).completions[0].prompt_ids == ids


def test_ids_that_another_model_lacks_are_refused_in_one_line(tiny, tmp_path):
    model, tokenizer = tiny()
    small = classifier(tokenizer, size=8)
    rows = [{"prompt": q["prompt"]} for q in QUESTIONS]
    trainer = PPOv2Trainer(config(tmp_path), tokenizer, model, None, small, rows)
    with pytest.raises(RewardError, match=r"outside its vocabulary of 8; pass its own tokenizer as reward_processing_"):
        trainer.train()
    trainer = PPOv2Trainer(config(tmp_path), tokenizer, model, None, classifier(tokenizer), rows, small)
    with pytest.raises(ValueError, match="outside its vocabulary of 8"):
        trainer.train()
    other = LlamaForCausalLM(classifier(tokenizer, size=8).config)
    trainer = PPOv2Trainer(config(tmp_path), tokenizer, model, other, classifier(tokenizer), rows)
    with pytest.raises(ValueError, match=r"reference: token id .* is outside its vocabulary of 8"):
        trainer.train()


# -- what scripts ask of the trainer ----------------------------------------------------------------------------------


def test_trainer_model_answers_as_trls_wrapper_does(tiny, tmp_path):
    model, tokenizer = tiny()
    value = classifier(tokenizer)
    rows = [{"prompt": q["prompt"]} for q in QUESTIONS]
    trainer = PPOv2Trainer(config(tmp_path / "a"), tokenizer, model, None, classifier(tokenizer), rows, value)
    assert trainer.model.policy is model and trainer.model.value_model is value
    assert trainer.model.config is model.config
    ids = torch.tensor([tokenizer.encode("1+1=")])
    torch.testing.assert_close(trainer.model(ids).logits, model(ids).logits)
    trainer.model.policy.save_pretrained(tmp_path / "policy")
    trainer.model.value_model.save_pretrained(tmp_path / "value")
    assert LlamaForSequenceClassification.from_pretrained(tmp_path / "value").score.out_features == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").config.vocab_size == model.config.vocab_size


def test_a_head_is_no_value_model_and_the_error_says_where_it_is(tiny, tmp_path):
    trainer = trainer_of(tiny, tmp_path)
    assert not hasattr(trainer.model, "value_model")
    with pytest.raises(AttributeError, match=r"critic 'head' is not a separate model; trainer\.learners\['policy'\]"):
        _ = trainer.model.value_model
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = trainer.model.no_such_thing
    own = trainer_of(tiny, tmp_path, critic="model")
    assert own.model.value_model is own.learners["policy"].critic.model


def test_completions_are_shown_and_need_no_evaluation_set(tiny, tmp_path, capsys):
    assert trainer_of(tiny, tmp_path).generate_completions() == []
    trainer = trainer_of(tiny, tmp_path, eval_dataset=[{"prompt": "1+1="}, {"prompt": "a\x1b[31mb"}])
    capsys.readouterr()
    assert len(trainer.generate_completions()) == 2
    shown = capsys.readouterr().out
    assert "1+1=" in shown and "model response" in shown and "score" in shown and "\x1b[31m" not in shown


def test_a_policy_is_pushed_with_a_card_that_names_its_data(tiny, tmp_path, monkeypatch):
    pushed = []

    def upload_folder(**given):
        pushed.append(given)
        return "done"

    hub = SimpleNamespace(
        upload_folder=upload_folder, create_repo=lambda *a, **k: SimpleNamespace(repo_id="someone/policy")
    )
    monkeypatch.setattr(transformers_trainer, "hf_api", lambda *a, **k: hub)
    trainer = trainer_of(tiny, tmp_path / "policy", total_episodes=16)
    trainer.train()
    assert trainer.push_to_hub(dataset_name="trl-lib/tldr") == "done"
    assert pushed[0]["repo_id"] == "someone/policy" and pushed[0]["folder_path"] == str(tmp_path / "policy")
    card = (tmp_path / "policy/README.md").read_text()
    assert "trl-lib/tldr" in card and "# policy" in card and "updates: 1, completions: 16" in card
    front = yaml.safe_load(card.split("---")[1])
    assert front["datasets"] == ["trl-lib/tldr"] and {"trl", "ppo"} <= set(front["tags"])
    assert (tmp_path / "policy/model.safetensors").is_file()


# -- TRL's two example scripts, in our words --------------------------------------------------------------------------


@pytest.fixture
def local_models(tiny, tmp_path, monkeypatch):
    """A policy, a reward model and a data set in folders, in place of names on the hub."""
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    classifier(tokenizer).save_pretrained(tmp_path / "reward")
    (tmp_path / "data").mkdir()
    for split, number in (("train", 20), ("validation", 4)):
        rows = [json.dumps({"prompt": f"{i % 10}+1=", "completion": "x"}) for i in range(number)]
        (tmp_path / f"data/{split}.jsonl").write_text("\n".join(rows))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMON = (
    "--dataset_name data --model_name_or_path policy --sft_model_path policy --reward_model_path reward "
    "--missing_eos_penalty 1.0 --total_episodes 8 --response_length 6 --use_cpu --report_to none --disable_tqdm true"
)


SCRIPTS = [
    ("ppo.py", "--per_device_train_batch_size 4", "model.safetensors"),
    ("ppo_tldr.py",
     "--dataset_test_split validation --per_device_train_batch_size 1 --gradient_accumulation_steps 4 " "--stop_token eos --eval_strategy steps --eval_steps 1 --use_peft --lora_target_modules all-linear", "adapter_model.safetensors"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("script", "options", "weights"), SCRIPTS)
def test_trls_example_scripts_run(local_models, monkeypatch, capsys, script, options, weights):
    """Two updates of each script, from its command line to the saved weights and the table of completions."""
    monkeypatch.setattr(sys, "argv", [script, *f"{COMMON} {options} --output_dir out".split()])
    runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    state = json.loads((local_models / "out/checkpoint-2/state.json").read_text())
    assert state["global_step"] == 2 and state["episodes"] == 8
    assert (local_models / "out" / weights).is_file()
    shown = capsys.readouterr().out
    assert "model response" in shown and "+1=" in shown
    assert ("eval_score" in shown) == ("--eval_strategy" in options)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("script", "options", "weights"), SCRIPTS)
def test_trls_example_scripts_run_in_two_processes_under_zero(local_models, stage, script, options, weights):
    pytest.importorskip("deepspeed")
    setting = (ROOT / f"configs/accelerate/zero{stage}.yaml").read_text()
    Path("zero.yaml").write_text(setting.replace("num_processes: 8", "num_processes: 2"))
    flags = f"{COMMON} {options} --output_dir out".replace("--use_cpu ", "")  # accelerate drops DeepSpeed with it
    flags = flags.replace("--total_episodes 8", "--total_episodes 16")
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "zero.yaml"]
    variables = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, str(ROOT / "examples" / script), *flags.split()],
        env=variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    state = json.loads((local_models / "out/checkpoint-2/state.json").read_text())
    assert state["global_step"] == 2 and state["episodes"] == 16
    assert (local_models / "out" / weights).is_file()


def test_the_parsers_of_trls_scripts_read_all_their_dataclasses(tmp_path):
    line = ["--dataset_name", "data", "--output_dir", str(tmp_path), "--use_cpu", "--learning_rate", "1e-5"]
    kinds = (ScriptArguments, PPOv2Config, ModelConfig)
    for script, training, model in (
        HfArgumentParser(kinds).parse_args_into_dataclasses(line),
        TrlParser(kinds).parse_args_and_config(line),
    ):
        assert script.dataset_name == "data" and training.learning_rate == 1e-5 and model.use_peft is False
