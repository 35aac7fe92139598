"""What a notebook gives to the trainer."""

from maporl import Arithmetic, Debate, MultiAgentPPOConfig, RewardSection

TASK, HELD_OUT = Arithmetic(largest=9), Arithmetic(largest=9, split="eval")


DEBATE = Debate(turns=2, later="{others};{question}", quote="{text}", separator=";")


ALPHABET = "0123456789+=;"


READABLE = RewardSection(sources={"format": 1.0}, horizon="current", share="individual")


"""A reward that random models earn now and then."""


def args(folder, updates=2, **options):
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "total_episodes": 4 * updates, "response_length": 3,
        "learning_rate": 1e-2, "temperature": 1.0, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
        "eval_questions": 4, "num_ppo_epochs": 1, "seed": 3,
    }  # fmt: skip
    return MultiAgentPPOConfig(**{**defaults, **options})


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def config(folder, **options):
    """Arguments of two updates by a team that debates."""
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "total_episodes": 16,
        "response_length": 4, "learning_rate": 1e-3, "temperature": 1.0, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "eval_questions": 8,
    }  # fmt: skip
    return MultiAgentPPOConfig(**{**defaults, **options})
