"""Find singleton groups before a run: rows of an update that have no others to be compared with.

A dry run plays a question with mock completions, and computes advantages as an update does. So it counts the rows that
the protocol and the branching really make, and does not derive them from their options.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from maporl.advantages.baselines import baseline_of
from maporl.advantages.estimator import GroupOfOne, estimate_all
from maporl.advantages.returns import return_of
from maporl.advantages.transforms import build_transforms
from maporl.config.schema import AdvantageConfig, BranchingSection, RewardSection
from maporl.environments.world import World
from maporl.errors import Fault
from maporl.protocols.base import Protocol
from maporl.rewards.build import scores_others
from maporl.rewards.counterfactual import set_contributions
from maporl.rewards.credit import assign_credit
from maporl.rollout.branching import BRANCHINGS, play_branched
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.rollout.made_up import Players, Script, first_steps, rightness, silence
from maporl.schedules import Plan
from maporl.tasks import Task
from maporl.training.samples import samples_by_policy, turn_batch, untrained_columns
from maporl.types import Dialogue, Grade
from trl_ext.ppo.options import Decoding

MOST = 256
"""The dialogues of a rehearsal. More of them show nothing new, and a check takes seconds."""
FEW = 8
"""The dialogues of a dry run in environments, of which each may be a session on a server."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The inputs that decide which rows of an update are compared.

    Args:
        task: the questions.
        protocol: the protocol, as a dry run of the first update plays it.
        specs: what a driver needs to know of the agents, for whom an engine called ``players`` answers.
        decoding: how answers are sampled.
        world: the tools and environments.
        branching: the number of dialogues for each question, and where they fork.
        reward: which utterances have a credit.
        advantages: what of each agent is compared with what.
        plans: what learns in the updates.
        questions: the questions of an update, of all processes.
    """

    task: Task
    protocol: Protocol
    specs: Mapping[str, SpeakerSpec]
    decoding: Decoding
    world: World
    branching: BranchingSection
    reward: RewardSection
    advantages: Mapping[str, AdvantageConfig]
    plans: Sequence[Plan]
    questions: int

    def driver(self, script: Script) -> RolloutDriver:
        """Return a driver in which all agents speak by a script."""
        players = dict.fromkeys((spec.engine for spec in self.specs.values()), Players(script))
        seed = self.branching.common_seed
        return RolloutDriver(self.task, self.protocol, self.specs, players, self.decoding, None, seed, world=self.world)


def lonely_groups(grouping: Grouping) -> Iterator[Fault]:
    """Yield an error if rows of an update have no others to be compared with, and a warning if that depends on the
    words.

    It is an error where it happens with empty answers, and with right answers and legal moves too.
    """
    if all(return_of(own).per_token or own.singleton != "error" for own in grouping.advantages.values()):
        return
    empty = _group_of_one(grouping, silence)
    right = _group_of_one(grouping, rightness)
    if empty is not None and right is not None:
        yield Fault.of(empty)
    for how, error in {"with empty or illegal answers": empty, "with right answers": right}.items():
        if error is not None:
            yield Fault.of(ValueError(f"{error} This happens to dialogues {how}."), "warning")


def _group_of_one(grouping: Grouping, script: Script) -> GroupOfOne | None:
    """Return the error of a group with a single member in an update whose answers are those of ``script``, or None."""
    task, branching, reward = grouping.task, grouping.branching, grouping.reward
    (first,), ended = first_steps(grouping.driver(script), [task[0]])
    if not ended:
        return None  # it is not known what else would be said
    orders = [u.order for u in first.utterances]
    each = BRANCHINGS[branching.how].dialogues(branching, [orders.count(o) for o in dict.fromkeys(orders)])
    few = grouping.world.environments or grouping.protocol.waits
    played = min(grouping.questions, (FEW if few else MOST) // each)
    by_question = all("prompt" in own.key for own in grouping.advantages.values())
    if played == 0 or (played < grouping.questions and not by_question):
        return None  # groups are larger than what could be played here
    examples = [task[number % len(task)] for number in range(played)]
    dialogues = play_branched(grouping.driver(script), examples, branching, lambda some: [0.0] * len(some))
    everything = [*dialogues, *(ablation for dialogue in dialogues for ablation in dialogue.ablations)]
    for utterance in (u for d in everything for u in d.utterances):
        if utterance.answers:
            utterance.grade = utterance.grade or Grade(utterance.text, None, "a rehearsal")
        scored = utterance.rewards.keys() & reward.sources.keys() or scores_others(reward, utterance)
        if utterance.answers or scored:
            utterance.rewards["score"] = 0.0
    set_contributions(dialogues)
    assign_credit(dialogues, tuple(grouping.specs), reward)
    try:
        for plan in {str(plan): plan for plan in grouping.plans}.values():
            _compare(grouping, dialogues, plan)
    except GroupOfOne as error:
        return error
    return None


def _compare(grouping: Grouping, dialogues: list[Dialogue], plan: Plan) -> None:
    """Compute advantages as an update does, with rewards of 0."""
    specs = grouping.specs.values()
    learning = {policy: None for spec in specs for policy in spec.policies if policy in spec.learning}
    samples = samples_by_policy(dialogues, learning, plan, 1)  # type: ignore[arg-type]  # the critic reads no prompt here
    trained = [sample.columns for some in samples.values() for sample in some]
    alike = {str(own): own for own in grouping.advantages.values()}
    for advantage in alike.values():
        columns = [entry for entry in trained if grouping.advantages[entry.values["agent"]] == advantage]
        if not columns or return_of(advantage).per_token:
            continue
        if any(transform.needs_untrained_rows for transform in build_transforms(advantage)):
            columns += untrained_columns(dialogues, {entry.name for entry in columns})
        zeros = [0.0] * len(columns)
        value = zeros if baseline_of(advantage).needs_critic else None
        estimate_all(turn_batch(columns, zeros, value), advantage, scaled=False)
