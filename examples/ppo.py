"""PPO with a reward model, for users of TRL: what TRL's own example ``ppo.py`` did before TRL removed its trainer.

Every option of the data set, of PPO and of the model is an option on the command line (``--help``):

    python examples/ppo.py --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style \\
        --dataset_train_split descriptiveness --output_dir runs/descriptive --per_device_train_batch_size 64 \\
        --total_episodes 10000 --model_name_or_path EleutherAI/pythia-1b-deduped \\
        --sft_model_path EleutherAI/pythia-1b-deduped --reward_model_path EleutherAI/pythia-1b-deduped \\
        --missing_eos_penalty 1.0

The data set has a column ``prompt``. Its last 100 rows, or its last fifth if it is small, are for evaluation.
"""

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from trl_ext import PPOv2Config, PPOv2Trainer


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

    rows = load_dataset(script.dataset_name, name=script.dataset_config, split=script.dataset_train_split)
    held_out = min(100, len(rows) // 5)
    rows = rows.map(
        lambda batch: {"input_ids": tokenizer(batch["prompt"])["input_ids"]},
        batched=True,
        remove_columns=rows.column_names,
        num_proc=training.dataset_num_proc,
    )
    trainer = PPOv2Trainer(
        args=training,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,  # the trainer copies the policy, or reads it with its adapters off
        reward_model=reward,
        value_model=value,
        train_dataset=rows.select(range(len(rows) - held_out)),
        eval_dataset=rows.select(range(len(rows) - held_out, len(rows))),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.generate_completions()


if __name__ == "__main__":
    main()
