"""The lengths of prompts and conversations, measured with a team that says nothing. No model is loaded."""

from collections import Counter
from collections.abc import Mapping

from maporl.config.schema import AgentSection, Config
from maporl.engines import Engine, Reply, Request
from maporl.environments.turns import AgentTools
from maporl.environments.world import World
from maporl.errors import ConfigError
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.run import ResolvedRun
from maporl.team.loading import context_length
from maporl.types import Dialogue
from maporl.validation.first_steps import MOST_STEPS, first_steps
from trl_ext.chat.encoding import Tokenizer
from trl_ext.ppo.options import GREEDY, Decoding


class _Silent(Engine):
    """An engine that gives empty answers, so that every prompt is as short as possible. It records prompts' lengths."""

    def __init__(self, tokenizers: dict[str, Tokenizer]):
        self.tokenizers = tokenizers
        self.prompts: list[tuple[Request, int]] = []

    def generate(self, requests: list[Request], decoding: Decoding) -> list[Reply]:
        """Return an empty answer for each request. Agents without a tokenizer, such as people, are not measured."""
        for request in (r for r in requests if r.ask.agent in self.tokenizers):
            tokenizer = self.tokenizers[request.ask.agent]
            prompt = request.transcript.add_messages(request.messages, tokenizer, frozenset())
            request.transcript.add_completion(request.utterance, [], ended=False)
            self.prompts.append((request, len(prompt)))
        return [Reply("") for _ in requests]


def _context(name: str, agent: AgentSection) -> int | None:
    """Return the most tokens that the agent's model reads, and vLLM in this process if it samples. None has no limit."""
    limits = [context_length(name, agent)]
    if agent.vllm is not None and agent.vllm.colocate is not None:
        limits.append(agent.vllm.colocate.max_model_len)
    return min((limit for limit in limits if limit is not None), default=None)


def check_lengths(
    run: ResolvedRun,
    tokenizers: dict[str, Tokenizer],
    world: World,
    tools: Mapping[str, AgentTools],
) -> tuple[list[str], int, list[int], list[Dialogue]]:
    """Check that prompts fit the models' contexts if every answer is empty.

    Returns:
        Warnings for prompts that do not fit if answers are as long as possible, and for dialogues that were not played to their ends, the length of the longest conversation
        then, in tokens, the number of utterances of each step of the longest dialogue, and the dialogues.

    Raises:
        ConfigError: a prompt does not fit, or is empty.
    """
    config, protocol, players, sampling = run.config, run.protocol, run.speakers, run.sampling
    silent = _Silent(tokenizers)
    sections = {name: config.agents[name] for name in players}
    specs = {
        name: SpeakerSpec("silent", (name,), system=a.system, role=a.role, tools=tools.get(name))
        for name, a in sections.items()
    }
    most_played = 2 if world.environments else 16
    steps: list[int] = []
    played: list[Dialogue] = []
    whole = True
    for task in run.splits:
        by_length = sorted(task, key=lambda example: len(task.question(example)))
        driver = RolloutDriver(task, protocol, specs, {"silent": silent}, GREEDY, world=world)
        dialogues, ended = first_steps(driver, by_length[-most_played:])
        played += dialogues
        whole = whole and ended
    for dialogue in played:
        steps = max(steps, list(Counter(u.order for u in dialogue.utterances).values()), key=len)
    contexts = {name: _context(name, config.agents[name]) for name in players if name in tokenizers}
    most_of = {name: sampling.longest(name, config.ppo.response_length) for name in players}
    most = max(most_of.values())
    longer: dict[str, int] = {}
    longest = 0
    for request, length in silent.prompts:
        agent, context = request.ask.agent, contexts[request.ask.agent]
        answers = len(players) * most * (1 if request.ask.fresh else request.turn)
        own = most_of.get(agent, most)
        limit = "ppo.response_length" if own == config.ppo.response_length else "max_tokens of its sampling"
        longest = max(longest, length + answers + own)
        if not length:
            heard = [u.agent for u in request.heard]
            raise ConfigError(
                f"agents.{agent}: its prompt of turn {request.turn + 1} is empty if "
                f"{'the answers of ' + ', '.join(heard) if heard else 'earlier answers'} are empty, and a model cannot answer nothing; "
                f"put a text of its own into what protocol {protocol.label} asks, beside what others said"
            )
        if context is None:
            continue
        if length + own > context:
            which = f"a prompt of turn {request.turn + 1} has at least" if request.turn else "a first prompt has"
            by = "" if context == context_length(agent, config.agents[agent]) else " (vllm.colocate.max_model_len)"
            raise ConfigError(
                f"agents.{agent}: {which} {length} tokens and answers may have {own} ({limit}), but its "
                f"model reads at most {context}{by}; shorten the protocol's texts "
                f"or {limit}, or use another model; question: {request.example.question!r:.80}"
            )
        if length + answers + own > context:
            longer[agent] = max(longer.get(agent, 0), length + answers + own)
    cut = [
        f"warning: protocol: {protocol.label} lets dialogues go on for more than {MOST_STEPS} steps, of which no more were rehearsed; whether later "
        "prompts fit the models' contexts, and how long they get, shows in the run"
    ]
    warnings = [] if whole else cut
    warnings += _unread(config, silent) + [
        f"warning: agents.{agent}: its last turn may need about {length} tokens if all answers are as long as "
        f"{_limit(config, most)} allows, but its model reads at most {contexts[agent]}; a run stops where it does not fit"
        for agent, length in longer.items()
    ]
    return warnings, longest, steps, played


def _limit(config: Config, most: int) -> str:
    """Return the name and the value of the option that lets answers have ``most`` tokens."""
    name = "ppo.response_length" if most == config.ppo.response_length else "max_tokens of the agents' sampling"
    return f"{name}={most}"


def _unread(config: Config, silent: _Silent) -> list[str]:
    """Return a warning for each tiny model whose prompts have characters that its alphabet lacks."""
    used: dict[str, set[str]] = {}
    for request, _ in silent.prompts:
        used.setdefault(request.ask.agent, set()).update(*(message["content"] for message in request.ask.messages))
    tinies = {name: config.agents[name].tiny for name in used}
    missing = {name: used[name] - set(tiny.alphabet) for name, tiny in tinies.items() if tiny is not None}
    return [
        f"warning: agents.{name}.tiny.alphabet: its prompts have characters that it lacks, {''.join(sorted(lacking))!r:.60}; they "
        "are read as unknown: add them, or shorten the protocol's texts"
        for name, lacking in missing.items()
        if lacking
    ]
