"""A configuration of a team that debates, and its task."""

from maporl import Arithmetic, Debate, MultiAgentPPOConfig

TASK = Arithmetic(largest=9)


DEBATE = Debate(turns=2, later="{others};{question}", quote="{text}", separator=";")


def config(folder, **options):
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "total_episodes": 16,
        "response_length": 4, "learning_rate": 1e-3, "temperature": 1.0, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "use_cpu": True, "eval_questions": 8,
    }  # fmt: skip
    return MultiAgentPPOConfig(**{**defaults, **options})
