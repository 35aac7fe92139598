"""How many continuations a question is played in, and from where. ``BRANCHINGS`` names every way. No torch.

A branching is ``(driver, examples, section, judge, rng) -> dialogues``: it opens dialogues, advances and forks them.
Dialogues of one question have its ``prompt`` number and ``rollout`` numbers of their own; utterances that they share have
one ``sample`` name. ``judge`` says what each dialogue's newest utterances are worth; it looks at each dialogue by itself.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from maporl.config.schema import BranchingSection
from maporl.rollout.driver import Episode, RolloutDriver
from maporl.types import Dialogue, Example, Utterance

Numbers = defaultdict[int, "itertools.count[int]"]
"""The next free rollout number of each question."""
Judge = Callable[[list[Dialogue]], list[float]]
"""The worth of dialogues that hold their newest utterances only; each is judged by itself, so that a family waits for no other."""


def independent(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge, rng: random.Random
) -> list[Dialogue]:
    """``group`` dialogues from the beginning."""
    return driver.play(examples, section.group)


def fork_first(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge, rng: random.Random
) -> list[Dialogue]:
    """Forked before the first step, from there one by one (MHGPO's fork on first, arXiv 2506.02718)."""
    return _fork_once(driver, examples, section, lambda steps: 0)


def fork_random(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge, rng: random.Random
) -> list[Dialogue]:
    """One dialogue to its end, then forked before a random one of its steps (MHGPO's round robin)."""
    return _fork_once(driver, examples, section, lambda steps: rng.randrange(max(1, steps)))


def fork_every(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge, rng: random.Random
) -> list[Dialogue]:
    """Forked before every step: ``group ** steps`` dialogues (MAGRPO, arXiv 2508.04652; MALT's tree, 2412.01928).

    With ``joint: cross`` every combination of simultaneous answers is gone on with: ``group ** speakers`` of each step.
    """
    numbers: Numbers = defaultdict(lambda: itertools.count(1))
    episodes = [driver.open(e, prompt) for prompt, e in enumerate(examples)]
    over: list[Episode] = []
    while episodes:
        families = [driver.branch(one, _next(numbers, one, section.group - 1)) for one in episodes]
        driver.step([twin for family in families for twin in family])
        if section.joint == "cross":
            families = [_crossed(driver, family, numbers) for family in families]
        everybody = [twin for family in families for twin in family]
        over += [one for one in everybody if one.over]
        episodes = [one for one in everybody if not one.over]
    return _in_order(over)


def tree(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge, rng: random.Random
) -> list[Dialogue]:
    """``group`` candidates from the same state at every step, each with an outcome of its own; one is gone on with, the
    best or a random one (AT-GRPO, PettingLLMs). The others end there."""
    numbers: Numbers = defaultdict(lambda: itertools.count(1))
    episodes = [driver.open(e, prompt) for prompt, e in enumerate(examples)]
    done: list[Episode] = []
    while episodes:
        families = [driver.branch(one, _next(numbers, one, section.group - 1)) for one in episodes]
        everybody = [twin for family in families for twin in family]
        worth = _worth(everybody, driver.step(everybody), judge)
        chosen = [
            max(family, key=lambda one: worth[id(one)]) if section.pick == "best" else rng.choice(family)
            for family in families
        ]
        done += [one for one in everybody if one.over or not any(one is c for c in chosen)]
        episodes = [one for one in chosen if not one.over]
    return _in_order(done)


def best_of(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge, rng: random.Random
) -> list[Dialogue]:
    """The best of ``drafts`` first steps, which nobody learns from, then ``group`` dialogues (iGRPO, arXiv 2602.09000)."""
    episodes = [driver.open(e, prompt) for prompt, e in enumerate(examples)]
    families = [driver.branch(one, list(range(section.group, section.group + section.drafts - 1))) for one in episodes]
    everybody = [draft for family in families for draft in family]
    news = driver.step(everybody)
    for said in news:
        for utterance in said:
            utterance.trainable = False
    worth = _worth(everybody, news, judge)
    played: list[Episode] = []
    for family in families:
        best = max(family, key=lambda one: worth[id(one)])
        best.dialogue.rollout = 0
        played += driver.branch(best, list(range(1, section.group)))
    driver.finish(played)
    return [one.dialogue for one in played]


def _worth(episodes: list[Episode], news: list[list[Utterance]], judge: Judge) -> dict[int, float]:
    """What the newest utterances of each episode are worth, by its ``id``."""
    said = [replace(episode.dialogue, utterances=new) for episode, new in zip(episodes, news, strict=True)]
    return dict(zip(map(id, episodes), judge(said), strict=True))


def _fork_once(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, where: Callable[[int], int]
) -> list[Dialogue]:
    trunks = [driver.open(e, prompt) for prompt, e in enumerate(examples)]
    driver.finish(trunks)
    forks = [
        [driver.fork(one, r, steps) for r in range(1, section.group)]
        for one, steps in ((one, where(len(one.sent))) for one in trunks)
    ]
    for one, twins in zip(trunks, forks, strict=True):
        depth = len(twins[0].sent)
        name = f"question {one.dialogue.prompt}, step {depth}"
        for said in one.sent[depth : depth + 1]:
            for utterance in said:
                utterance.tags.setdefault("state", name)
        for twin in twins:
            twin.state = name
    driver.finish([twin for twins in forks for twin in twins])
    return [one.dialogue for trunk, twins in zip(trunks, forks, strict=True) for one in (trunk, *twins)]


def _crossed(driver: RolloutDriver, family: list[Episode], numbers: Numbers) -> list[Episode]:
    """Every combination of the last step's answers of a family, which said them in one state."""
    last = [one.sent[-1] for one in family]
    if len(last[0]) == 1:
        return family
    before = driver.fork(family[0], 0, len(family[0].sent) - 1)
    crossed = []
    for choice in itertools.product(range(len(family)), repeat=len(last[0])):
        diagonal = len(set(choice)) == 1
        if diagonal:
            crossed.append(family[choice[0]])
            continue
        joint = driver.fork(before, _next(numbers, before, 1)[0])
        driver.put(joint, [(family[c], last[c][seat]) for seat, c in enumerate(choice)])
        crossed.append(joint)
    return crossed


def _next(numbers: Numbers, one: Episode, count: int) -> list[int]:
    return list(itertools.islice(numbers[one.dialogue.prompt], count))


def _in_order(episodes: list[Episode]) -> list[Dialogue]:
    dialogues = [one.dialogue for one in episodes]
    return sorted(dialogues, key=lambda d: (d.prompt, d.rollout))


BRANCHINGS: dict[str, Any] = {
    "independent": independent,
    "fork_first": fork_first,
    "fork_random": fork_random,
    "fork_every": fork_every,
    "tree": tree,
    "best_of": best_of,
}


def play_branched(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge, rng: random.Random
) -> list[Dialogue]:
    """The dialogues of ``examples``, those of one question together."""
    dialogues = BRANCHINGS[section.how](driver, examples, section, judge, rng)
    driver.release()
    return dialogues
