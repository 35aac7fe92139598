"""Play the teams of a cross-play, and write the result to the folders of the runs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm.auto import tqdm
from transformers import set_seed

from maporl.crossplay.entrants import Entrant, seats_of, shared_questions
from maporl.crossplay.pool import AgentPool
from maporl.errors import RunError
from maporl.evaluation.crossplay import CrossPlay, CrossTeam, Right, final_right, seatings
from maporl.report.read import CROSSPLAY
from maporl.rewards.base import RewardSource
from maporl.runs.build import find_device
from maporl.tasks import Task
from trl_ext.files.atomic import replace_file
from trl_ext.process import distributed


def play_crossplay(entrants: Sequence[Entrant], most: int, quiet: bool = False) -> CrossPlay:
    """Evaluate the teams that :func:`maporl.evaluation.crossplay.seatings` names.

    All teams answer the same questions, with the same seed and at the same temperature. An agent keeps its model, its
    tokenizer, its chat template, its system prompt and its call format. Agents with weights answer by the
    ``transformers`` engine.

    Args:
        entrants: the runs, as :func:`read_entrants` returns them.
        most: the number of teams up to which all of them are played.
        quiet: whether to hide the progress bar.

    Raises:
        ConfigError: no question is left that no run was trained on.
        RunError: no question's answers can be graded.
    """
    config, seats = entrants[0].config, seats_of(entrants)
    task, numbers, left_out = shared_questions(entrants)
    set_seed(config.seed)
    pool = AgentPool(entrants, find_device(config))
    casts = {runs: dict.fromkeys(config.agents, 0) | dict(zip(seats, runs, strict=True))
             for runs in seatings(len(entrants), len(seats), most)}  # fmt: skip
    waiting = list(casts)
    teams, sources = [], None
    with tqdm(casts.items(), desc="teams", disable=quiet, leave=False, dynamic_ncols=True) as bar:
        for runs, cast in bar:
            right, sources = _play_team(pool, cast, sources, task, numbers)
            teams.append(CrossTeam(runs, right))
            waiting.remove(runs)
            pool.keep([casts[later] for later in waiting])
    names = tuple(entrant.name for entrant in entrants)
    try:
        return CrossPlay(names, seats, tuple(teams), config.evaluation.temperature, config.seed, left_out)
    except ValueError as error:
        raise RunError(f"cross-play of {', '.join(names)}: {error}") from None


def _play_team(
    pool: AgentPool,
    cast: Mapping[str, int],
    sources: Mapping[str, RewardSource] | None,
    task: Task,
    numbers: Sequence[int],
) -> tuple[Right, Mapping[str, RewardSource]]:
    """Return a team's results, and the reward sources, which the next team can use again."""
    config = pool.entrants[0].config
    player = pool.player(cast, sources)
    dialogues = player.play_evaluation(task, numbers, config.evaluation.decoding, config.seed)
    shares = distributed.all_gather([final_right(dialogue) for dialogue in dialogues])
    return tuple(share for part in shares for share in part), player.scorer.sources


def write_crossplay(play: CrossPlay, entrants: Sequence[Entrant], output: Path | None) -> list[Path]:
    """Write the result to ``output``, by default to the folder of every run that is not a download.

    A run's report shows the result that lies in the run's folder. An earlier result is replaced.

    Returns:
        The files.
    """
    if not distributed.is_main():
        return []
    files = []
    for folder in [output] if output is not None else [entrant.folder for entrant in entrants if entrant.local]:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / CROSSPLAY, json.dumps(play.to_json(), indent=1))
        files.append(folder / CROSSPLAY)
    return files
