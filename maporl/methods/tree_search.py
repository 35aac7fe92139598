"""The branching ``tree_search``: AB-MCTS-A's Thompson sampling over new attempts, old attempts and agents. No torch.

The search is that of Inoue et al. 2025 (arXiv 2503.04412, AB-MCTS with node aggregation), by which MARS² (arXiv
2604.14564) trains. Every choice draws one value from the posterior of each option, given the scores that the option has
led to, and takes the option with the largest value.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from maporl.config.schema import BranchingSection
from maporl.errors import ConfigError
from maporl.rollout.branching import Earned, Judge, Numbers, in_order, next_numbers, restore
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import Episode
from maporl.types import Dialogue, Example

Posterior = Literal["gaussian", "beta"]
"""The family of an option's mean score: normal-inverse-gamma, or beta."""
KAPPA, NU, TAU_SQUARE = 1.0, 1.0, 0.1
"""The prior of ``gaussian``: as sure as one score of 0, with a variance of 0.1 that is known as well as from one score.
"""
JEFFREYS = 0.5
"""Both parameters of the prior of ``beta``."""


@dataclass
class Node:
    """A node of the search tree: an utterance that answers what its parent has led to, or the question.

    Args:
        episode: the dialogue in which it was said.
        depth: the number of steps of that dialogue up to it. The root has 0.
        score: what it earned. The root has none.
        children: what was said next, in order.
    """

    episode: Episode
    depth: int = 0
    score: float = 0.0
    children: list["Node"] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the dialogue ended with it, so that nothing can be said next."""
        return self.episode.over and len(self.episode.sent) == self.depth

    def scores(self) -> Iterator[float]:
        """Yield its own score and those of all that follows from it."""
        yield self.score
        yield from self.below()

    def below(self) -> Iterator[float]:
        """Yield the scores of all that follows from it."""
        for child in self.children:
            yield from child.scores()


def parameters(scores: Sequence[float]) -> tuple[float, float, float, float]:
    """Return mean, kappa, nu and tau² of the normal-inverse-gamma posterior of ``scores``.

    They are those of Murphy, "Probabilistic Machine Learning: Advanced Topics", section 3.4.3.3, with a prior mean of
    0.

    >>> [round(value, 4) for value in parameters([1.0, 0.0])]
    [0.3333, 3.0, 3.0, 0.2556]
    """
    count = len(scores)
    mean = sum(scores) / count if count else 0.0
    spread = sum((score - mean) ** 2 for score in scores)
    kappa, nu = KAPPA + count, NU + count
    tau_square = (NU * TAU_SQUARE + spread + count * KAPPA * mean**2 / kappa) / nu
    return count * mean / kappa, kappa, nu, tau_square


def drawn(scores: Sequence[float], posterior: Posterior, rng: random.Random) -> float:
    """Draw the mean score of an option from its posterior, given the ``scores`` that it has led to.

    Raises:
        ConfigError: ``posterior`` is beta, and a score is below 0 or above 1.
    """
    if posterior == "beta":
        for score in scores:
            if not 0 <= score <= 1:
                raise ConfigError(f"branching.posterior: beta is for scores from 0 to 1, got {score:g}; set gaussian")
        right = sum(scores)
        return rng.betavariate(JEFFREYS + right, JEFFREYS + len(scores) - right)
    mean, kappa, nu, tau_square = parameters(scores)
    variance = nu * tau_square / 2 / rng.gammavariate(nu / 2, 1.0)
    return rng.normalvariate(mean, (variance / kappa) ** 0.5)


def where_to(root: Node, posterior: Posterior, rng: random.Random) -> Node:
    """Return the attempt that gets a new child, by one walk from the ``root``.

    At each attempt, a new child is compared with going on: the scores of its children speak for the one, and those of
    all that follows from its children for the other. Going on means the child with the largest value, by its own score
    and by those of what follows from it. What has no children gets one, and a child with which its dialogue ended gets
    none.
    """
    node = root
    while going := [child for child in node.children if not child.over]:
        new = drawn([child.score for child in node.children], posterior, rng)
        on = drawn([score for child in node.children for score in child.below()], posterior, rng)
        if new >= on:
            break
        values = [drawn(list(child.scores()), posterior, rng) for child in going]
        node = going[values.index(max(values))]
    return node


def who_speaks(earned: Mapping[str, Sequence[float]], posterior: Posterior, rng: random.Random) -> str:
    """Return the agent that makes the next attempt, by all scores that each agent has ``earned`` in the tree."""
    if len(earned) == 1:
        return next(iter(earned))
    values = {agent: drawn(scores, posterior, rng) for agent, scores in earned.items()}
    return max(values, key=values.__getitem__)


def tree_search(
    driver: RolloutDriver, examples: list[Example], section: BranchingSection, judge: Judge
) -> list[Dialogue]:
    """Grow a tree of ``group`` utterances for each question. Each is said to the question, or after an earlier one.

    Thompson sampling decides after which one, and, if the protocol leaves it open, which agent speaks (AB-MCTS-A, by
    which MARS², arXiv 2604.14564, trains). Every path from the question to a leaf is
    a dialogue. What an utterance earned when it was judged is final.
    """
    numbers: Numbers = defaultdict(lambda: itertools.count(1))
    roots = [Node(episode) for episode in driver.opened(examples)]
    agents: list[dict[str, list[float]]] = [{name: [] for name in driver.specs} for _ in roots]
    episodes = [root.episode for root in roots]
    draws = [driver.draws(episode.dialogue.prompt) for episode in episodes]
    earned: list[Earned] = []
    for _ in range(section.most):
        parents = [where_to(root, section.posterior, rng) for root, rng in zip(roots, draws, strict=True)]
        branches = [_after(driver, parent, numbers) for parent in parents]
        if driver.protocol.any_agent:
            for branch, scores, rng in zip(branches, agents, draws, strict=True):
                driver.address(branch, who_speaks(scores, section.posterior, rng))
        new = driver.step(branches)
        judge([branch.dialogue for branch in branches])
        for branch, parent, scores, said in zip(branches, parents, agents, new, strict=True):
            score = math.fsum(u.rewards.get("score", 0.0) for u in said)
            parent.children.append(Node(branch, len(branch.sent), score))
            scores[said[0].agent].append(score)
            earned += [(branch.dialogue.prompt, u, dict(u.rewards)) for u in said]
        episodes += [branch for branch in branches if not any(branch is episode for episode in episodes)]
    dialogues = in_order(episodes)
    restore(dialogues, earned)
    return dialogues


def _after(driver: RolloutDriver, parent: Node, numbers: Numbers) -> Episode:
    """Return an episode that stands right after ``parent``: its own, or a fork of it if that has gone on."""
    episode = parent.episode
    if len(episode.sent) > parent.depth:
        episode = driver.fork(episode, next_numbers(numbers, episode, 1)[0], parent.depth)
    episode.state = (
        f"question {episode.dialogue.prompt}, rollout {parent.episode.dialogue.rollout}, step {parent.depth}"
    )
    return episode
