"""Branchings decide how many dialogues each question gets, and where they fork. ``BRANCHINGS`` names them. No torch.

A branching is a function ``(driver, examples, section, judge) -> dialogues``. It opens, advances and forks
dialogues. The dialogues of one question share its ``prompt`` number and have different ``rollout`` numbers. An
utterance that dialogues share has one ``sample`` name. ``judge`` returns the worth of each dialogue's newest
utterances. Whatever it draws about a question comes from ``driver.draws``, so that a question is played alike in one
process and in eight. A :class:`Branching` adds what a configuration's checks must know of the function.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from maporl.config.imports import extension
from maporl.config.schema import BranchingSection
from maporl.rollout.ablation import add_ablations
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import Episode
from maporl.rollout.stages import choose, going_on
from maporl.types import Dialogue, Example, Utterance

Numbers = defaultdict[int, "itertools.count[int]"]
"""The next free rollout number of each question."""
Judge = Callable[[list[Dialogue]], list[float]]
"""Scores the utterances of each dialogue, which may hold only its newest ones, and returns the sum of their scores.
Each dialogue is judged separately."""
BranchedPlay = Callable[[RolloutDriver, list[Example], BranchingSection, Judge], list[Dialogue]]
Earned = tuple[int, Utterance, dict[str, float]]
"""The number of a question, an utterance, and the utterance's rewards when it was judged."""


def independent(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge
) -> list[Dialogue]:
    """Play ``group`` independent dialogues for each question."""
    return driver.play(examples, section.most)


def fork_first(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge
) -> list[Dialogue]:
    """Fork each dialogue before its first step (fork-on-first of MHGPO, arXiv 2506.02718)."""
    return _fork_once(driver, examples, section, lambda trunk: 0)


def fork_random(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge
) -> list[Dialogue]:
    """Play one dialogue to its end, then fork it before a random step (round-robin of MHGPO)."""
    return _fork_once(
        driver, examples, section, lambda trunk: driver.draws(trunk.dialogue.prompt).randrange(max(1, len(trunk.sent)))
    )


def fork_every(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge
) -> list[Dialogue]:
    """Fork before every step, into ``group ** steps`` dialogues (MAGRPO, arXiv 2508.04652; MALT's tree, 2412.01928).

    A list ``group`` has a number for each step: ``[2, 4]`` makes 2 first messages and 4 answers to each (C3,
    2603.06859).

    With ``joint: cross``, every combination of simultaneous answers continues: ``group ** speakers`` at each step.
    """
    numbers: Numbers = defaultdict(lambda: itertools.count(1))
    episodes = driver.opened(examples)
    over: list[Episode] = []
    while episodes:
        groups = [_fanned(driver, episode, section, numbers) for episode in episodes]
        driver.step([branch for group in groups for branch in group])
        if section.joint == "cross":
            groups = [_crossed(driver, group, numbers) for group in groups]
        branches = [branch for group in groups for branch in group]
        over += [branch for branch in branches if branch.over]
        episodes = [branch for branch in branches if not branch.over]
    return in_order(over)


def tree(driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge) -> list[Dialogue]:
    """Sample ``group`` candidates from the same state at every step, and continue one of them (AT-GRPO, PettingLLMs).

    ``pick`` says whether the best or a random candidate continues. The others end there. What a candidate earned when
    it was judged is final. Payments that later moves cause would otherwise go to the one candidate that continued, and
    its equals would seem worse.
    """
    numbers: Numbers = defaultdict(lambda: itertools.count(1))
    episodes = driver.opened(examples)
    done: list[Episode] = []
    earned: list[Earned] = []
    while episodes:
        groups = [_fanned(driver, episode, section, numbers) for episode in episodes]
        branches = [branch for group in groups for branch in group]
        new = driver.step(branches)
        worth = _worth(branches, new, judge)
        for branch, said in zip(branches, new, strict=True):
            earned += [(branch.dialogue.prompt, u, dict(u.rewards)) for u in said]
        chosen = [
            max(group, key=lambda branch: worth[id(branch)])
            if section.pick == "best"
            else driver.draws(group[0].dialogue.prompt, len(group[0].sent)).choice(group)
            for group in groups
        ]
        left = [branch for branch in branches if not any(branch is c for c in chosen)]
        driver.give_up(left)
        done += [branch for branch in branches if branch.over or any(branch is one for one in left)]
        episodes = [branch for branch in chosen if not branch.over]
    dialogues = in_order(done)
    restore(dialogues, earned)
    return dialogues


