"""As many right as wrong answers of every question: ``maporl verifier balance``.

Most answers to a hard question are wrong, so that a verifier could learn to recognise hard questions instead of right
answers. With as many right as wrong answers of each question, the question says nothing about the label.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from tqdm.auto import tqdm
from transformers import set_seed

from maporl.config.schema import Config
from maporl.run import ResolvedRun
from maporl.tasks import Task, build_task
from maporl.team.team import Team
from maporl.types import Example
from maporl.verifier.data import DataError, Sample
from maporl.verifier.filters import fault, same_text
from maporl.verifier.measures import reached_by_chance
from maporl.verifier.options import BalanceOptions, TrainOptions
from maporl.verifier.sampling import Label, Speaker, label, seed_of

RIGHT_HINT = (
    "{question}\n\nThis is one way to the right answer:\n{shown}\n\nNow write a right solution of your own, with other "
    "wording and, where you can, other steps. Do not mention the one above. End with one line: {form}"
)
WRONG_HINTS = (
    "{question}\n\nSolve it as somebody would who makes one small slip on the way and does not notice. "
    "End with one line: {form}",
    "{question}\n\nWrite a convincing solution with one mistake in its reasoning, which leads to a final answer that "
    "is not right. Do not point out the mistake. End with one line: {form}",
    "{question}\n\nThe right final answer is {truth}. Write a convincing solution that arrives at another final "
    "answer. Mention neither the right answer nor this request. End with one line: {form}",
)
"""From mild to strong. The fewer wrong answers a question has, the stronger a hint is used."""


SHORT = (
    "Sample each question more often (maporl verifier generate --per-question), or give the configuration here, so "
    "that short sides are topped up by solutions and hints"
)
"""What to do where questions lack right or wrong answers."""
RARE = 0.02
"""A label that fewer answers have is as good as missing: nearly all questions lack it."""
HARDLY = 0.65
"""An AUC that scores without meaning should not reach. If they may, too few answers are held out to tell."""


def one_sided(right: int, wrong: int) -> str | None:
    """Return what to do if nearly all answers are right, or nearly all are wrong. None: there are enough of both.

    >>> one_sided(5, 95) is None, str(one_sided(1, 99)).split(";")[0]
    (True, 'only 1 of 100 answers is right, and a verifier learns from both')
    """
    few, total = min(right, wrong), right + wrong
    if few >= RARE * total and few:
        return None
    side = "right" if right < wrong else "wrong"
    counted = f"only {few} of {total} answers {'is' if few == 1 else 'are'} {side}" if few else f"no answer is {side}"
    remedy = (
        "teach the models first (maporl sft CONFIG --output FOLDER, then agents.NAME.model=FOLDER/NAME), or ask easier "
        "questions"
        if side == "right"
        else "sample at higher temperatures (--temperature-high 3 --top-p 1), or ask harder questions"
    )
    return f"{counted}, and a verifier learns from both; {remedy}"


def too_few(samples: Sequence[Sample]) -> str | None:
    """Return what to do if the answers that ``maporl verifier train`` holds out are too few to measure a verifier."""
    questions, held_out = len({sample.id for sample in samples}), TrainOptions.held_out
    count = len(samples) * max(1, round(questions * held_out)) // questions
    reached = reached_by_chance(np.arange(count) % 2)
    if reached is not None and reached <= HARDLY:
        return None
    return (
        f"{len(samples)} answers to {questions} questions are few: of these maporl verifier train holds out about "
        f"{count} (--held-out {held_out:g}), on which scores without any meaning may look good (AUC "
        f"{min(1.0, reached or 1.0):.2f}); sample more questions, keep more answers of each (--per-question), or hold "
        "out more (--held-out 0.3)"
    )


@dataclass
class Pool:
    """The usable answers of one question so far: right ones under True, wrong ones under False."""

    id: str
    question: str
    answers: dict[bool, list[Sample]] = field(default_factory=lambda: {True: [], False: []})
    seen: set[str] = field(default_factory=set)

    def add(self, sample: Sample, options: BalanceOptions) -> str | None:
        """Add ``sample`` and return None, or return the reason why it is not usable."""
        reason = fault(sample.answer, options.free_form)
        if reason is None and not options.repeats and same_text(sample.answer) in self.seen:
            reason = "duplicate"
        if reason is None:
            self.seen.add(same_text(sample.answer))
            self.answers[sample.correct].append(sample)
        return reason

    def short(self, wanted: int) -> list[bool]:
        """The sides that have fewer than ``wanted`` answers."""
        return [side for side in (True, False) if len(self.answers[side]) < wanted]


@dataclass
class Balanced:
    """``samples`` with as many right as wrong answers of each question, and counts of the rest.

    ``dropped`` counts the answers that are not used, and ``questions`` what became of each question, both by reason.
    """

    samples: list[Sample]
    dropped: Counter
    questions: Counter

    def lines(self) -> list[str]:
        """The counts as lines for people."""
        counted = (("questions", self.questions), ("answers not used", self.dropped))
        return [
            f"{what}: " + (", ".join(f"{reason} {count}" for reason, count in counts.most_common()) or "none")
            for what, counts in counted
        ]


def balance(samples: Iterable[Sample], options: BalanceOptions, source: "TopUp | None" = None) -> Balanced:
    """Filter the samples, add answers from ``source`` if it is given, and keep as many right as wrong answers.

    Raises:
        DataError: two samples of one question have different question texts.
    """
    dropped: Counter = Counter()
    pools = _pools(samples, options, dropped)
    if source is not None:
        source.references(pools, dropped)
        source.hints(pools, dropped)
    questions: Counter = Counter()
    balanced = [sample for pool in pools.values() for sample in _cut(pool, options, questions)]
    return Balanced(balanced, dropped, questions)


def _pools(samples: Iterable[Sample], options: BalanceOptions, dropped: Counter) -> dict[str, Pool]:
    pools: dict[str, Pool] = {}
    for sample in samples:
        pool = pools.setdefault(sample.id, Pool(sample.id, sample.question))
        if pool.question != sample.question:
            raise DataError(
                f"question {sample.id}: two texts, {pool.question!r:.60} and {sample.question!r:.60}; balance samples "
                "of one configuration at a time"
            )
        if reason := pool.add(sample, options):
            dropped[reason] += 1
    return pools


def _cut(pool: Pool, options: BalanceOptions, questions: Counter) -> list[Sample]:
    """As many right as wrong answers of a question, those without a hint first, counted in ``questions``."""
    right, wrong = pool.answers[True], pool.answers[False]
    count = min(len(right), len(wrong), options.per_question)
    if count == 0:
        questions[
            "dropped: " + ("no usable answer" if not right + wrong else f"no {'wrong' if right else 'right'} one")
        ] += 1
    elif count == options.per_question:
        questions["full"] += 1
    elif options.short == "drop":
        questions["dropped: short"] += 1
        count = 0
    else:
        questions["cut"] += 1
    chosen = []
    for side in (right, wrong):
        shuffled = list(side)
        seed_of(options.seed, pool.id).shuffle(shuffled)
        chosen += sorted(shuffled, key=lambda sample: sample.source != "sample")[:count]
    return chosen


class TopUp:
    """Finds further answers where a question has too few: the task's own solutions, and an agent that is given
    hints."""

    def __init__(
        self, config: Config, task: Task, options: BalanceOptions, speaker: Speaker | None, judge: Speaker | None = None,  # noqa: E501
        quiet: bool = False,
    ):  # fmt: skip
        self.task, self.options, self.speaker, self.judge, self.quiet = task, options, speaker, judge, quiet
        self.opening, self.examples = (
            ResolvedRun(config).protocol.opening,
            {example.id: example for example in task},
        )

    @classmethod
    def from_config(cls, config: Config, options: BalanceOptions, quiet: bool = False) -> "TopUp":
        """For the task and the agents of ``config``. Its models are loaded only if there are rounds to sample.

        Raises:
            ConfigError: the task or an agent's model cannot be loaded, or an option names no agent with a model.
        """
        task = build_task(config.task, "train", config.seed)
        if not options.rounds:
            return cls(config, task, options, None, None, quiet)
        set_seed(config.seed)  # tiny models are random: this draws the models again that the samples came from
        team = Team.from_config(config)
        speaker = Speaker(config, team, options.agent or next(iter(team.policies_of)), "--agent")
        judge = Speaker(config, team, options.judge, "--judge") if options.judge else None
        return cls(config, task, options, speaker, judge, quiet)

    def example(self, pool: Pool) -> Example:
        """The task's example for the question of ``pool``.

        Raises:
            DataError: the task does not have this question.
        """
        example = self.examples.get(pool.id)
        if example is None or self.task.question(example) != pool.question:
            raise DataError(
                f"question {pool.id}: {'not in' if example is None else 'worded otherwise by'} the configuration's "
                "task; give the configuration that the samples were generated with"
            )
        return example

    def references(self, pools: dict[str, Pool], dropped: Counter) -> None:
        """Add the task's own solution to each question that lacks right answers, if the grader finds it right."""
        lacking = [pool for pool in pools.values() if True in pool.short(self.options.per_question)]
        examples = [self.example(pool) for pool in lacking]
        solutions = [self.task.solution(example) for example in examples]
        # not labelled by the judge, who would compare the reference with itself
        labels: list[Label] = [(True, "reference")] * len(lacking)
        if lacking and self.judge is None:
            labels = label(self.task, examples, solutions, None, self.options.batch_size)
        for pool, solution, (correct, _) in zip(lacking, solutions, labels, strict=True):
            reason = None if correct else "not_right"
            reason = reason or pool.add(
                Sample(pool.id, pool.question, solution, True, source="reference"), self.options
            )
            if reason:
                dropped[f"reference: {reason}"] += 1

    def hints(self, pools: dict[str, Pool], dropped: Counter) -> None:
        """Sample answers with hints, in rounds, until no question is short of answers or the rounds are used up."""
        if self.speaker is None:
            return
        for number in range(self.options.rounds):
            asks = [
                (pool, side, self.prompt(pool, side))
                for pool in pools.values()
                for side in pool.short(self.options.per_question)
                for _ in range(self.options.per_round)
            ]
            size = self.options.batch_size
            batches = [asks[i : i + size] for i in range(0, len(asks), size)]
            with tqdm(batches, desc=f"round {number + 1}", disable=self.quiet, leave=False, dynamic_ncols=True) as bar:
                for index, batch in enumerate(bar):
                    self._ask(batch, f"{number}:{index}", dropped)

    def _ask(self, batch: list[tuple[Pool, bool, str]], place: str, dropped: Counter) -> None:
        """Sample answers to one batch of hinted prompts. Each counts by its label, whatever the hint asked for."""
        assert self.speaker is not None  # hints() asks only if there is a speaker
        options, rng = self.options, seed_of(self.options.seed, place)
        temperature = rng.uniform(options.temperature_low, options.temperature_high)
        texts = [prompt for _, _, prompt in batch]
        answers = self.speaker.generate(texts, temperature, options.batch_size, options.top_p, rng.getrandbits(62))
        examples = [self.example(pool) for pool, _, _ in batch]
        labels = label(self.task, examples, answers, self.judge, options.batch_size)
        policy = self.speaker.policy.name
        for (pool, _, _), answer, (correct, why) in zip(batch, answers, labels, strict=True):
            if correct is None:
                reason: str | None = why
            elif correct not in pool.short(options.per_question):
                reason = "side_full"
            else:
                made = Sample(pool.id, pool.question, answer, correct, temperature, policy, source="hint")
                reason = pool.add(made, options)
            if reason:
                dropped[f"hint: {reason}"] += 1

    def prompt(self, pool: Pool, side: bool) -> str:
        """The prompt for one more answer of ``side``.

        With no right answer to show as a hint, it is the bare question.
        """
        example = self.example(pool)
        question = self.opening.replace("{question}", pool.question)
        values = {"question": question, "form": self.task.answer_form, "truth": example.answer}
        if side:
            right = pool.answers[True]
            return RIGHT_HINT.format(shown=right[-1].answer, **values) if right else question
        wrong = len(pool.answers[False])
        return WRONG_HINTS[2 if wrong == 0 else 1 if wrong < 2 else 0].format(**values)
