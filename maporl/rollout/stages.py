"""A branching that samples a group at every step, and lets chosen outputs go on: MarsRL's stages, SDRL's pairs.

No torch.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from maporl.errors import ConfigError
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import Episode
from maporl.types import Utterance

Chosen = list[list[tuple[Episode, Utterance]]]
"""What goes on: for each output, the utterance of every speaker of the step and the episode in which it was said."""


def choose(branches: list[Episode], how: str, keep: int, rng: random.Random) -> Chosen:
    """Choose ``keep`` outputs of a step from the ``branches`` of a question. What ended is not chosen.

    Args:
        branches: the episodes after the step. Their utterances are scored.
        how: ``random``; ``balanced``: good and bad ones in turn, by their worth; ``adaptive``: bad answers, and what is
            good among other words, such as true reports of errors; ``frequent``: one of each of the commonest answers,
            and nothing if all are equal.
        keep: how many outputs go on.
        rng: draws among equals.

    Raises:
        ConfigError: several agents spoke in the step, and ``how`` looks at the worth of single outputs.
    """
    going = [branch for branch in branches if not branch.over]
    if not going:
        return []
    speakers = len(going[0].sent[-1])
    if how == "frequent":
        return _frequent(branches, going, speakers, keep, rng)
    shuffled = rng.sample(going, len(going))
    if speakers == 1:
        if how == "adaptive":
            shuffled.sort(key=lambda e: _worth(e) if e.sent[-1][0].answers else -_worth(e))
        if how == "balanced":
            shuffled.sort(key=_worth, reverse=True)
            shuffled = [shuffled.pop(0 if number % 2 == 0 else -1) for number in range(len(shuffled))]
        return [[(episode, episode.sent[-1][0])] for episode in shuffled[:keep]]
    if how != "random":
        raise ConfigError(f"branching.choose: {how} needs one speaker, and {speakers} speak; use random or frequent")
    picked = (dict(zip(_by_name(going), rng.choices(going, k=speakers), strict=True)) for _ in range(keep))
    return [[(said[s], said[s].sent[-1][s]) for s in range(speakers)] for said in picked]


def _by_name(going: list[Episode]) -> list[int]:
    """Return the speakers of the last step by their names, so that the order in which agents are declared decides
    nothing."""
    said = going[0].sent[-1]
    return sorted(range(len(said)), key=lambda s: said[s].agent)


def _frequent(branches: list[Episode], going: list[Episode], speakers: int, keep: int, rng: random.Random) -> Chosen:
    """Return outputs of the commonest answers. Several speakers get one each, in a random order."""
    by_answer: dict[str, dict[int, list[Episode]]] = defaultdict(lambda: defaultdict(list))
    counts = Counter(u.grade.answer for e in branches for u in e.sent[-1] if u.grade is not None and u.grade.answer)
    for episode in going:
        for speaker, u in enumerate(episode.sent[-1]):
            if u.grade is not None and u.grade.answer is not None:
                by_answer[u.grade.answer][speaker].append(episode)
    often = sorted(counts, key=lambda answer: (-counts[answer], answer))[: max(keep, speakers)]
    common = [answer for answer in often if answer in by_answer]
    if len(counts) < 2:
        return []
    if speakers == 1:
        return [[_one(by_answer[answer][0], 0, rng)] for answer in common[:keep]]
    chosen: Chosen = []
    for _ in range(keep):
        order = rng.sample(common[:speakers], min(speakers, len(common)))
        for answers in (order, order[::-1]):
            pairs = list(zip(_by_name(going), answers, strict=False))
            if len(answers) == speakers and all(by_answer[a][s] for s, a in pairs):
                said = {s: _one(by_answer[a][s], s, rng) for s, a in pairs}
                chosen.append([said[s] for s in range(speakers)])
                break
    return chosen


def _worth(episode: Episode) -> float:
    return episode.sent[-1][0].rewards.get("score", 0.0)


def _one(episodes: Sequence[Episode], speaker: int, rng: random.Random) -> tuple[Episode, Utterance]:
    episode = rng.choice(episodes)
    return episode, episode.sent[-1][speaker]


def going_on(
    driver: RolloutDriver, chosen: Chosen, number: Callable[[Episode], int]
) -> tuple[list[Episode], list[Episode]]:
    """Return the episodes that go on with the ``chosen`` outputs, and those of them that are new.

    An output of one episode goes on in that episode. Words of several episodes become a new one, whose rollout is
    ``number(episode)``.
    """
    going: list[Episode] = []
    new: list[Episode] = []
    for said in chosen:
        first = min(said, key=lambda one: one[1].agent)[0]
        if all(episode is first for episode, _ in said) and not any(first is other for other in going):
            going.append(first)
            continue
        before = driver.fork(first, number(first), len(first.sent) - 1)
        driver.put(before, said)
        if not before.over:
            going.append(before)
        new.append(before)
    return going, new
