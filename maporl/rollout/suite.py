"""Play a suite of benchmarks."""

from collections.abc import Mapping

import torch
from tqdm.auto import tqdm

from maporl.evaluation.suite import SuiteResult, summarise
from maporl.rollout.player import Player
from maporl.tasks.base import Task
from maporl.text import printable
from maporl.types import Dialogue
from trl_ext.ppo.options import Decoding

CHUNK = 32
"""The number of questions that are played at a time."""


def play_suite(
    player: Player, tasks: Mapping[str, Task], samples: int, decoding: Decoding, seed: int
) -> list[SuiteResult]:
    """Play ``samples`` dialogues on each question of each task, and return each task's measurements.

    ``decoding`` says how answers are sampled. ``seed`` sets torch's random state before each task.
    """
    results = []
    for name, task in tasks.items():
        dialogues: list[Dialogue] = []
        torch.manual_seed(seed)
        with tqdm(range(0, len(task), CHUNK), desc=printable(name), leave=False, dynamic_ncols=True) as bar:
            for start in bar:
                examples = [task[i] for i in range(start, min(start + CHUNK, len(task)))]
                played = player.play(examples, task, decoding, samples)
                player.scorer.grade(played, task)
                for dialogue in played:
                    dialogue.prompt += start
                dialogues += played
        results.append(summarise(name, dialogues, samples))
    return results
