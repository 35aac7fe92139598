"""Forum: random speakers propose solutions, criticise them and score them (CoMAS, arXiv 2510.08529)."""

import random
from dataclasses import dataclass
from statistics import fmean

from maporl.protocols.base import Play, Protocol
from maporl.rewards.rules import Credits, Rule
from maporl.rounding import difference
from maporl.text import check_pattern, matches, text_option
from maporl.types import Ask, Dialogue, Example, Utterance
from trl_ext.ppo.options import Positive, option

SOLVE = "{question}\n\n{history}Give your solution."
EVALUATE = "{question}\n\n{history}A solution:\n{solution}\n\nFind what is wrong with it."
SCORE = (
    "{question}\n\nA solution:\n{solution}\n\nAn evaluation of it:\n{evaluation}\n\nScore the solution: 3 if it is "
    "right, 2 if the evaluation finds small faults, 1 if it is wrong. End with <score>NUMBER</score>."
)


@dataclass(frozen=True)
class Forum(Protocol):
    """A forum of ``rounds`` rounds. In each round a random agent solves, and then ``evaluations`` pairs evaluate and
    score. Whenever a question is asked again, others are drawn.

    A score t is 1, 2 or 3. The solver earns (t - 1) / 2 and the evaluator (3 - t) / 2, under the reward name ``peer``.
    The scorer earns 0. If no score can be read, the scorer earns -1 and the others earn nothing for this evaluation.
    Several evaluations of a solution are averaged; the paper has one.

    Agents are never shown the scores. No agent continues a conversation; the prompt contains the history.

    Raises:
        ValueError: an option is out of range, or a text lacks a placeholder or has an unknown one.
    """

    rounds: Positive = option(8, "Number of rounds.")
    evaluations: Positive = option(1, "Evaluations of each solution.")
    memory: int = option(2, "How many of the last rounds agents are shown, with their solutions and evaluations.")
    solve: str = text_option(SOLVE, "What a solver is asked, with {question!} and {history}.")
    evaluate: str = text_option(EVALUATE, "What an evaluator is asked, with {question}, {history} and {solution!}.")
    score: str = text_option(SCORE, "What a scorer is asked, with {question}, {solution!} and {evaluation!}.")
    pattern: str = option(r"<score>\s*([123])\s*</score>", "A regular expression whose group is the score: 1, 2 or 3.")
    every_step_scored = False
    roles = True
    pays = frozenset({"peer"})

    def __post_init__(self):
        super().__post_init__()
        if check_pattern("pattern", self.pattern) != 1:
            raise ValueError(f"pattern: expected one group, around the score; got {self.pattern!r}")

    @property
    def turns(self) -> int:  # type: ignore[override]  # it follows from the options
        """The number of rounds. One agent may speak up to three times in a round."""
        return self.rounds

    def play(self, example: Example, agents: tuple[str, ...]) -> Play:
        """Play rounds of solving, evaluating and scoring."""
        rng = random.Random(f"{example.id}/{example.meta.get('rollout', 0)}/{example.meta.get('draw', '')}")
        past: list[list[Utterance]] = []
        for _ in range(self.rounds):
            history = "".join(f"{u.role}: {u.text}\n\n" for shown in past[-self.memory :] for u in shown)
            seen = tuple(u.id for shown in past[-self.memory :] for u in shown)
            text = self.solve.format(question=example.question, history=history)
            (solution,) = yield [self._ask(rng.choice(agents), text, "solver", seen, answers=True)]
            past.append([solution])
            worth: list[float] = []
            for _ in range(self.evaluations):
                text = self.evaluate.format(question=example.question, history=history, solution=solution.text)
                (evaluation,) = yield [self._ask(rng.choice(agents), text, "evaluator", (*seen, solution.id))]
                past[-1].append(evaluation)
                text = self.score.format(question=example.question, solution=solution.text, evaluation=evaluation.text)
                (scored,) = yield [self._ask(rng.choice(agents), text, "scorer", (solution.id, evaluation.id))]
                scores = [match[1] for match in matches(self.pattern, scored.text) if match[1] in ("1", "2", "3")]
                scored.rewards["peer"] = 0.0 if scores else -1.0
                evaluation.rewards["peer"] = (3 - int(scores[-1])) / 2 if scores else 0.0
                worth += [(int(scores[-1]) - 1) / 2] if scores else []
            solution.rewards["peer"] = sum(worth) / len(worth) if worth else 0.0

    def _ask(self, agent: str, text: str, role: str, parents: tuple[int, ...], answers: bool = False) -> Ask:
        message = {"role": "user", "content": text}
        return Ask(agent, [message], role=role, parents=parents, answers=answers, fresh=True)


@dataclass(frozen=True)
class Complement(Rule):
    """An utterance in one of the ``roles`` gets 1 minus the mean credit of what it was shown (CoMAS's evaluators)."""

    roles: tuple[str, ...] = option(help="The roles.")

    along = "utterance"

    def __call__(self, dialogues: list[Dialogue], credits: Credits) -> Credits:
        result = []
        for dialogue, credit in zip(dialogues, credits, strict=True):
            changed = dict(credit)
            for u in (u for u in dialogue.utterances if u.role in self.roles):
                shown = [credit[p] for p in u.parents if p in credit and dialogue.utterances[p].role not in self.roles]
                if shown:
                    changed[u.id] = difference(1.0, fmean(shown))
            result.append(changed)
        return result
