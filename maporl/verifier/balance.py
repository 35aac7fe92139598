"""As many right as wrong answers of every question: ``maporl verifier balance``.

Where hard questions have mostly wrong answers, a verifier can learn to recognise hard questions instead of right
answers. With equal numbers of both, the question says nothing about the label.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tqdm.auto import tqdm
from transformers import set_seed

from maporl.config.schema import Config
from maporl.protocols import build_protocol
from maporl.tasks import Task, build_task
from maporl.team.team import Team
from maporl.types import Example
from maporl.verifier.data import DataError, Sample
from maporl.verifier.filters import fault, same_text
from maporl.verifier.options import BalanceOptions
from maporl.verifier.sampling import Label, Speaker, label, seed_of

RIGHT_HINT = (
    "{question}\n\nThis is one way to the right answer:\n{shown}\n\nNow write a right solution of your own, with other "
    "wording and, where you can, other steps. Do not mention the one above. End with one line: {form}"
)
WRONG_HINTS = (
    "{question}\n\nSolve it as somebody would who makes one small slip on the way and does not notice. "
    "End with one line: {form}",
    "{question}\n\nWrite a convincing solution with one mistake in its reasoning, which leads to a final answer that is "
    "not right. Do not point out the mistake. End with one line: {form}",
    "{question}\n\nThe right final answer is {truth}. Write a convincing solution that arrives at another final answer. "
    "Mention neither the right answer nor this request. End with one line: {form}",
)
"""From mild to strong: the fewer wrong answers a question has, the stronger is what asks for one."""


@dataclass
class Pool:
    """The usable answers of one question so far, right ones under True and wrong ones under False."""

    id: str
    question: str
    answers: dict[bool, list[Sample]] = field(default_factory=lambda: {True: [], False: []})
    seen: set[str] = field(default_factory=set)

    def add(self, sample: Sample, options: BalanceOptions) -> str | None:
        """Take ``sample`` in, or say why not."""
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
    """``samples``: equal numbers of both labels for each question; ``dropped`` answers and ``questions``, by reason."""

    samples: list[Sample]
    dropped: Counter
    questions: Counter

    def lines(self) -> list[str]:
        """The counts for people."""
        counted = (("questions", self.questions), ("answers not used", self.dropped))
        return [
            f"{what}: " + (", ".join(f"{reason} {count}" for reason, count in counts.most_common()) or "none")
            for what, counts in counted
        ]


def balance(samples: Iterable[Sample], options: BalanceOptions, source: "TopUp | None" = None) -> Balanced:
    """Filter, top up from ``source`` where there is one, and cut to equal numbers of right and wrong answers."""
    dropped: Counter = Counter()
    pools = _pools(samples, options, dropped)
    if source is not None:
        source.references(pools, dropped)
        source.hints(pools, dropped)
    questions: Counter = Counter()
    kept = [sample for pool in pools.values() for sample in _cut(pool, options, questions)]
    return Balanced(kept, dropped, questions)


def _pools(samples: Iterable[Sample], options: BalanceOptions, dropped: Counter) -> dict[str, Pool]:
    pools: dict[str, Pool] = {}
    for sample in samples:
        pool = pools.setdefault(sample.id, Pool(sample.id, sample.question))
        if pool.question != sample.question:
            raise DataError(
                f"question {sample.id}: two texts, {pool.question!r:.60} and {sample.question!r:.60}; balance samples of "
                "one configuration at a time"
            )
        if reason := pool.add(sample, options):
            dropped[reason] += 1
    return pools


def _cut(pool: Pool, options: BalanceOptions, questions: Counter) -> list[Sample]:
    """Equal numbers of both sides, what was sampled without any help first; what became of the question is counted."""
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
    kept = []
    for side in (right, wrong):
        shuffled = list(side)
        seed_of(options.seed, pool.id).shuffle(shuffled)
        kept += sorted(shuffled, key=lambda sample: sample.source != "sample")[:count]
    return kept


class TopUp:
    """Further answers for the short sides: the task's own solutions, and an agent that is pointed towards a side."""

    def __init__(
        self, config: Config, task: Task, options: BalanceOptions, speaker: Speaker | None, judge: Speaker | None = None,
        quiet: bool = False,
    ):  # fmt: skip
        self.task, self.options, self.speaker, self.judge, self.quiet = task, options, speaker, judge, quiet
        self.opening, self.examples = (
            build_protocol(config.protocol, tuple(config.agents)).opening,
            {example.id: example for example in task},
        )

    @classmethod
    def from_config(cls, config: Config, options: BalanceOptions, quiet: bool = False) -> "TopUp":
        """With the configuration's task; its models are loaded only if there are rounds to sample."""
        task = build_task(config.task, "train", config.seed)
        if not options.rounds:
            return cls(config, task, options, None, None, quiet)
        set_seed(config.seed)  # tiny models are drawn at random: those that were sampled from, again
        team = Team.from_config(config)
        speaker = Speaker(config, team, options.agent or next(iter(team.policies_of)), "--agent")
        judge = Speaker(config, team, options.judge, "--judge") if options.judge else None
        return cls(config, task, options, speaker, judge, quiet)

    def example(self, pool: Pool) -> Example:
        """The task's example of a question, if it is this task's."""
        example = self.examples.get(pool.id)
        if example is None or self.task.question(example) != pool.question:
            raise DataError(
                f"question {pool.id}: {'not in the' if example is None else 'put otherwise by the'} configuration's task; "
                "give the configuration that the samples were generated with"
            )
        return example

    def references(self, pools: dict[str, Pool], dropped: Counter) -> None:
        """The task's own solution as a right answer, where right ones are lacking and the grader agrees."""
        lacking = [pool for pool in pools.values() if True in pool.short(self.options.per_question)]
        examples = [self.example(pool) for pool in lacking]
        solutions = [self.task.solution(example) for example in examples]
        labels: list[Label] = [(True, "reference")] * len(lacking)  # a judge would compare the reference with itself
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
        """Rounds of sampling with hints, until no side is short or the rounds are used up."""
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
            for index, batch in enumerate(
                tqdm(batches, desc=f"round {number + 1}", disable=self.quiet, leave=False, dynamic_ncols=True)
            ):
                self._ask(batch, f"{number}:{index}", dropped)

    def _ask(self, batch: list[tuple[Pool, bool, str]], place: str, dropped: Counter) -> None:
        """Sample one batch of hinted prompts; an answer counts as what it is labelled, whatever was asked for."""
        assert self.speaker is not None  # only then is there anything to ask
        options, rng = self.options, seed_of(self.options.seed, place)
        temperature = rng.uniform(options.temperature_low, options.temperature_high)
        texts = [prompt for _, _, prompt in batch]
        answers = self.speaker.say(texts, temperature, options.batch_size, options.top_p, rng.getrandbits(62))
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
        """What asks for one more answer of a side; without any right answer to show, the bare question."""
        example = self.example(pool)
        question = self.opening.replace("{question}", pool.question)
        values = {"question": question, "form": self.task.answer_form, "truth": example.answer}
        if side:
            right = pool.answers[True]
            return RIGHT_HINT.format(shown=right[-1].answer, **values) if right else question
        wrong = len(pool.answers[False])
        return WRONG_HINTS[2 if wrong == 0 else 1 if wrong < 2 else 0].format(**values)
