"""What an update's dialogues show of rewards, tools, proposers, judges of steps, and the age of the weights.

All processes call the functions that return metrics together. But for ages, metrics are over all processes.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import chain
from statistics import fmean, pstdev

from maporl.environments.world import World
from maporl.report.audit import dialogue_counts
from maporl.rewards.labels import is_step_verdict
from maporl.rewards.scoring import handed_out, shares_right
from maporl.rollout.player import Player, evaluate_everywhere
from maporl.training.samples import TeamUpdateBatch
from maporl.types import Dialogue, is_program
from trl_ext.learning.audit import source_counts
from trl_ext.learning.metrics import Metrics
from trl_ext.process import distributed


def measured(batch: TeamUpdateBatch, player: Player, ahead: bool) -> Metrics:
    """Return what an update's dialogues, the reward sources, the engines and the tools have to tell.

    Reward sources may learn from the dialogues. ``ahead`` is whether dialogues are played while weights change. All
    processes call this together.
    """
    dialogues, number = batch.dialogues, batch.number
    metrics = staleness_metrics(dialogues, number) if ahead else {}
    metrics |= evaluate_everywhere(dialogues).metrics()
    metrics |= dialogue_metrics(dialogues, player.world, player.tools, batch.dropped)
    batch.counts |= counts_of(dialogues, player, batch.dropped)
    for source in player.scorer.sources.values():
        metrics |= source.after_update(number, handed_out(source, dialogues), batch.task)
    for engine in player.engines.values():
        metrics |= engine.metrics()
    return metrics


def dialogue_metrics(
    dialogues: list[Dialogue], world: World, callers: Collection[str], dropped: Sequence[Dialogue] = ()
) -> Metrics:
    """Return the metrics of calls, proposals and verdicts, over all processes. All processes call this
    together.

    ``callers`` are the agents with tools, which may be other agents. ``dropped`` are dialogues that nobody is trained
    on, because something failed.
    """
    parts = distributed.all_gather(
        (
            _tool_sums(dialogues, world, callers),
            _proposals(dialogues),
            _verdicts(dialogues),
            _programs([*dialogues, *dropped]),
            _verified(dialogues),
            _values(dialogues, "verifier"),
        )
    )
    tools, proposals, verdicts, programs, verified, scores = zip(*parts, strict=True)
    metrics: Metrics = defaultdict(float)
    for name, amount in chain(*(sums.items() for sums in tools)):
        metrics[name] += amount
    shares = _proposal_metrics([*chain(*proposals)]) | _verdict_metrics([*chain(*verdicts)])
    shares |= _means([*chain(*programs), *chain(*verified)])
    return metrics | shares | _spread([*chain(*scores)])


def counts_of(dialogues: Sequence[Dialogue], player: Player, dropped: Sequence[Dialogue] = ()) -> Metrics:
    """Return what the dialogues of all processes count for the audit of the run. All processes call this together."""
    names = player.scorer.reward.sources
    values = {name: _values(dialogues, name) for name in names}
    parts = distributed.all_gather((dialogue_counts([*dialogues, *dropped]), values))
    counts: Metrics = dict(sum([part for part, _ in parts], Counter()))
    for name in names:
        counts |= source_counts(name, [value for _, values in parts for value in values[name]])
    for kind, present in {"agent": player.speakers, "tool": (*player.world.tools, *player.world.environments)}.items():
        for name in present:
            counts[f"{kind}/{name}/updates"] = 1.0
    return counts


def _values(dialogues: Sequence[Dialogue], name: str) -> list[float]:
    """Return the values of the reward ``name`` of this process's utterances."""
    return [u.rewards[name] for dialogue in dialogues for u in dialogue.utterances if name in u.rewards]


def _tool_sums(dialogues: Sequence[Dialogue], world: World, callers: Collection[str]) -> Metrics:
    """Return the counts of calls and environments of this process, or nothing where nobody can call and act."""
    if not world.tools and not world.environments and not callers:
        return {}
    sums: Metrics = defaultdict(float, world.take_counts())
    for utterance in (u for dialogue in dialogues for u in dialogue.utterances):
        if utterance.turn_end is not None:
            sums[f"turns/end/{utterance.turn_end.value}"] += 1
        for call in utterance.calls:
            sums[f"calls/{utterance.agent}"] += 1
            if call.result is not None:
                sums["tools/seconds"] += call.result.seconds
                sums["tools/left_out"] += call.result.left_out
                if call.result.error is not None:
                    sums[f"calls_failed/{call.result.error}"] += 1
    return dict(sums)


def _proposals(dialogues: Sequence[Dialogue]) -> list[tuple[str | None, bool]]:
    """Return the question of each proposal, None where none can be read, and whether it was asked."""
    return [
        (u.tags["question"], u.tags["accepted"])
        for dialogue in dialogues
        for u in dialogue.utterances
        if u.tags.keys() >= {"question", "accepted"}
    ]


