"""A person at the table: any agent's seat, in any protocol; what is played is graded, scored and recorded like any other."""

from collections.abc import Callable, Iterator
from pathlib import Path

from maporl.config import parse_config, read_yaml, to_yaml, unknown
from maporl.config.schema import Config
from maporl.engines.human import HumanEngine
from maporl.errors import ConfigError
from maporl.evaluation.metrics import majority_credit
from maporl.protocols import speakers, turns_of
from maporl.report.dialogues import game_of, outcome_of
from maporl.runs.build import build_player
from maporl.storage.run_folder import RunFolder
from maporl.tasks import build_task
from maporl.text import visible
from maporl.types import Dialogue, Example


class Game:
    """The team of ``config`` with a person in the seat of ``person``; what is played is added to the run folder ``output``.

    ``show`` tells the person something, ``read`` waits for their answer.

    Raises:
        ConfigError: nobody of that name has a seat, or ``output`` holds something else.
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
        seats = speakers(config.protocol, tuple(config.agents))
        self.person = person or seats[0]
        if self.person not in seats:
            raise ConfigError(f"--as: {unknown(self.person, seats)}")
        self.output, self.show = output, show
        self._claim(config)
        self.player = build_player(config, checkpoint)
        self.player.sit_down(self.person, HumanEngine(show, read))
        self.config = config
        split = "eval" if config.evaluation.questions else "train"
        self.task = build_task(config.task, split, config.seed)

    def play(self, questions: int) -> Iterator[Dialogue]:
        """One dialogue after the other, each recorded as soon as it has ended."""
        folder = RunFolder(self.output)
        first = 1 + max((record["step"] for record in folder.read_dialogues()), default=0)
        folder.rewind(first)  # drops nothing but a line that a crash has cut off
        for number in range(questions):
            example = self.task[(first - 1 + number) % len(self.task)]
            dialogue = self._one(example)
            folder.add_dialogues(first + number, [dialogue])
            yield dialogue

    def _one(self, example: Example) -> Dialogue:
        [dialogue] = self.player.play([example], self.task, self.config.evaluation.temperature)
        self.player.scorer.credit([dialogue], self.task)
        for utterance in dialogue.utterances:
            if utterance.agent == self.person:
                utterance.tags["person"] = True
        return dialogue

    def _claim(self, config: Config) -> None:
        """Make ``output`` a run folder of this configuration, or see that it is."""
        file, text = self.output / "config.yaml", to_yaml(config)
        if (self.output / "metrics.jsonl").exists():
            raise ConfigError(f"{self.output}: holds a training run, which is left as it is; give another --output")
        if not file.exists():
            if self.output.exists() and any(self.output.iterdir()):
                raise ConfigError(f"{self.output}: is not empty and holds no played dialogues; give another --output")
            self.output.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        elif parse_config(read_yaml(file), str(file)) != config:
            raise ConfigError(f"{self.output}: was played with another configuration; give another --output")


def welcome(game: Game, config: Config) -> str:
    """What a person is told who takes a seat."""
    others = [name for name in config.agents if name != game.person]
    turns = f" of {turns_of(config)} turns" if turns_of(config) > 1 else ""
    return (
        f"You are {game.person}, beside {', '.join(others) or 'nobody'}: {config.protocol.get('name', 'debate')}{turns} on "
        f"{config.task['name']}.\nYou read what the model in your seat would read; what others said is in it. Enter sends your answer, Ctrl-D "
        "leaves."
    )


def told(dialogue: Dialogue) -> str:
    """How a dialogue ended, for the person who was in it."""
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
                lines.append(f"  turn {turn + 1}, {u.agent}: {answer}: {words[u.grade.correct]}")
    grades = [u.grade for u in dialogue.at(dialogue.turns() - 1) if u.grade is not None and u.grade.correct is not None]
    if len(grades) > 1 and not game:
        lines.append(
            f"  the vote: {'right' if (credit := majority_credit(grades)) == 1 else 'tied' if credit else 'wrong'}"
        )
    return "\n".join(lines)
