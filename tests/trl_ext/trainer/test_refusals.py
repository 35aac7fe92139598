"""What ``PPOv2Trainer`` and its options refuse before a run: what is given in place of good arguments, and the words."""

import copy
import math

import pytest
import torch
from conformance import build
from datasets import Dataset, DatasetDict, IterableDataset
from one_policy import QUESTIONS, classifier, config, count_a
from peft import LoraConfig, VBLoRAConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    CTRLConfig,
    CTRLForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    ProcessorMixin,
    TrainingArguments,
)

from maporl import MultiAgentPPOConfig
from trl_ext import PPOv2Config, PPOv2Trainer

PARTS = {
    "args", "processing_class", "model", "ref_model", "reward_model", "train_dataset", "value_model", "data_collator",
    "eval_dataset", "optimizers", "peft_config", "reward_funcs", "reward_weights", "sampler",
}  # fmt: skip
LORA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
BERT = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1)  # fmt: skip
CTRL = CTRLConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=2, dff=16, num_labels=1)


class Averaged(torch.optim.SGD):
    """Has modes of its own, as the optimizers of schedulefree."""

    def train(self):
        pass

    def eval(self):
        pass


class Processor(ProcessorMixin):
    def __init__(self, tokenizer):
        self.tokenizer = copy.deepcopy(tokenizer)


def with_lora(model, *more, change=None, **options):
    """The model with an adapter, or several, after ``change`` of it."""
    model = get_peft_model(model, LoraConfig(**LORA, **options))
    for name in more:
        model.add_adapter(name, LoraConfig(**LORA))
    if change is not None:
        change(model)
    return model


def two_labels(tokenizer):
    model = classifier(tokenizer)
    model.config.num_labels = 2
    return model


def routed():
    model = build("mixtral")[0]
    model.config.output_router_logits = True
    return model


def seeing(tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = sizes | {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=sizes | {"image_size": 28, "patch_size": 14}))  # fmt: skip


def one(prompts, completions, **columns):
    return [1.0] * len(completions)


def weighed(weights):
    return {"reward_funcs": [one, lambda p, c, **k: [1.0] * len(c)], "reward_weights": weights}


