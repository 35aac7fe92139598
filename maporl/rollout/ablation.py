"""Play a finished dialogue again without some of its agents, to see what it would have been worth. Imports no torch.

Data flow: a finished dialogue and the agents that are left out -> the protocol plays again; an agent that is left out
declines or says the placeholder; whoever sees the same as before says the same; others are asked again -> the scorer
scores these dialogues too -> ``rewards["marginal"]`` and ``rewards["shapley"]`` of the finished one
(:mod:`maporl.rewards.counterfactual`). Nobody is trained on them.
"""

import copy
from collections import defaultdict
from collections.abc import Collection
from dataclasses import fields, replace
from itertools import combinations, count

from maporl.config.schema import AblateSection
from maporl.engines.base import Reply, Request
from maporl.protocols.base import Protocol
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import Episode
from maporl.types import Dialogue, Stop, Utterance

SILENCE = "[silent]"
"""What an agent that is left out says, if the protocol has no word of its own by which agents decline."""


def left_out(section: AblateSection) -> list[tuple[str, ...]]:
    """Return the groups of agents without which a dialogue is played again.

    >>> left_out(AblateSection(who=("ann", "bob")))
    [('ann',), ('bob',)]
    >>> left_out(AblateSection(who=("ann", "bob"), how="coalitions"))
    [('ann',), ('bob',), ('ann', 'bob')]
    """
    most = 1 if section.how == "each" else len(section.who)
    return [group for size in range(1, most + 1) for group in combinations(section.who, size)]


def can_decline(protocol: Protocol) -> bool:
    """Return whether agents can decline in ``protocol``, so that an agent can be left out without a placeholder."""
    return "pass_" in {field.name for field in fields(protocol)}  # type: ignore[arg-type]  # protocols are dataclasses


def add_ablations(driver: RolloutDriver, dialogues: list[Dialogue], section: AblateSection) -> None:
    """Fill in ``ablations`` of each of the ``dialogues``: it is played again without each group of agents.

    The number of an ablation follows those of its question's dialogues, so its random numbers are its own and do not
    depend on the batch.
    """
    silent = copy.copy(driver)
    word = section.placeholder
    if word is None:
        word = driver.protocol.pass_ or SILENCE
        silent.protocol = replace(driver.protocol, pass_=word)  # type: ignore[type-var]  # protocols are dataclasses
    first: dict[int, int] = defaultdict(int)
    for dialogue in dialogues:
        first[dialogue.prompt] = max(first[dialogue.prompt], dialogue.rollout + 1)
    numbers = {prompt: count(number) for prompt, number in first.items()}
    played: list[tuple[Dialogue, Episode]] = []
    for dialogue in dialogues:
        for group in left_out(section):
            for _ in range(section.samples):
                episode = silent.open(dialogue.example, dialogue.prompt, dialogue.rollout)
                episode.dialogue.rollout = next(numbers[dialogue.prompt])
                episode.dialogue.without = group
                episode.replay = _Replay(dialogue, group, word)
                played.append((dialogue, episode))
    silent.finish([episode for _, episode in played])
    for dialogue, episode in played:
        for utterance in episode.dialogue.utterances:
            utterance.trainable = False
        dialogue.ablations.append(episode.dialogue)


class _Replay:
    """Gives the replies of agents ``without`` a part, who say ``word``, and those to what an agent saw before."""

    def __init__(self, original: Dialogue, without: Collection[str], word: str):
        self.original, self.without, self.word = original, frozenset(without), word
        self.changed: set[int] = set()
        self.diverged: set[str] = set()

    def __call__(self, request: Request) -> Reply | None:
        """Return the reply to ``request``, or None if the agent must be asked."""
        ask = request.ask
        if ask.agent in self.without:
            return Reply(self.word)
        said = None if self._diverged(request) else self._said(request)
        if said is not None:
            _remember(request, said)
            return Reply(said.text, said.stop, said.prompt_ids, said.response_ids, said.logprobs)
        self.changed.add(request.utterance)
        if not ask.fresh:
            self.diverged.add(ask.agent)
        return None

    def _diverged(self, request: Request) -> bool:
        """Whether the conversation in which the agent is asked differs from the original one already."""
        ask = request.ask
        return ask.continues in self.changed or (not ask.fresh and ask.agent in self.diverged)

    def _said(self, request: Request) -> Utterance | None:
        """Return what the agent said to the same messages in the same turn, if it was asked them."""
        ask = request.ask
        for said in self.original.utterances:
            if (said.agent, said.turn, said.fresh) == (
                ask.agent,
                request.turn,
                ask.fresh,
            ) and said.messages == ask.messages:
                return said
        return None


def _remember(request: Request, said: Utterance) -> None:
    """Bring the transcript of ``request`` to where it was after ``said``."""
    transcript = request.transcript
    if not said.prompt_ids:  # the engine keeps no tokens
        return
    new = said.prompt_ids[len(transcript.ids) :]
    transcript.ids += new
    transcript.sampled_mask += [False] * len(new)
    transcript.add_completion(request.utterance, list(said.response_ids), said.stop is Stop.EOS)
