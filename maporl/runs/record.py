"""Record dialogues of a team with its tasks, graded and scored, without training. ``maporl record`` calls this.

So a team of models behind an API, or a program of the user's own, becomes what ``maporl sft`` learns from.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path

from maporl.config.schema import Config
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player
from maporl.runs.play import claim
from maporl.storage.run_folder import RunFolder
from maporl.types import Dialogue
from trl_ext.files.lock import RunLock

TOGETHER = 16
"""The questions that are played at the same time. What was recorded of others is safe if one of them fails."""


def record(
    config: Config, output: Path, questions: int, samples: int = 1, checkpoint: Path | None = None
) -> Iterator[list[Dialogue]]:
    """Play ``samples`` dialogues on each of the next ``questions`` questions of the training split, and record them.

    Yield the dialogues of some questions when they are graded, scored, credited and written to
    ``output/dialogues.jsonl``. A folder that has some already gets those of the next questions; after the last question
    of the split comes the first one again, which a warning says beforehand. Answers are sampled as in training.

    Args:
        config: the configuration.
        output: the folder of the record.
        questions: the number of questions.
        samples: the number of dialogues on each of them.
        checkpoint: a folder with weights of the team, or None for untrained ones.

    Raises:
        ConfigError: ``output`` holds something else.
        FolderInUse: another process adds dialogues to the same folder.
        CheckpointError: ``checkpoint`` lacks a policy.
        RewardFailure: a source of rewards failed.
    """
    run = ResolvedRun(config)
    claim(output, config)
    player, folder = loaded_player(run, checkpoint), RunFolder(output)
    player.inform_engines()
    with RunLock(output):
        first = 1 + max((entry["step"] for entry in folder.read_dialogues()), default=0)
        folder.rewind(first)  # drops a line that a crash has cut off
        size = len(run.task)
        if (again := first - 1 + questions - max(size, first - 1)) > 0:
            what = f"{again} of these {questions} questions are played again, because the split has {size}"
            warnings.warn(f"record: {what}; --samples plays each question several times at once", stacklevel=2)
        for begin in range(first, first + questions, TOGETHER):
            numbers = range(begin, min(begin + TOGETHER, first + questions))
            examples = [run.task[(number - 1) % size] for number in numbers]
            driver = player.driver(
                run.task,
                config.ppo.decoding,
                specs=player.specs(training=True),
                rng_key=(config.seed, "record"),
                numbers=list(numbers),
            )
            dialogues = driver.play(examples, samples)
            try:
                player.scorer.credit(dialogues, run.task)
            finally:
                player.world.drop_scored(dialogues)
            for number in numbers:
                folder.add_dialogues(number, [dialogue for dialogue in dialogues if dialogue.prompt == number])
            yield dialogues
