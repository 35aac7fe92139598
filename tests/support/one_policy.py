"""A trainer of one policy: questions, options, and a reward that counts a letter."""

from trl_ext import PPOv2Config

QUESTIONS = [{"prompt": f"{i}+1=", "number": i} for i in range(16)]


def count_a(prompts, completions, **columns):
    return [text.count("a") / 4 for text in completions]


def config(folder, **options):
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "total_episodes": 32,
        "response_length": 6, "learning_rate": 1e-3, "temperature": 0.9, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "seed": 3,
    }  # fmt: skip
    return PPOv2Config(**{**defaults, **options})