def _proposal_metrics(proposals: Sequence[tuple[str | None, bool]]) -> Metrics:
    """Return the shares of proposals that were asked and that repeat another, or nothing without any.

    A proposer that finds one question that pays may write nothing else, which these numbers show.
    """
    if not proposals:
        return {}
    read = [question for question, _ in proposals if question is not None]
    repeated = (len(read) - len(set(read))) / len(read) if read else 0.0
    return {"proposals/asked": sum(asked for _, asked in proposals) / len(proposals), "proposals/repeated": repeated}


def _programs(dialogues: Sequence[Dialogue]) -> list[tuple[str, bool]]:
    """Return whether each program failed, whether each request was refused, and whether one that repeats a conversation
    went on with it."""
    ended = [d.outcome for d in dialogues if is_program(d)]
    histories = [(u, u.tags["history"]) for d in dialogues for u in d.utterances if "history" in u.tags]
    return [
        *(("program/failed", "failure" in outcome) for outcome in ended),
        *(("program/refused", n >= outcome["answered"]) for outcome in ended for n in range(outcome["requests"])),
        *((f"{u.agent}/continued_share", history == "continued") for u, history in histories),
    ]


def _verified(dialogues: Sequence[Dialogue]) -> list[tuple[str, float]]:
    """Return a verifier's score of each answer that has a label, under a name that says the label.

    A team that finds wrong answers that pay shows in those of wrong answers.
    """
    return [
        ("verifier/on_right" if u.grade.correct else "verifier/on_wrong", u.rewards["verifier"])
        for dialogue in dialogues
        for u in dialogue.utterances
        if "verifier" in u.rewards and u.grade is not None and u.grade.correct is not None
    ]


def _spread(scores: Sequence[float]) -> Metrics:
    """Return the standard deviation of a verifier's scores of all answers, or nothing if it scored fewer than two."""
    return {"verifier/spread": pstdev(scores)} if len(scores) > 1 else {}


def _means(entries: Sequence[tuple[str, float]]) -> Metrics:
    """Return the mean, or the share, of each name in ``entries``."""
    named: dict[str, list[float]] = {}
    for name, value in entries:
        named.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in named.items()}


def _verdicts(dialogues: Sequence[Dialogue]) -> list[tuple[bool, int | None]]:
    """Return for each verdict of ``protocol.step_judge`` whether its dialogue succeeds, and what it says."""
    return [(_succeeds(d), u.tags["verdict"]) for d in dialogues for u in d.utterances if is_step_verdict(u)]


def _verdict_metrics(verdicts: Sequence[tuple[bool, int | None]]) -> Metrics:
    """Return how the verdicts of ``protocol.step_judge`` were, or nothing without any.

    A dialogue succeeds if the last score of what was judged is above 0. Where most dialogues fail, a judge that calls
    every step bad mostly follows the outcome. So the accuracy is the mean of the share of steps of successes that were
    called good, and of the share of steps of failures that were called bad. At 0.5 the verdicts say nothing of the
    outcome.
    """
    if not verdicts:
        return {}
    metrics = {"verdicts/unreadable": fmean(said is None for _, said in verdicts)}
    read = [(succeeds, said == 1) for succeeds, said in verdicts if said is not None]
    if read:
        metrics["verdicts/good"] = fmean(good for _, good in read)
    if len(right := shares_right(read)) == 2:
        metrics["verdicts/balanced_accuracy"] = fmean(right)
    return metrics


def _succeeds(dialogue: Dialogue) -> bool:
    scores = [u.rewards["score"] for u in dialogue.utterances if not is_step_verdict(u) and "score" in u.rewards]
    return bool(scores) and scores[-1] > 0


def staleness_metrics(dialogues: Sequence[Dialogue], update: int) -> Metrics:
    """Return the ages of the answers that update number ``update`` trains on, in updates.

    An answer's age is ``update - 1`` less the number of updates that its weights had had. To a policy, its partners are
    a part of the environment: their age does not enter its probability ratio, and is a metric of its own.
    """
    answer_ages: dict[str, list[int]] = {}
    partners: dict[str, list[int]] = {}
    across = 0
    for dialogue in dialogues:
        ages = [(u.policy, update - 1 - u.version) for u in dialogue.utterances if u.version is not None]
        across += len({age for _, age in ages}) > 1
        for policy in {name for name, _ in ages}:
            answer_ages.setdefault(policy, []).extend(age for name, age in ages if name == policy)
            others = [age for name, age in ages if name != policy]
            partners.setdefault(policy, []).extend([max(others)] if others else [])
    metrics: Metrics = {"async/across_updates": across / max(len(dialogues), 1)}
    for policy, ages_of_answers in answer_ages.items():
        metrics[f"{policy}/policy/staleness"] = fmean(ages_of_answers)
        metrics[f"{policy}/policy/staleness_max"] = float(max(ages_of_answers))
        if partners[policy]:
            metrics[f"{policy}/policy/partner_lag"] = fmean(partners[policy])
    return metrics
