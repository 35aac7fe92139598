"""Arguments of :class:`maporl.MultiAgentPPOTrainer`."""

import dataclasses
from dataclasses import dataclass

from maporl.config import Config
from trl_ext.ppo_options import option
from trl_ext.ppov2_config import PPOv2Config


@dataclass
class MultiAgentPPOConfig(PPOv2Config):
    """:class:`trl_ext.PPOv2Config` for a team; an *episode* is one dialogue.

    One update plays ``per_device_train_batch_size * gradient_accumulation_steps`` dialogues; a policy then learns from
    every utterance it spoke in them, ``per_device_train_batch_size`` rows at a time.
    """

    critic_per_turn: bool = option(True, "One output of the critic's head for each turn.")
    eval_questions: int = option(256, "Questions of the evaluation split that evaluate() plays.")
    eval_temperature: float = option(0.0, "Temperature of evaluation; 0 is greedy.")
    dialogues_logged: int = option(4, "Dialogues of each update that are written to dialogues.jsonl.")

    @classmethod
    def from_config(cls, config: Config) -> "MultiAgentPPOConfig":
        """The trainer's arguments of a YAML configuration."""
        training = dataclasses.asdict(config.training)
        save, evaluate = training.pop("save_steps"), training.pop("eval_steps")
        ppo = dataclasses.asdict(config.ppo) | {"total_episodes": config.updates * config.questions_per_update()}
        return cls(
            output_dir=config.output_dir,
            seed=config.seed,
            eval_questions=config.evaluation.questions,
            eval_temperature=config.evaluation.temperature,
            dialogues_logged=config.dialogues_logged,
            save_strategy="steps" if save else "no",
            save_steps=save or 500,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=evaluate or None,
            **training,
            **ppo,
        )