def stages(driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge) -> list[Dialogue]:
    """Sample ``group`` outputs at every step, and continue ``keep`` of a question's outputs with a group each.

    ``choose`` says which (:func:`maporl.rollout.stages.choose`). The others end there. MarsRL (arXiv 2511.11373) trains
    solvers, verifiers and correctors so, and SDRL (arXiv 2601.22297) first answers and answers to pairs of them. Where
    several agents speak in a step, what goes on may combine words of several dialogues. What an output earned when it
    was judged is final.
    """
    numbers: Numbers = defaultdict(lambda: itertools.count(1))
    episodes = driver.opened(examples)
    ended: list[Episode] = []
    earned: list[Earned] = []
    while episodes:
        branches = [branch for episode in episodes for branch in _fanned(driver, episode, section, numbers)]
        new = driver.step(branches)
        judge([branch.dialogue for branch in branches])  # whole, because a verdict is judged by its draft
        for branch, said in zip(branches, new, strict=True):
            earned += [(branch.dialogue.prompt, u, dict(u.rewards)) for u in said]
        questions: dict[int, list[Episode]] = {}
        for branch in branches:
            questions.setdefault(branch.dialogue.prompt, []).append(branch)
        episodes, made = [], []
        for prompt, siblings in questions.items():
            chosen = choose(siblings, section.choose, section.keep, driver.draws(prompt, len(siblings[0].sent)))
            going, added = going_on(driver, chosen, lambda episode: next_numbers(numbers, episode, 1)[0])
            episodes += going
            made += added
        left = [branch for branch in [*branches, *made] if not any(branch is going for going in episodes)]
        driver.give_up(left)
        ended += left
    dialogues = in_order(ended)
    restore(dialogues, earned)
    return dialogues


def best_of(driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge) -> list[Dialogue]:
    """Sample ``drafts`` first steps, and play ``group`` dialogues from the best one (iGRPO, arXiv 2602.09000).

    No policy is trained on the drafts.
    """
    episodes = driver.opened(examples)
    numbers = list(range(section.most, section.most + section.drafts - 1))
    groups = [driver.branch(episode, numbers) for episode in episodes]
    drafts = [draft for group in groups for draft in group]
    new = driver.step(drafts)
    for utterances in new:
        for utterance in utterances:
            utterance.trainable = False
    worth = _worth(drafts, new, judge)
    played: list[Episode] = []
    for group in groups:
        best = max(group, key=lambda draft: worth[id(draft)])
        driver.give_up([draft for draft in group if draft is not best])
        best.dialogue.rollout = 0
        played += driver.branch(best, list(range(1, section.most)))
    driver.finish(played)
    return [episode.dialogue for episode in played]


def restore(dialogues: list[Dialogue], earned: list[Earned]) -> None:
    """Give each utterance, and its copies in forks, the rewards that it had ``earned`` when it was judged."""
    shared = {(prompt, u.sample): rewards for prompt, u, rewards in earned if u.sample is not None}
    for _, utterance, rewards in earned:
        utterance.rewards = dict(rewards)
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if u.sample is not None:
                u.rewards = dict(shared[dialogue.prompt, u.sample])


def _worth(episodes: list[Episode], new: list[list[Utterance]], judge: Judge) -> dict[int, float]:
    """Return the worth of each episode's ``new`` utterances, by the episode's ``id``."""
    dialogues = [replace(episode.dialogue, utterances=said) for episode, said in zip(episodes, new, strict=True)]
    return dict(zip(map(id, episodes), judge(dialogues), strict=True))


def _fork_once(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, where: Callable[[Episode], int]
) -> list[Dialogue]:
    trunks = driver.opened(examples)
    driver.finish(trunks)
    groups = []
    for trunk in trunks:
        steps = where(trunk)
        groups.append([driver.fork(trunk, rollout, steps) for rollout in range(1, section.most)])
    for trunk, forks in zip(trunks, groups, strict=True):
        depth = len(forks[0].sent)
        name = f"question {trunk.dialogue.prompt}, step {depth}"
        for utterances in trunk.sent[depth : depth + 1]:
            for utterance in utterances:
                utterance.tags.setdefault("state", name)
        for fork in forks:
            fork.state = name
    driver.finish([fork for forks in groups for fork in forks])
    return [e.dialogue for trunk, forks in zip(trunks, groups, strict=True) for e in (trunk, *forks)]


