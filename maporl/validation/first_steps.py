"""Plays the first steps of dialogues, so that a check takes seconds whatever a protocol allows. No model is loaded."""

from collections.abc import Sequence

from maporl.rollout.driver import RolloutDriver
from maporl.types import Dialogue, Example

MOST_STEPS = 128
"""The steps of a dialogue that are rehearsed. Where each prompt holds all earlier ones, the work grows with their square."""


def first_steps(driver: RolloutDriver, examples: Sequence[Example]) -> tuple[list[Dialogue], bool]:
    """Play a dialogue on each example, up to :data:`MOST_STEPS` steps. Return them, and whether all of them ended.

    Raises:
        ConfigError: the protocol or an environment fails.
    """
    episodes = driver.opened(examples)
    for _ in range(MOST_STEPS):
        if going := [episode for episode in episodes if not episode.over]:
            driver.step(going)
    ended = all(episode.over for episode in episodes)
    driver.release()
    return [episode.dialogue for episode in episodes], ended
