"""Play what an evaluation needs beside its dialogues: a suite of benchmarks, and baselines without dialogue."""

from collections.abc import Mapping

import torch
from tqdm.auto import tqdm

from maporl.evaluation.metrics import Evaluation, Share, majority_credit
from maporl.evaluation.suite import SuiteResult, summarise
from maporl.protocols.debate import Debate
from maporl.rollout.player import Player
from maporl.tasks.base import Task
from maporl.text import printable
from maporl.types import Dialogue, Grade
from trl_ext.ppo.options import Decoding
from trl_ext.process.random_states import forked_rng

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


def play_baselines(
    player: Player, task: Task, evaluation: Evaluation, decoding: Decoding, seed: int
) -> dict[str, Share]:
    """Let each agent answer the questions of ``evaluation`` alone: once, and by a majority vote over several samples.

    ``decoding`` samples the single answer. The samples of the vote are drawn as in training. Each round
    samples one answer to every question. Rounds go on until they have sampled as many tokens as the dialogues of
    ``evaluation``.

    Returns:
        The share of right answers of each baseline, by its name. It is empty where the protocol brings its own
        questions, as a game does, because nobody could answer them alone.
    """
    if player.protocol.own_questions:
        return {}
    examples = [task[i] for i in range(evaluation.questions)]
    alone = Debate(turns=1, opening=player.protocol.opening)
    baselines: dict[str, Share] = {}

    def round_of(agent: str, decoding: Decoding, training: bool = False) -> tuple[list[Grade], int]:
        specs = {agent: player.specs(training=training)[agent]}
        driver = player.driver(task, decoding, protocol=alone, specs=specs, scores=False)
        played = driver.play(examples)
        answers = [d.utterances[0] for d in played]
        grades = task.grade_many([d.example for d in played], [u.text for u in answers])
        return grades, sum(len(u.response_ids) for u in answers)

    for agent in (name for name in player.speakers if name in player.team.policies_of):
        with forked_rng():
            torch.manual_seed(seed)
            single, _ = round_of(agent, decoding)
            baselines[f"{agent} alone"] = Share(sum(bool(g.correct) for g in single), len(single))
            rounds, sampled = [], 0
            while sampled < evaluation.tokens:
                grades, tokens = round_of(agent, player.options.decoding, training=True)
                rounds.append(grades)
                sampled += tokens
        votes = sum(majority_credit(grades) for grades in zip(*rounds, strict=True))
        baselines[f"majority of {len(rounds)} by {agent}"] = Share(votes, len(examples))
    return baselines