def _crossed(driver: RolloutDriver, branches: list[Episode], numbers: Numbers) -> list[Episode]:
    """Return an episode for every combination of the branches' last answers, which were given in one state."""
    last = [branch.sent[-1] for branch in branches]
    if len(last[0]) == 1:
        return branches
    before = driver.fork(branches[0], 0, len(branches[0].sent) - 1)
    crossed = []
    for choice in itertools.product(range(len(branches)), repeat=len(last[0])):
        if len(set(choice)) == 1:  # all answers are from one branch
            crossed.append(branches[choice[0]])
            continue
        joint = driver.fork(before, next_numbers(numbers, before, 1)[0])
        driver.put(joint, [(branches[c], last[c][speaker]) for speaker, c in enumerate(choice)])
        crossed.append(joint)
    return crossed


def _fanned(driver: RolloutDriver, episode: Episode, section: BranchingSection, numbers: Numbers) -> list[Episode]:
    """Return the branches of an episode before its next step, itself among them."""
    return driver.branch(episode, next_numbers(numbers, episode, section.at(len(episode.sent)) - 1))


def next_numbers(numbers: Numbers, episode: Episode, count: int) -> list[int]:
    """Return the next ``count`` free rollout numbers of the episode's question."""
    return list(itertools.islice(numbers[episode.dialogue.prompt], count))


def in_order(episodes: list[Episode]) -> list[Dialogue]:
    """Return the dialogues of ``episodes``, by question and rollout."""
    dialogues = [episode.dialogue for episode in episodes]
    return sorted(dialogues, key=lambda d: (d.prompt, d.rollout))


Steps = Sequence[int]
"""The number of utterances of each step of a dialogue."""


def _group(section: BranchingSection, steps: Steps) -> int:
    return section.most


def _every_fork(section: BranchingSection, steps: Steps) -> int:
    return math.prod(section.at(i) ** (speakers if section.joint == "cross" else 1) for i, speakers in enumerate(steps))


def _staged(section: BranchingSection, steps: Steps) -> int:
    dialogues, branches = 0, section.at(0)
    for i, speakers in enumerate(steps[:-1]):
        going = section.keep if speakers > 1 else min(section.keep, branches)
        dialogues += branches - (0 if speakers > 1 else going)
        branches = going * section.at(i + 1)
    return dialogues + branches


def _candidates(section: BranchingSection, steps: Steps) -> int:
    return 1 + len(steps) * (section.most - 1)


@dataclass(frozen=True)
class Branching:
    """A branching: its function, and what the checks of a configuration must know of it.

    Args:
        play: the function, or for that of an extension its name.
        judges: whether it compares utterances as soon as they are said. Every step of the protocol must then be scored.
        final: whether an utterance's credit is what it earned when it was judged, because only one of the utterances
            that are compared continues. No reward and no return may then look at what follows.
        dialogues: how many dialogues it plays for a question whose dialogues take these steps. ``maporl check`` prints
            this number.
    """

    play: BranchedPlay | str
    judges: bool = False
    final: bool = False
    dialogues: Callable[[BranchingSection, Steps], int] = _group


BRANCHINGS: dict[str, Branching] = {
    "independent": Branching(independent),
    "fork_first": Branching(fork_first),
    "fork_random": Branching(fork_random),
    "fork_every": Branching(fork_every, dialogues=_every_fork),
    "tree": Branching(tree, judges=True, final=True, dialogues=_candidates),
    "best_of": Branching(best_of, judges=True),
    "stages": Branching(stages, judges=True, final=True, dialogues=_staged),
    "tree_search": Branching("maporl.methods.tree_search:tree_search", judges=True, final=True),
}


def play_branched(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge
) -> list[Dialogue]:
    """Play the ``examples`` with the branching that ``section`` names. The dialogues of one question stand together.

    With ``section.ablate`` each dialogue has :attr:`maporl.Dialogue.ablations`.
    """
    named = BRANCHINGS[section.how].play
    play = extension(named, f"branching.how: {section.how}") if isinstance(named, str) else named
    dialogues = play(driver, examples, section, judge)
    if section.ablate is not None:
        add_ablations(driver, [dialogue for dialogue in dialogues if not dialogue.lost], section.ablate)
    driver.release()
    return dialogues
