"""What an update costs on a service: tokens of each policy, times the prices that the user gives. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maporl.config import Config
from maporl.integrations.tinker.section import PriceSection
from maporl.protocols import policy_names
from maporl.rollout.branching import BRANCHINGS
from maporl.run import ResolvedRun


@dataclass(frozen=True)
class Tokens:
    """The tokens of a policy in an update: those of prompts and of forward passes, sampled ones, and those of forward
    and backward passes."""

    read: float = 0.0
    sampled: float = 0.0
    trained: float = 0.0

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(self.read + other.read, self.sampled + other.sampled, self.trained + other.trained)

    @classmethod
    def of(cls, prompt: float, answer: float, own: Config, learns: bool) -> "Tokens":
        """Return those of one answer after its prompt.

        A row is sent as it is, whatever beginning it shares with others. It is read before the update, by the base if
        there is a KL penalty, and before each step after the first; and trained on once a pass.
        """
        if not learns:
            return cls(prompt, answer)
        ppo = own.ppo
        passes = 1 + (ppo.kl_coef != 0) + ppo.num_ppo_epochs - 1 / ppo.num_mini_batches
        return cls(prompt + passes * (prompt + answer), answer, ppo.num_ppo_epochs * (prompt + answer))

    def dollars(self, price: PriceSection) -> float:
        """Return what they cost."""
        return (self.read * price.read + self.sampled * price.sampled + self.trained * price.trained) / 1e6

    def __str__(self) -> str:
        return f"{self.sampled:,.0f} tokens sampled, {self.read:,.0f} read and {self.trained:,.0f} trained"


def lines(run: ResolvedRun, measured: Any) -> list[str]:
    """Return what an update takes at most of each policy, as lines of text.

    ``measured`` are the rehearsed prompts (:class:`maporl.validation.rehearsal.Measured`), on the longest questions.
    """
    config, rehearsed = run.config, max(1, len(measured.dialogues))
    each = BRANCHINGS[config.branching.how].dialogues(config.branching, measured.steps)
    dialogues = config.questions_per_update() * each
    tokens: dict[str, Tokens] = {}
    for request, length in measured.players.prompts:
        agent = request.ask.agent
        section = config.agents[agent]
        if section.weights:
            prompt, answers, answer = measured.tokens(request, length)
            names = policy_names(agent, section, config)
            policy, share = names[min(request.turn, len(names) - 1)], dialogues / rehearsed
            learns = section.trainable and agent in run.learners
            added = Tokens.of(share * (prompt + answers), share * answer, config.of(agent), learns)
            tokens[policy] = tokens.get(policy, Tokens()) + added
    return told(config, tokens, "at most ")


def planned(config: Config, groups: Sequence[Any]) -> list[str]:
    """Return what an update takes of the policies of each base, by the lengths that ``maporl plan`` assumes.

    ``groups`` are those of :func:`maporl.studies.planning.groups.groups_of`.
    """
    tokens, owners = {}, policies_of(config)
    for group in groups:
        work, own = group.work, config.of(owners[group.policies[0]])
        prompts = [work.question + turn * (work.answer + work.heard) for turn in range(work.turns)]
        each = [
            Tokens.of(work.conversations * p, work.conversations * work.answer, own, group.trained) for p in prompts
        ]
        tokens[", ".join(group.policies)] = sum(each, Tokens())
    return told(config, tokens)


def policies_of(config: Config) -> dict[str, str]:
    """Return the first agent of each policy, by the policy's name."""
    owners: dict[str, str] = {}
    for name, section in config.agents.items():
        for policy in policy_names(name, section, config) if section.weights else ():
            owners.setdefault(policy, name)
    return owners


def told(config: Config, tokens: Mapping[str, Tokens], most: str = "") -> list[str]:
    """Return the tokens of each policy in an update, and what they cost, as lines of text."""
    prices = config.cluster.tinker.prices
    bases = {policy: str(config.agents[agent].model) for policy, agent in policies_of(config).items()}
    total, said, unknown = 0.0, [], dict[str, None]()
    for policy, some in tokens.items():
        base = bases[policy.partition(", ")[0]]
        price = prices.get(base)
        cost = "" if price is None else f": ${some.dollars(price):.4g}"
        total += 0.0 if price is None else some.dollars(price)
        unknown |= {} if price is not None else {base: None}
        said.append(f"service: {policy} on {base}: an update takes {most}{some}{cost}")
    if not unknown and said:
        said.append(
            f"service: {config.updates} updates cost {most}${total * config.updates:.4g}, without evaluations; rows "
            "are sent whole, so that what dialogues share is paid for in each"
        )
    elif said:
        said.append(f"service: no price of {', '.join(unknown)}; cluster.tinker.prices gives them")
    return said