REFUSED = {
    "no rows": ({"train_dataset": []}, "train_dataset: expected at least one row, got an empty data set"),
    "no column": ({"train_dataset": [{"question": "?"}]}, r"expected one of the columns \('input_ids', 'prompt', 'messages'\), got \['question'\]"),
    "an empty prompt": ({"train_dataset": [{"prompt": "1+1="}, {"prompt": ""}]}, "a row of the data set has no prompt"),
    "a long prompt": ({"train_dataset": [{"prompt": "1" * 126}]}, "prompt '1111.*: the prompt has 126 tokens and the completion may have 6, but the model reads at most 128; .*response_length"),
    "a long prompt to evaluate": ({"eval_dataset": [{"prompt": "1" * 126}]}, r"eval_dataset\[0\], prompt '111"),
    "several data sets": ({"train_dataset": DatasetDict(train=Dataset.from_list(QUESTIONS))}, r"expected one data set, got a DatasetDict with train; pass one of them, such as dataset\['train'\]"),
    "a stream": ({"train_dataset": IterableDataset.from_generator(lambda: iter(QUESTIONS))}, "got a IterableDataset; load it without streaming"),
    "an id that the model lacks": (lambda m, t: {"train_dataset": [{"input_ids": [3]}] * 15 + [{"input_ids": [3, len(t)]}]}, r"^train_dataset\[15\], prompt .*: token id \d+ is outside the model's vocabulary"),
    **{f"a column {name}": ({"train_dataset": [{"prompt": "1+1=", name: "x"}] * 16}, f"train_dataset: the column '{name}' has the name of what a reward function") for name in ("prompts", "completions", "completion_ids")},
    "no reward": ({"reward_funcs": None}, "a source of reward is missing"),
    "a name of a reward": ({"reward_funcs": "accuracy"}, "reward_funcs: expected functions, got 'accuracy'; models go to"),
    "a reward model as a function": (lambda m, t: {"reward_funcs": [classifier(t)]}, "models go to reward_model"),
    "a function as a reward model": ({"reward_model": count_a}, "reward_model: expected a loaded model, got <function.*; pass a function as reward_funcs"),
    "one weight": (weighed([1]), r"reward_weights: expected 2 numbers, one per source \(one, <lambda>\), got 1"),
    "a weight of nan": (weighed([1, math.nan]), r"reward_weights: expected 2 numbers.* got \[1, nan\]"),
    "a number for weights": (weighed(0.5), r"reward_weights: expected 2 numbers, one per source .one, <lambda>., got 0\.5"),
    "weights of nothing": (weighed([0, 0.0]), "reward_weights: all are 0, so no completion would earn anything"),
    "minibatches": ({"num_mini_batches": 3}, "num_mini_batches=3 does not divide the batch of 16"),
    "three completions": ({"num_generations": 3}, "num_generations=3 does not divide the batch of 16 completions .per_device_train_batch_size 8 x gradient_accumulation_steps 2.; change one of them"),
    "no completions": ({"num_generations": 0}, "num_generations: expected a whole number of at least 1, got 0"),
    "a name of a sampler": ({"sampler": "vllm"}, r"sampler: expected an object with the methods of trl_ext\.Sampler, got 'vllm'"),
    "a negative warmup": ({"critic_warmup": -1}, "critic_warmup: expected a whole number of at least 0, got -1"),
    "nothing but warmup": ({"critic_warmup": 2}, "critic_warmup: only the critic would learn in all 2 updates; lower it"),
    **{f"{name} without a critic": ({name: value, "critic": "none"}, f"{name}: critic='none' has nothing to learn") for name, value in {"critic_warmup": 2, "lam_alpha": 0.5, "lam_critic": 1.0, "critic_updates": 2}.items()},
    "a head has no attention": ({"critic_freeze": "attention"}, "critic 'head' has none; use critic: model, adapter or central"),
    "an adapter of attention alone": (lambda m, t: {"model": with_lora(m), "critic": "adapter", "critic_freeze": "attention"}, "nothing but the head to learn; name MLP modules in the adapter's target_mod"),
    "a name of a model": ({"model": "org/model"}, "model: expected a loaded model, got 'org/model'; load it with AutoModelForC"),
    "a name of a reference": ({"ref_model": "org/model"}, "ref_model: expected a loaded model, got 'org/model'; load it"),
    "a name of a critic": ({"value_model": "org/model"}, "value_model: expected a loaded model, got 'org/model'; load it"),
    "a classifier samples nothing": (lambda m, t: {"model": classifier(t)}, "model: LlamaForSequenceClassification has no output head, so it samples no tokens"),
    "two values for a token": (lambda m, t: {"value_model": two_labels(t)}, "value_model has 2 outputs for each token, and the critic needs 1; load it with n"),
    "arguments of transformers": (lambda m, t: {"args": TrainingArguments(output_dir="unused")}, r"args: expected a PPOv2Config, got a TrainingArguments; see docs/howto/from_grpo\.md"),
    "an encoder as a critic": (lambda m, t: {"value_model": BertForSequenceClassification(BERT)}, "value_model: BertForSequenceClassification sees the tokens that follow.*load a decoder"),
    "an encoder as a policy": (lambda m, t: {"model": BertLMHeadModel(BERT)}, "model: BertLMHeadModel sees the tokens that follow.*is_decoder=True"),
    "a head that is not read": (lambda m, t: {"value_model": CTRLForSequenceClassification(CTRL)}, "value_model: CTRLForSequenceClassification has a head of another name than 'score'"),
    "logits of routers": (lambda m, t: {"model": routed()}, r"model: config.output_router_logits is True.*set it to False"),
    "a model that sees": (lambda m, t: {"model": seeing(t)}, "model: Gemma3ForConditionalGeneration has a vision part, which nothing trains"),
    "a processor": (lambda m, t: {"processing_class": Processor(t)}, "processing_class: expected a tokenizer, got the processor Processor"),
    "a policy as its own reference": (lambda m, t: {"ref_model": m}, "model and ref_model have the same weights; load"),
    "a reward model that learns": (lambda m, t: dict.fromkeys(("reward_model", "value_model"), classifier(t)), "reward_model and value_model have the same weights; load each model of its own"),
    **{f"a compiled {part}": (lambda m, t, part=part: {part: torch.compile(copy.deepcopy(m))}, f"{part}: expected a model that is not compiled.*pass the model itself") for part in ("model", "ref_model", "value_model", "reward_model")},
    "an optimizer with modes": (lambda m, t: {"optimizers": (Averaged(m.parameters(), lr=0.1), None)}, r"Averaged has modes \(train\(\) and eval\(\)\), between which its weights are"),
    "options for an adapter": ({"peft_config": {"r": 4}}, r"peft_config: expected a peft\.PeftConfig, as peft\.LoraConfig, got dict"),
    "an adapter on an adapter": (lambda m, t: {"model": with_lora(m), "peft_config": LoraConfig(**LORA)}, "the model is a PeftModel already; leave it out, or pass"),
    "a gradient of no adapter": (lambda m, t: {"model": with_lora(m, change=lambda m: m.get_base_model().lm_head.weight.requires_grad_(True))}, r"1 parameters require gradients and belong to no adapter.*lm_head\.weight.*modules_to_save"),
    "an adapter of some tokens": (lambda m, t: {"model": with_lora(m, alora_invocation_tokens=[3])}, r"alora_invocation_tokens=...\) works only through PEFT's own forward"),
    "a merged adapter": (lambda m, t: {"model": with_lora(m, change=lambda m: m.merge_adapter())}, r"model: an adapter is merged into its base; call unmerge_adapter\(\) first"),
    "two active adapters": (lambda m, t: {"model": with_lora(m, "style", change=lambda m: m.base_model.set_adapter(["default", "style"]))}, "several adapters are active, 'default', 'style', and one is trained; name it"),
    "an adapter that saves too little": (lambda m, t: {"model": get_peft_model(m, VBLoRAConfig(save_only_topk_weights=True, num_vectors=8, vector_length=4, **LORA))}, "saves too little for a checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_by_its_name(tiny, tmp_path, case):
    given, message = REFUSED[case]
    model, tokenizer = tiny()
    given = {"train_dataset": QUESTIONS, "reward_funcs": count_a} | (
        given(model, tokenizer) if callable(given) else given
    )
    parts = {name: given.pop(name) for name in PARTS & given.keys()}
    with pytest.raises(ValueError, match=message):
        PPOv2Trainer(**{"args": config(tmp_path, **given), "processing_class": tokenizer, "model": model} | parts)


OPTIONS = [
    ({"optim": "schedule_free_adamw"}, "optim: schedule_free_adamw cannot be used here, because its weights are averages"),
    ({"optim": "galore_adamw"}, "optim: galore_adamw cannot be used here, because it replaces layers' hooks"),
    ({"optim": "lomo"}, "optim: lomo cannot be used here, because it steps weights within the backward pass"),
    ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1}, "steps by a metric; use one that steps by updates"),
    ({"logging_strategy": "epoch"}, r"logging_strategy: expected 'steps' \(counted in updates\) or 'no', got 'epoch'"),
    ({"save_strategy": "epoch"}, r"save_strategy: expected 'steps' \(updates\) or 'no', got 'epoch'"),
    ({"fp16": True}, "fp16: loss scaling is not supported"),
    *(({name: 1}, f"unexpected keyword argument '{name}'") for name in ("generation_kwargs", "repetition_penalty", "min_new_tokens", "num_beams", "min_p")),
]  # fmt: skip


@pytest.mark.parametrize("options, message", OPTIONS)
def test_options_that_nothing_would_follow_are_refused_with_their_reason(tmp_path, options, message):
    with pytest.raises(TypeError if "keyword" in message else ValueError, match=message):
        PPOv2Config(output_dir=str(tmp_path), report_to=[], use_cpu=True, **options)


@pytest.mark.parametrize("name, instead", [("num_generations", "branching"), ("critic_warmup", "schedule")])
def test_a_team_says_what_it_has_instead(tmp_path, name, instead):
    with pytest.raises(ValueError, match=f"{name}: is for PPOv2Trainer; a team has {instead}="):
        MultiAgentPPOConfig(output_dir=str(tmp_path), report_to=[], **{name: 4})
