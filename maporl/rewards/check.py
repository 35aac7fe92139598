"""Check what a run pays for: its sources, its rules, and what both read. Imports no torch."""

from collections.abc import Iterator, Mapping

from maporl.config.imports import extension
from maporl.config.parse import entry_name
from maporl.config.schema import AblateSection, RewardSection
from maporl.errors import Fault
from maporl.protocols.judging import judge_of
from maporl.rewards.build import find_source
from maporl.rewards.rules import Rule, build_rules
from maporl.run import ResolvedRun
from trl_ext.ppo.options import PPOOptions

UP_TO_ONE = frozenset({"label", "format", "near", "f1", "majority", "peer_majority", "brevity", "verifier"})
"""The rewards that are from 0 to 1."""


def check(run: ResolvedRun) -> Iterator[Fault]:
    """Yield sources that do not exist or lack what they need, and rules that read what nothing gives.

    Raises:
        ConfigError: a source cannot be found, or an option of a rule is wrong.
    """
    reward, protocol = run.config.reward, run.protocol
    pays: frozenset[str] = protocol.pays | frozenset([*run.config.tools, *run.config.environments])
    used = {*reward.asked, *protocol.between_turns()}
    for source in sorted(used - pays):
        key = "charges" if source in reward.charges else "sources"
        find_source(source, f"{run.where}: reward.{key}", pays)
    rules = build_rules(reward.rules, f"{run.where}: reward.rules")
    yield from _rules(run, rules, {*reward.asked, *pays, *contributions(run.config.branching.ablate)})
    if reward.bonus is not None and rules:
        yield Fault("reward", "bonus goes with horizon, share and discount, not with rules", "remove one")
    if "brevity" in used and reward.brevity is None:
        example = f"reward.brevity: {{tokens: {run.config.ppo.response_length}}}"
        yield Fault("reward.brevity", "the source 'brevity' needs it", f"for example {example}")
    name = run.config.protocol["name"]
    if "judgement" in used and getattr(protocol, "judge", None) is None:
        what = f"judgement scores what an agent says of results, and protocol {name!r} asks nobody for that"
        yield Fault("reward.sources", what, "use protocol call_return with judge: TEXT")
    if judge_of(protocol) is None and any(rule.needs_verdicts for rule in rules):
        what = "consistency pays verdicts on what was said, and nobody gives any"
        yield Fault("reward.rules", what, "set protocol.step_judge: {agent: NAME}, or leave the rule out")
    yield from _scoring_agents(run, used)
    if "arena" in reward.sources and run.config.branching.most < 2 and run.config.branching.how == "independent":
        yield Fault("reward.sources", "arena compares a question's dialogues", "set branching.group to 2 or more")
    if "verifier" in used or reward.verifier is not None:
        yield from extension("maporl.verifier.check:check", "reward.verifier")(run)
    most = run.config.ppo.response_length
    longest = {name: run.sampling.longest(name, most) for name in run.learners}
    yield from lengths(reward, longest, never_ends(run.config.ppo))


def never_ends(ppo: PPOOptions) -> bool:
    """Return whether nothing but its length ends an answer."""
    return ppo.stop_token == "none" and not ppo.stop_strings


def lengths(reward: RewardSection, longest: Mapping[str, int], endless: bool) -> Iterator[Fault]:
    """Yield penalties that every answer would get, whatever is said.

    Args:
        reward: what is paid.
        longest: the most tokens of an answer of each agent that plays and is trained.
        endless: whether nothing but its length ends an answer (:func:`never_ends`).
    """
    fines = reward.penalties
    if fines is None:
        return
    short = [name for name, most in longest.items() if most < fines.min_tokens]
    if fines.too_short and short:
        most = max(longest[name] for name in short)
        what = f"answers below {fines.min_tokens} tokens are fined, and all of {', '.join(short)} have {most} or less"
        remedy = f"set min_tokens to {most} or less, or allow longer answers (ppo.response_length)"
        yield Fault("reward.penalties.min_tokens", what, remedy)
    if "brevity" in reward.sources and reward.brevity is not None and reward.brevity.tokens <= fines.min_tokens:
        what = f"answers below {fines.min_tokens} tokens are fined; brevity is below {reward.brevity.tokens}"
        remedy = "set min_tokens well below reward.brevity.tokens, or leave one of them out"
        yield Fault("reward.penalties.min_tokens", what, remedy)
    if fines.no_eos and endless:
        what = "answers that do not end by themselves are fined, and with ppo.stop_token: none no answer does"
        yield Fault("reward.penalties.no_eos", what, "set no_eos: 0, or ppo.stop_token: eos")


def contributions(ablate: AblateSection | None) -> set[str]:
    """Return the names of the rewards that say what an agent contributed."""
    if ablate is None:
        return set()
    return {"marginal", "shapley"} if ablate.how == "coalitions" else {"marginal"}


def _rules(run: ResolvedRun, rules: list[Rule], rewards: set[str]) -> Iterator[Fault]:
    """Yield the rewards and columns that rules read, and that nothing gives."""
    for entry, rule in zip(run.config.reward.rules, rules, strict=True):
        for reward in sorted(rule.reads - rewards):
            what = f"{entry_name(entry)} reads the reward {reward!r}, which nothing gives here, so it would always be 0"
            remedy = f"name one of {sorted(rewards)}, or add it to reward.sources (weight 0 counts in rules alone)"
            yield Fault("reward.rules", what, remedy)
        for column in sorted(rule.needs - run.protocol.records):
            name = run.config.protocol["name"]
            what = f"{entry_name(entry)} needs {column}s, but protocol {name!r} records no {column}s"
            remedy = "use a protocol that does (call_return records callers), or leave the rule out"
            yield Fault("reward.rules", what, remedy)


def _scoring_agents(run: ResolvedRun, used: set[str]) -> Iterator[Fault]:
    """Yield sources that score by an agent which is missing, or which plays itself."""
    for kind in ("judge", "arena", "annotator"):
        section = getattr(run.config.reward, kind)
        if kind in used and section is None:
            yield Fault(f"reward.{kind}", f"the source {kind!r} needs it", f"such as reward.{kind}: {{agent: NAME}}")
        if section is not None and (section.agent not in run.agents or section.agent in run.speakers):
            what = f"{section.agent!r} must be one of {list(run.agents)} that does not play"
            yield Fault(f"reward.{kind}.agent", what, "add it under agents: and list the others in protocol.agents")


def score_range(reward: RewardSection, missing_eos_penalty: float | None, turns: int = 1) -> list[float] | None:
    """Return the smallest and the largest sum of the credits of ``turns`` answers, or None if rewards have no bounds.

    It is known where every reward is from 0 to 1 and nothing but fines is added to the scores.
    """
    sources = {name: weight for name, weight in reward.sources.items() if weight}
    if reward.rules or reward.bonus or reward.charges or reward.distill or not sources.keys() <= UP_TO_ONE:
        return None
    fines, penalties = missing_eos_penalty or 0.0, reward.penalties
    if penalties is not None:
        if penalties.call or penalties.call_unread or penalties.call_failed:  # there may be any number of calls
            return None
        fines += penalties.too_short + penalties.no_final_answer + penalties.repetition + penalties.no_eos
    low, high = -fines + sum(w for w in sources.values() if w < 0), sum(w for w in sources.values() if w > 0)
    return [turns * low, turns * high] if low < high else None
