"""Arguments of :class:`maporl.MultiAgentPPOTrainer`."""

import dataclasses
import os
from dataclasses import dataclass
from typing import Literal

from maporl.config.schema import Config
from trl_ext.ppo_options import option
from trl_ext.ppov2_config import PPOv2Config


@dataclass
class MultiAgentPPOConfig(PPOv2Config):
    """:class:`trl_ext.PPOv2Config` for a team; an *episode* is one dialogue.

    One update plays ``per_device_train_batch_size * gradient_accumulation_steps`` dialogues; a policy then learns from
    every utterance it spoke in them, ``per_device_train_batch_size`` rows at a time.
    """

    critic_per_turn: bool = option(True, "One output of the critic's head for each turn.")
    critic_context: Literal["dialogue", "answer", "joint"] = option(
        "dialogue",
        "What the critic reads before an answer: all that its agent saw, the question alone, or the question and all "
        "agents' words so far.",
    )
    restate: Literal["off", "base_model"] = option(
        "off", "Ask the untrained model for the final answer where grading finds none; only grading and others read it."
    )
    async_depth: Literal[0, 1] = option(
        0, "1: play the dialogues of the next update while this one is learned from; with engines elsewhere (vllm)."
    )
    placement: Literal["shared", "split"] = option(
        "shared",
        "All learners on this process's device, or each base model, with its adapters, on a device of its own.",
    )
    eval_questions: int = option(256, "Questions of the evaluation split that evaluate() plays.")
    eval_temperature: float = option(0.0, "Temperature of evaluation; 0 is greedy.")
    dialogues_logged: int = option(4, "Dialogues of each update that are written to dialogues.jsonl.")

    @classmethod
    def from_config(cls, config: Config) -> "MultiAgentPPOConfig":
        """The trainer's arguments of a YAML configuration."""
        training = dataclasses.asdict(config.training)
        save, evaluate = training.pop("save_steps"), training.pop("eval_steps")
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # each has a batch of its own; `updates` stay as many
        episodes = config.updates * config.questions_per_update() * processes
        ppo = dataclasses.asdict(config.ppo) | {"total_episodes": episodes}
        return cls(
            output_dir=config.output_dir,
            seed=config.seed,
            eval_questions=config.evaluation.questions,
            eval_temperature=config.evaluation.temperature,
            dialogues_logged=config.dialogues_logged,
            restate=config.restate,
            save_strategy="steps" if save else "no",
            save_steps=save or 500,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=evaluate or None,
            **training,
            **ppo,
        )
