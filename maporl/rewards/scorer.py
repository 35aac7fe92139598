"""The scorer: everything that a trainer or a player needs of rewards, as one part. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence

from maporl.config.schema import RewardSection
from maporl.rewards.base import RewardSource
from maporl.rewards.counterfactual import set_contributions
from maporl.rewards.credit import assign_credit
from maporl.rewards.scoring import fill_in, grade_answers, score_dialogues
from maporl.tasks.base import Task
from maporl.types import Dialogue


class Scorer:
    """Grades and scores dialogues, and credits utterances.

    Args:
        reward: the weights of the sources, and the rules by which scores become credit.
        sources: reward sources by name.
        speakers: the agents that play, in order.
        digits: for each policy, the token ids that may repeat without penalty.
        missing_eos_penalty: subtracted from the credit of an utterance without end of sequence; None: nothing is.
    """

    def __init__(
        self,
        reward: RewardSection,
        sources: Mapping[str, RewardSource],
        speakers: Sequence[str],
        digits: Mapping[str, Collection[int]] | None = None,
        missing_eos_penalty: float | None = None,
    ):
        self.reward, self.sources, self.speakers = reward, dict(sources), tuple(speakers)
        self.digits, self.missing_eos_penalty = digits or {}, missing_eos_penalty

    @property
    def meeting(self) -> dict[str, RewardSource]:
        """The sources by name whose values depend on what all processes play in an update."""
        return {name: one for name, one in self.sources.items() if type(one).meet is not RewardSource.meet}

    def meet(self, dialogues: list[Dialogue]) -> None:
        """Let the sources of all processes exchange what an update's rewards depend on. All processes call this
        together.

        What these sources have scored before is dropped, because other dialogues may have stood beside it.
        """
        for name, source in self.meeting.items():
            for utterance in (u for dialogue in dialogues for u in dialogue.utterances):
                utterance.rewards.pop(name, None)
            source.meet(dialogues)

    def grade(self, dialogues: list[Dialogue], task: Task) -> None:
        """Set ``grade`` of every answer that has no grade yet.

        Raises:
            RewardFailure: the task's grader failed.
        """
        grade_answers(dialogues, task)

    def fill_in(self, dialogues: list[Dialogue], task: Task, names: Collection[str]) -> None:
        """Set the rewards called ``names`` of every utterance that lacks them and that their sources score.

        Raises:
            RewardFailure: a source failed.
        """
        fill_in(dialogues, task, {name: self.sources[name] for name in names})

    def score(self, dialogues: list[Dialogue], task: Task) -> None:
        """Grade every answer, and set ``rewards["score"]`` of the utterances to the weighted sum of their sources.

        Ablations are scored too, and what each agent contributed is set
        (:func:`maporl.rewards.counterfactual.set_contributions`).

        Raises:
            RewardFailure: a source failed, or nothing scored an answer.
            ConfigError: nobody answered in an ablation.
        """
        played = [*dialogues, *(ablation for dialogue in dialogues for ablation in dialogue.ablations)]
        grade_answers(played, task)
        score_dialogues(played, task, self.sources, self.reward.sources)
        set_contributions(dialogues)

    def worth(self, dialogues: list[Dialogue], task: Task) -> list[float]:
        """Return the sum of the scores of each dialogue's utterances. Each dialogue is judged separately.

        Raises:
            RewardFailure: a source failed, or nothing scored an answer.
        """
        self.score(dialogues, task)
        return [sum(u.rewards.get("score", 0.0) for u in dialogue.utterances) for dialogue in dialogues]

    def credit(self, dialogues: list[Dialogue], task: Task, update: int = 1) -> None:
        """Score the utterances and set their credits (``rewards["credit"]``) in ``update``, including penalties.

        Raises:
            RewardFailure: a source failed, or nothing scored an answer.
        """
        self.score(dialogues, task)
        assign_credit(dialogues, self.speakers, self.reward, self.digits, update)
        if self.missing_eos_penalty is None:
            return
        credited = (u for d in dialogues for u in d.utterances if "credit" in u.rewards)
        for utterance in (u for u in credited if not u.stop.whole):
            utterance.rewards["missing_eos"] = -self.missing_eos_penalty
            utterance.rewards["credit"] -= self.missing_eos_penalty
