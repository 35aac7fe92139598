"""Let a person play in place of any agent, in any protocol. The dialogues are graded, scored and recorded."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from maporl.config import parse_config, read_yaml, to_yaml, unknown
from maporl.config.schema import Config
from maporl.engines.human import HumanEngine
from maporl.errors import ConfigError
from maporl.evaluation.metrics import majority_credit
from maporl.report.dialogues import game_of, outcome_of
from maporl.run import ResolvedRun
from maporl.runs.build import loaded_player
from maporl.storage.run_folder import RunFolder
from maporl.text import visible
from maporl.types import Dialogue, Example
from trl_ext.files.atomic import replace_file
from trl_ext.files.lock import RunLock, holds_something


class Game:
    """The team of a configuration, with a person in place of one agent.

    Args:
        config: the configuration.
        person: the agent that the person replaces. By default it is the first speaker.
        checkpoint: a folder with the weights of the other agents.
        output: the run folder to which the dialogues are added.
        show: shows the person a line.
        read: shows a prompt and waits for the person's answer.

    Raises:
        ConfigError: ``person`` does not play, or ``output`` holds something else.
        CheckpointError: ``checkpoint`` lacks a policy.
    """

    def __init__(
        self,
        config: Config,
        person: str | None,
        checkpoint: Path | None,
        output: Path,
        show: Callable[[str], None],
        read: Callable[[str], str],
    ):
        self.run = ResolvedRun(config)
        players = self.run.speakers
        self.person = person or players[0]
        if self.person not in players:
            raise ConfigError(f"--as: {unknown(self.person, players)}")
        self.output, self.show = output, show
        claim(output, config)
        self.player = loaded_player(self.run, checkpoint)
        self.player.use_engine(self.person, HumanEngine(show, read))
        self.config = config
        self.task = self.run.held_out or self.run.task

    def play(self, questions: int) -> Iterator[Dialogue]:
        """Play one dialogue on each of ``questions`` questions. Each is recorded as soon as it has ended.

        Raises:
            FolderInUse: another process adds dialogues to the same folder.
        """
        folder = RunFolder(self.output)
        with RunLock(self.output):
            first = 1 + max((record["step"] for record in folder.read_dialogues()), default=0)
            folder.rewind(first)  # drops a line that a crash has cut off, and keeps everything else
            for number in range(questions):
                example = self.task[(first - 1 + number) % len(self.task)]
                dialogue = self._play_one(example)
                folder.add_dialogues(first + number, [dialogue])
                yield dialogue

    def _play_one(self, example: Example) -> Dialogue:
        [dialogue] = self.player.play([example], self.task, self.config.evaluation.decoding)
        try:
            self.player.scorer.credit([dialogue], self.task)
        finally:
            self.player.world.drop_scored([dialogue])
        for utterance in dialogue.utterances:
            if utterance.agent == self.person:
                utterance.tags["person"] = True
        return dialogue


def claim(output: Path, config: Config) -> None:
    """Make ``output`` a run folder of played dialogues of this configuration, or check that it is one.

    Raises:
        ConfigError: it holds something else, or what was played with another configuration.
    """
    file, text = output / "config.yaml", to_yaml(config)
    if (output / "metrics.jsonl").exists():
        raise ConfigError(f"{output}: holds a training run, which is left as it is; give another --output")
    if not file.exists():
        if holds_something(output):
            raise ConfigError(f"{output}: is not empty and holds no played dialogues; give another --output")
        output.mkdir(parents=True, exist_ok=True)
        replace_file(file, text)
    elif replace(parse_config(read_yaml(file), str(file)), pythonpath=config.pythonpath) != config:
        raise ConfigError(f"{output}: was played with another configuration; give another --output")


def welcome(game: Game, config: Config) -> str:
    """Return the text that greets a person who joins the team."""
    others = [name for name in config.agents if name != game.person]
    number = game.run.protocol.turns
    turns = f" of {number} turns" if number > 1 else ""
    return (
        f"You are {game.person}, beside {', '.join(others) or 'nobody'}: {config.protocol['name']}{turns} on "
        f"{config.task['name']}.\nYou read what the model in your place would read, with the others' answers. Enter "
        "sends your answer, Ctrl-D leaves."
    )


def told(dialogue: Dialogue) -> str:
    """Return the text that tells the person how a dialogue ended."""
    game, outcome = game_of(dialogue) is not None, outcome_of(dialogue)
    label = dialogue.example.answer
    lines = [
        f"It is over: {outcome}." if outcome else f"The right answer is {visible(label)}." if label else "It is over."
    ]
    words = {True: "won" if game else "right", False: "did not win" if game else "wrong", None: "not graded"}
    for turn in range(dialogue.turns()):
        for u in dialogue.at(turn):
            if u.grade is not None:
                answer = "nothing that could be read" if u.grade.answer is None else visible(u.grade.answer)
                reason = f" ({visible(u.grade.reason)})" if u.grade.reason and not game else ""
                lines.append(f"  turn {turn + 1}, {visible(u.agent)}: {answer}: {words[u.grade.correct]}{reason}")
    grades = [u.grade for u in dialogue.at(dialogue.turns() - 1) if u.grade is not None and u.grade.correct is not None]
    if len(grades) > 1 and not game:
        lines.append(
            f"  the vote: {'right' if (credit := majority_credit(grades)) == 1 else 'tied' if credit else 'wrong'}"
        )
    return "\n".join(lines)
