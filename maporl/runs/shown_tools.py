"""What an agent with tools is shown: its first prompt, and what follows one example call.

``maporl tools`` prints it.
"""

import textwrap
from typing import Any

from maporl.config.imports import unknown
from maporl.config.schema import Config
from maporl.engines.base import Request
from maporl.engines.transcript import Transcript
from maporl.environments.base import Tool
from maporl.environments.turns import AgentTools
from maporl.errors import ConfigError, refuse
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.rollout.made_up import Players, silence
from maporl.rollout.tool_checks import OfferedTools
from maporl.run import ResolvedRun
from trl_ext.chat.control_tokens import encode_words
from trl_ext.chat.encoding import Tokenizer
from trl_ext.ppo.options import GREEDY

WIDTH = 78
RESULT = "RESULT"
"""Stands for what the tool returns."""
EXAMPLES: dict[str, Any] = {"string": "TEXT", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""An argument of each type of a JSON schema."""


def shown_tools(config: Config, agent: str) -> list[str]:
    """Return what ``agent`` may call and what it is shown of that, as lines of at most 78 columns.

    This builds all tools and environments, and asks the first question of the training split. It loads no model, and
    calls no tool. Every line of the prompts says whether it is ``context`` or the agent's ``own`` words, which are what
    is trained on.

    Raises:
        ConfigError: the agent does not exist, does not play or may call nothing, or as for
            :meth:`maporl.rollout.tool_checks.OfferedTools.faults`.
    """
    run = ResolvedRun(config)
    playing = run.speakers
    if agent not in playing:
        raise ConfigError(f"--agent: {unknown(agent, playing)}")
    offered = OfferedTools(run)
    refuse(offered.faults())
    world, tools = offered.world, offered.may_call
    if agent not in tools:
        raise ConfigError(f"--agent: {agent} may call nothing; set agents.{agent}.tools, or name {sorted(tools)}")
    players = Players(silence)
    sections = {name: config.agents[name] for name in playing}
    specs = {
        name: SpeakerSpec("first", (name,), system=section.system, role=section.role, tools=tools.get(name))
        for name, section in sections.items()
    }
    try:
        driver = RolloutDriver(run.task, run.protocol, specs, {"first": players}, GREEDY, world=world)
        driver.play([run.task[0]])
    finally:
        world.close()
    request = next((request for request in players.requests if request.ask.agent == agent), None)
    if request is None:
        raise ConfigError(f"--agent: {agent} is asked nothing in a dialogue on the first question where all are silent")
    summary = next(line for line in offered.lines() if line.startswith(f"tools: {agent} may call "))
    granted = tools[agent]
    signatures = [part for tool in granted.format.tools.values() for part in _wrapped(tool.line(), "  ")]
    return [*_wrapped(summary, ""), *signatures, *_conversation(request, granted, offered.tokenizers.get(agent))]


def _conversation(request: Request, tools: AgentTools, tokenizer: Tokenizer | None) -> list[str]:
    """Return the first prompt, an example call and what follows it, with the number of tokens of each."""
    tool = next(iter(tools.format.tools.values()))
    call = _example(tools, tool)
    results = tools.format.heard([{"role": "tool", "name": tool.name, "content": RESULT}])
    if tokenizer is None:  # an agent behind an API, or a person
        parts = [(False, "\n".join(str(m["content"]) for m in shown), None) for shown in (request.messages, results)]
        return _told([parts[0], (True, call, None), parts[1]])
    transcript, stop_ids = Transcript(tools=request.transcript.tools), frozenset([tokenizer.eos_token_id])
    first = transcript.add_messages(request.messages, tokenizer, stop_ids)
    native = tools.format.schemas() is not None
    written = [] if native else encode_words(tokenizer, call)
    transcript.add_completion(request.utterance, written, ended=native)  # a plain format stops at its closing mark
    whole = transcript.add_messages(results, tokenizer, stop_ids)
    after = whole[len(first) + len(written) :]
    return _told(
        [
            (False, tokenizer.decode(first), len(first)),
            (True, call, sum(transcript.sampled_mask) or None),
            (False, tokenizer.decode(after), len(after)),
        ]
    )


def _example(tools: AgentTools, tool: Tool) -> str:
    """Return how the agent writes a call of ``tool``, with made-up arguments."""
    if tools.format.schemas() is not None:
        return f"(a call of {tool.name}, as the model has learned to write it)"
    properties = tool.parameters.get("properties", {})
    arguments = {
        name: kind["enum"][0] if "enum" in kind else EXAMPLES.get(kind.get("type"), "TEXT")
        for name, kind in properties.items()
        if name in tool.parameters.get("required", [])
    }
    return tools.format.write(tool.name, arguments)


def _told(parts: list[tuple[bool, str, int | None]]) -> list[str]:
    titles = ("first prompt", "an example call", f"what follows it, where {RESULT} is what the tool returns")
    lines = []
    for title, (is_own, text, tokens) in zip(titles, parts, strict=True):
        count = "" if tokens is None else f" ({tokens} tokens)"
        lines.append(f"{title}{count}:")
        mark = "own    " if is_own else "context"
        lines += [shown for line in text.split("\n") for shown in _wrapped(line, f"  {mark} | ")]
    return lines


def _wrapped(text: str, before: str) -> list[str]:
    """Return ``text`` in lines that fit the width, each after ``before``."""
    parts = textwrap.wrap(text, WIDTH - len(before), drop_whitespace=False, replace_whitespace=False) or [""]
    return [before + part for part in parts]
