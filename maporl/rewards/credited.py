"""Says what each agent will be credited for, from dialogues in which all utterances are empty. Imports no torch.

An agent whose utterances get no credit is never trained. A line before the run is the cheapest place to notice it.
"""

from collections.abc import Iterable

from maporl.config.imports import is_import, look_up
from maporl.config.schema import RewardSection
from maporl.protocols.base import Protocol
from maporl.rewards.base import RewardFailure
from maporl.rewards.build import ANSWERS_ONLY, is_completion_reward, scores_others
from maporl.rewards.credit import credit_by_readers, credit_by_rules, is_charged
from maporl.rewards.scoring import weighted_scores
from maporl.types import Dialogue, Utterance

Speaker = tuple[str, str | None]
"""An agent, and the role in which it spoke."""
NOTHING = "NOTHING"
READERS = "READERS"
SETTLED = "the credit of the answer that it settles"
BY_READERS = f"the mean credit of those who are shown it ({READERS})"


def credit_lines(
    reward: RewardSection, protocol: Protocol, learners: Iterable[str], dialogues: list[Dialogue]
) -> list[str]:
    """Return a line that says what credits the ``learners``, and a warning for each whom nothing credits.

    Args:
        reward: the sources, and how scores become credit.
        protocol: the protocol that was played, whose own rewards the utterances have.
        learners: the agents that play and are trained.
        dialogues: what was said. Their rewards change.
    """
    learners = tuple(learners)
    unlisted = {name for d in dialogues for u in d.utterances for name in u.rewards} - protocol.pays - set(reward.asked)
    unsure = [n for n in reward.sources if n not in protocol.pays and n not in ANSWERS_ONLY and not _is_completion(n)]
    for u in (u for d in dialogues for u in d.utterances):
        paying = (
            [name for name in reward.sources if name not in protocol.pays] if u.answers else scores_others(reward, u)
        )
        u.rewards |= dict.fromkeys(paying, 1.0)
    try:
        weighted_scores(dialogues, reward.sources)
    except RewardFailure as error:
        return [
            f"warning: credit: {error}, in a dialogue whose utterances are all empty; a run stops where this happens"
        ]
    sources = _credited(reward, dialogues, unsure)
    told = {agent: [(role, parts) for (name, role), parts in sources.items() if name == agent] for agent in learners}
    line = "; ".join(f"{', '.join(names)}: {what}" for what, names in _grouped(told).items())
    return [f"credit: {line}", *_warnings(told, bool(reward.rules), unsure), *_unlisted(protocol, sorted(unlisted))]


def _is_completion(name: str) -> bool:
    """Return whether a source is a function of completions, which scores answers only."""
    return is_import(name) and is_completion_reward(look_up(name, {}, "reward.sources"))


def _credited(reward: RewardSection, dialogues: list[Dialogue], unsure: list[str]) -> dict[Speaker, dict[str, None]]:
    """Return what credits each speaker's utterances: each kind once, in the order in which they come."""
    # ``unsure`` lists the sources that may score any utterance: only their code says which
    perhaps = f"its own reward if {' or '.join(unsure)} scores it, or else " if unsure else ""
    readers: dict[Speaker, set[str]] = {}
    kinds: dict[int, str] = {}
    if reward.rules:
        credit_by_rules(dialogues, reward)
    for u in (u for d in dialogues for u in d.utterances):
        if not reward.rules and "score" in u.rewards:
            u.rewards["credit"] = u.rewards["score"]
        if "credit" in u.rewards:
            kinds[id(u)] = _own(u, reward, unsure)
    by_speaker: dict[Speaker, dict[str, None]] = {}
    for dialogue in dialogues:
        credit_by_readers(dialogue)
        for u in dialogue.utterances:
            shown_to = {v.agent for v in dialogue.utterances if u.id in v.parents and "credit" in v.rewards}
            inherited = SETTLED if u.settles and not shown_to else BY_READERS
            what = kinds.get(id(u)) or perhaps + (inherited if "credit" in u.rewards else NOTHING)
            if "credit" in u.rewards:
                what += "".join(
                    f", minus {charge.weight:g} x {name}"
                    for name, charge in reward.charges.items()
                    if is_charged(charge, u)
                )
            by_speaker.setdefault((u.agent, u.role), {})[what] = None
            readers.setdefault((u.agent, u.role), set()).update(shown_to)
    return {
        speaker: {kind.replace(READERS, ", ".join(sorted(readers[speaker]))): None for kind in speaker_kinds}
        for speaker, speaker_kinds in by_speaker.items()
    }


def _own(u: Utterance, reward: RewardSection, unsure: list[str]) -> str:
    """Return what scores and rules give an utterance."""
    weights = {name: weight for name, weight in reward.sources.items() if name in u.rewards}
    scores = ", ".join(
        f"{name} {weight:g}{' where it scores' if name in unsure else ''}" for name, weight in weights.items()
    )
    what = f"{'answers' if u.answers else 'other words'} ({scores})" if scores else "all that it says"
    if reward.rules:
        names = (entry if isinstance(entry, str) else next(iter(entry)) for entry in reward.rules)
        return f"{what}, by reward.rules [{', '.join(names)}]"
    return f"{what}, horizon {reward.horizon}, share {reward.share}" if u.answers else f"{what}, not shared"


def _unlisted(protocol: Protocol, names: list[str]) -> list[str]:
    """Return a warning if the protocol sets rewards that it does not list."""
    if not names:
        return []
    listed = ", ".join(map(repr, names))
    return [
        f"warning: protocol: {protocol.label} sets the rewards {', '.join(names)}, which its pays does not list, so "
        f"they are only logged; write pays = frozenset({{{listed}}}) in its class, and give them weights in "
        "reward.sources"
    ]


def _grouped(told: dict[str, list[tuple[str | None, dict[str, None]]]]) -> dict[str, list[str]]:
    """Return the agents, and their roles if they have several, by what is said of them."""
    groups: dict[str, list[str]] = {}
    for agent, roles in told.items():
        for role, parts in roles:
            name = f"{agent} as {role}" if len(roles) > 1 else agent
            groups.setdefault(" and ".join(parts), []).append(name)
        if not roles:
            groups.setdefault("not asked if all utterances are empty", []).append(agent)
    return groups


def _warnings(told: dict[str, list[tuple[str | None, dict[str, None]]]], rules: bool, unsure: list[str]) -> list[str]:
    ruled = ", no rule credits it" if rules else ""
    scores = f"only {' or '.join(unsure)} may score it" if unsure else "no source scores it"
    return [
        f"warning: credit: nothing credits {agent} if all utterances are empty: nobody who has a credit is shown what "
        f"it says, and {scores}{ruled}. If that is so in the first update, the run stops. Name its ids in "
        "Ask.parents of those who are shown it, let a reward source or the protocol (pays) score it, or set "
        f"agents.{agent}.trainable: false"
        for agent, roles in told.items()
        if roles and all(part.endswith(NOTHING) for _, parts in roles for part in parts)
    ]
