"""Dry runs with mock completions and no model: an engine that answers by a script and records its requests."""

import random
import warnings
from collections.abc import Callable, Mapping, Sequence

from maporl.engines.base import Engine, Reply, Request
from maporl.rollout.driver import RolloutDriver
from maporl.types import Dialogue, Example, Stop
from trl_ext.chat.encoding import Tokenizer
from trl_ext.chat.templates import try_grammar
from trl_ext.ppo.options import Decoding

MOST_STEPS = 128
"""The steps of a dialogue in a dry run.

Where each prompt holds all earlier ones, the work grows with their square.
"""
Script = Callable[[Request], str]


class Players(Engine):
    """An engine with mock completions of a script. It records its requests, and the number of tokens of each prompt.

    Args:
        script: what is said to each request.
        tokenizers: those of the agents whose prompts are counted. An agent without one, such as a person, is not
            measured.
    """

    tells_tokens = True

    def __init__(self, script: Script, tokenizers: Mapping[str, Tokenizer] | None = None):
        self.script, self.tokenizers = script, tokenizers or {}
        self.requests: list[Request] = []
        self.prompts: list[tuple[Request, int]] = []

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return one reply of one token for each request."""
        self.requests += requests
        for request in (request for request in requests if request.ask.agent in self.tokenizers):
            prompt = request.transcript.add_messages(request.messages, self.tokenizers[request.ask.agent], frozenset())
            request.transcript.add_completion(request.utterance, [], ended=False)
            self.prompts.append((request, len(prompt)))
        said = [Reply(self._words(r), prompt_ids=[0], response_ids=[0], stop=Stop.EOS) for r in requests]
        for request, reply in zip(requests, said, strict=True):
            reply.tokens = [(one, 0.0, [(one, 0.0)][: request.ask.alternatives]) for one in reply.text]
        return said

    def _words(self, request: Request) -> str:
        """Return what is said to a request: a short text of its grammar, if it has one."""
        form = request.structured_output
        return self.script(request) if form is None else try_grammar(form.text).get("example", "")


def first_steps(driver: RolloutDriver, examples: Sequence[Example]) -> tuple[list[Dialogue], bool]:
    """Play a dialogue on each example, up to :data:`MOST_STEPS` steps. Return them, and whether all of them ended.

    Raises:
        ConfigError: the protocol or an environment fails.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a program that fails on made-up words says so in the outcome
        episodes = driver.opened(examples)
        for _ in range(MOST_STEPS):
            if going := [episode for episode in episodes if not episode.over]:
                driver.step(going)
        ended = all(episode.over for episode in episodes)
        driver.release()
    return [episode.dialogue for episode in episodes], ended


def silence(request: Request) -> str:
    """Say nothing."""
    return ""


def rightness(request: Request) -> str:
    """Return a legal move of a game, or the right answer."""
    moves = request.ask.tags.get("moves")
    return random.Random(request.label).choice(moves) if moves else request.example.answer
