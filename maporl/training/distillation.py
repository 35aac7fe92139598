"""On-policy distillation inside a team: the first answer learns what talking taught.

After a dialogue a team knows more than each member before. Each token that an agent sampled in its first turn earns the
log-probability that a teacher gives it, minus that with which it was sampled: in expectation, minus the reverse KL
divergence from the teacher (on-policy distillation, Agarwal et al. 2024, arXiv 2306.13649). The teacher samples
nothing. It is the agent's own policy where it has been shown the dialogue, or another agent of the team.
"""

from collections.abc import Sequence

from maporl.config.schema import DistillSection
from maporl.errors import ConfigError
from maporl.team.team import Team
from maporl.training.samples import TeamUpdateBatch, TrainingSample
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
        ConfigError: the teacher does not learn in this team, or has another tokenizer than a pupil.
    """

    def __init__(self, section: DistillSection, team: Team):
        self.section, self.team = section, team
        if section.teacher == "dialogue":
            return
        key = "trainer: reward.distill.teacher"
        teacher = team.policies_of.get(section.teacher, ())
        if len(teacher) != 1 or not teacher[0].trainable:
            learn = [name for name, own in team.policies_of.items() if len(own) == 1 and own[0].trainable]
            raise ConfigError(f"{key}: expected dialogue or an agent that learns, {learn}, got {section.teacher!r}")
        vocabulary = teacher[0].tokenizer.get_vocab()
        for policy in team.policies.values():
            if policy.trainable and policy.tokenizer.get_vocab() != vocabulary:
                raise ConfigError(
                    f"{key}: {section.teacher!r} reads other tokens than policy {policy.name!r}, so it has no "
                    "probability of what that says; use dialogue, or agents of one tokenizer"
                )

    def add(self, batch: TeamUpdateBatch, learning: Learning) -> dict[str, Metrics]:
        """Add the rewards to the samples of ``batch``. Return by policy the mean of what a token earned, and the share
        of its samples that had a teacher.

        A sample has a teacher if it is an agent's first answer, and its dialogue has what the teacher is shown: a later
        turn of the same agent, or the first turn of the teaching agent. The teacher reads the answer in the place of
        its own.
        """
        told: dict[str, Metrics] = {}
        dialogues = {(d.prompt, d.rollout): d for d in batch.dialogues}
        for policy, samples in batch.samples.items():
            lessons: dict[str, list[tuple[TrainingSample, Completion]]] = {}
            for sample in samples:
                columns = sample.columns
                teacher = self._teacher(dialogues[columns.prompt, columns.rollout], sample.utterance)
                if columns.turn == 0 and teacher is not None:
                    lessons.setdefault(str(teacher.policy), []).append((sample, _read_by(teacher, sample)))
            earned = [amount for name, own in lessons.items() for amount in self._taught(name, own, learning)]
            count = sum(map(len, lessons.values()))
            told[policy] = {"distill/share": count / max(1, len(samples))}
            if earned:
                told[policy]["distill/reward"] = sum(earned) / len(earned)
        return told

    def _teacher(self, dialogue: Dialogue, pupil: Utterance) -> Utterance | None:
        """Return the utterance in whose place the teacher reads the answer."""
        if self.section.teacher != "dialogue":
            first = [u for u in dialogue.utterances if u.agent == self.section.teacher and u.policy]
            return first[0] if first and first[0].agent != pupil.agent else None
        later = [u for u in dialogue.utterances if u.agent == pupil.agent and u.turn > 0 and u.policy == pupil.policy]
        return later[-1] if later else None

    def _taught(
        self, teacher: str, lessons: Sequence[tuple[TrainingSample, Completion]], learning: Learning
    ) -> list[float]:
        """Give the tokens of pupils their rewards, without the weight of which these are returned."""
        read = learning.logprobs(teacher, [completion for _, completion in lessons])
        earned = []
        for (sample, _), logprobs in zip(lessons, read, strict=True):
            if sample.sampled_logprobs is None:
                raise ConfigError(
                    f"reward.distill: {sample.label}: its engine tells no log-probabilities, which distillation "
                    "compares with the teacher's; use engine: transformers or vllm"
                )
            amounts = [t - own for t, own in zip(logprobs, sample.sampled_logprobs, strict=True)]
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
    )
