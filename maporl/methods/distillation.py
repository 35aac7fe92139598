"""On-policy distillation inside a team: the first answer learns what talking taught.

After a dialogue a team knows more than each member before. Each token that an agent sampled in its first turn earns the
log-probability that a teacher gives it, minus that with which it was sampled: in expectation, minus the reverse KL
divergence from the teacher (on-policy distillation, Agarwal et al. 2024, arXiv 2306.13649). The teacher samples
nothing. It is the agent's own policy where it has been shown another dialogue on the question, or another agent.

A teacher that had read the answer would only repeat it, and what it says would be no distribution over answers. So it
reads nothing that was said after that answer: not its own dialogue, but those that began apart from it.
"""

import math
from collections.abc import Sequence

from maporl.config.schema import DistillSection
from maporl.errors import ConfigError
from maporl.team.team import Team
from maporl.training.samples import Name, TeamUpdateBatch, TrainingSample, names_of
from maporl.types import Dialogue, Utterance
from trl_ext.learning.learners import Learning
from trl_ext.learning.metrics import Metrics
from trl_ext.ppo.batch import Completion


class Distillation:
    """Adds the rewards of distillation to the tokens of first answers.

    Args:
        section: the teacher and the weight.
        team: the team, for the tokenizers.

    Raises:
        ConfigError: the teacher does not learn in this team, or has another tokenizer than a student.
    """

    def __init__(self, section: DistillSection, team: Team):
        self.section, self.team = section, team
        self.teacher: str | None = None
        """The policy of the agent that teaches, or None if each policy teaches itself."""
        if section.teacher == "dialogue":
            return
        key = "trainer: reward.distill.teacher"
        teacher = team.policies_of.get(section.teacher, ())
        if len(teacher) != 1 or not teacher[0].trainable:
            learn = [name for name, own in team.policies_of.items() if len(own) == 1 and own[0].trainable]
            raise ConfigError(f"{key}: expected dialogue or an agent that learns, {learn}, got {section.teacher!r}")
        self.teacher, vocabulary = teacher[0].name, teacher[0].tokenizer.get_vocab()
        for policy in team.policies.values():
            if policy.trainable and policy.tokenizer.get_vocab() != vocabulary:
                raise ConfigError(
                    f"{key}: {section.teacher!r} reads other tokens than policy {policy.name!r}, so it has no "
                    "probability of what that says; use dialogue, or agents of one tokenizer"
                )

    def add(self, batch: TeamUpdateBatch, learning: Learning) -> dict[str, Metrics]:
        """Add the rewards to the samples of ``batch``. Return by policy the mean of what a token earned, and the share
        of its first answers that had a teacher.

        With several dialogues on the question a first answer has several teachers, and earns the mean.
        """
        told: dict[str, Metrics] = {}
        questions: dict[int, list[tuple[Dialogue, list[Name]]]] = {}
        for dialogue in batch.dialogues:
            questions.setdefault(dialogue.prompt, []).append((dialogue, names_of(dialogue)))
        for policy, samples in batch.samples.items():
            first = [sample for sample in samples if sample.utterance.turn == 0]
            lessons = [(s, own) for s in first if (own := self._teachers(s, questions[s.columns.values["prompt"]]))]
            if first:
                told[policy] = {"distill/share": len(lessons) / len(first)}
            if lessons:
                earned = self._taught(self.teacher or policy, lessons, learning)
                told[policy]["distill/reward"] = sum(earned) / len(earned)
        return told

    def _teachers(self, sample: TrainingSample, question: list[tuple[Dialogue, list[Name]]]) -> list[Utterance]:
        """Return the utterances in whose place a teacher reads the answer: of its own dialogue, or else of others."""
        pupil, columns = sample.utterance, sample.columns
        found = []
        for dialogue, names in question:
            teaching = self._teaching(dialogue, pupil)
            step = dialogue.utterances[names.index(columns.name)].order if columns.name in names else math.inf
            if teaching is not None and teaching.order <= step:  # else it may have read the answer
                found.append((dialogue.rollout == columns.values["rollout"], teaching))
        beside = any(own for own, _ in found)
        return [teaching for own, teaching in found if own or not beside]

    def _teaching(self, dialogue: Dialogue, pupil: Utterance) -> Utterance | None:
        """Return the last later utterance of the same agent in a dialogue, or the first one of the teaching agent."""
        if self.teacher is not None:
            other = [u for u in dialogue.utterances if u.agent == self.section.teacher != pupil.agent]
            return other[0] if other and other[0].policy == self.teacher else None
        later = [u for u in dialogue.utterances if u.agent == pupil.agent and u.turn > 0 and u.policy == pupil.policy]
        return later[-1] if later else None

    def _taught(
        self, teacher: str, lessons: Sequence[tuple[TrainingSample, list[Utterance]]], learning: Learning
    ) -> list[float]:
        """Give the tokens of pupils their rewards, without the weight of which these are returned."""
        read = iter(learning.logprobs(teacher, [_read_by(one, sample) for sample, own in lessons for one in own]))
        earned = []
        for sample, own in lessons:
            if sample.sampled_logprobs is None:
                raise ConfigError(
                    f"reward.distill: {sample.label}: its engine tells no log-probabilities, which distillation "
                    "compares with the teacher's; use engine: transformers or vllm"
                )
            taught = zip(*[next(read) for _ in own], strict=True)
            amounts = [sum(t) / len(own) - said for t, said in zip(taught, sample.sampled_logprobs, strict=True)]
            earned += amounts
            sample.token_scores = [self.section.weight * amount for amount in amounts]
            sample.token_scores[-1] += sample.score or 0.0
        return earned


def _read_by(teacher: Utterance, sample: TrainingSample) -> Completion:
    return Completion(
        prompt_ids=teacher.prompt_ids,
        response_ids=sample.response_ids,
        ended=sample.ended,
        label=f"{sample.label}, as the teacher reads it",
        temperature=sample.temperature,
        grammar=sample.grammar,
    )
