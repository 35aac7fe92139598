"""PPO for summaries (TL;DR) with a reward model: what TRL's own example ``ppo_tldr.py`` did.

    python examples/ppo_tldr.py --dataset_name trl-lib/tldr --dataset_test_split validation --output_dir runs/tldr \\
        --per_device_train_batch_size 1 --gradient_accumulation_steps 64 --total_episodes 30000 \\
        --model_name_or_path EleutherAI/pythia-1b-deduped \\
        --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \\
        --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \\
        --missing_eos_penalty 1.0 --stop_token eos --response_length 53 --eval_strategy steps --eval_steps 100

The data set has a column ``prompt``. Prompts of more than 512 tokens are left out.
"""

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from trl_ext import PPOv2Config, PPOv2Trainer


def tokenised(rows: Dataset, tokenizer, processes: int | None) -> Dataset:
    """Return the rows' prompts as token ids, without prompts of more than 512 tokens."""
    rows = rows.map(
        lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]},
        remove_columns=rows.column_names,
        num_proc=processes,
    )
    return rows.filter(lambda row: len(row["input_ids"]) <= 512, num_proc=processes)


def main() -> None:
    """Train the policy that the command line names, save it, and show what it answers."""
    parser = HfArgumentParser((ScriptArguments, PPOv2Config, ModelConfig))
    script, training, model = parser.parse_args_into_dataclasses()
    options = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    if (quantization := get_quantization_config(model)) is not None:
        options["quantization_config"] = quantization
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # the models need no embedding for it
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(training.reward_model_path, num_labels=1, **options)
        for _ in range(2)
    )
    policy = AutoModelForCausalLM.from_pretrained(training.sft_model_path, **options)

    rows = load_dataset(script.dataset_name, name=script.dataset_config)
    train = tokenised(rows[script.dataset_train_split], tokenizer, training.dataset_num_proc)
    held_out = None
    if training.eval_strategy != "no":
        held_out = tokenised(rows[script.dataset_test_split], tokenizer, training.dataset_num_proc)
    trainer = PPOv2Trainer(
        args=training,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,  # the trainer copies the policy, or reads it with its adapters off
        reward_model=reward,
        value_model=value,
        train_dataset=train,
        eval_dataset=held_out,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.generate_completions()


if __name__ == "__main__":
    main()
