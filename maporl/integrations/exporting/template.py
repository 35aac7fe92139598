"""Chat templates that put an agent's system prompt before a conversation, as training did."""

import json
from collections.abc import Mapping
from typing import Literal

Engine = Literal["vllm", "transformers"]
"""What serves an export."""
AGENT = "agent"
"""The variable of a template for several agents: the name of who answers."""
_OPENING = """\
{% if messages and messages[0]["role"] == "system" %}
{% if messages[0]["content"] is string %}
{% set messages = [{"role": "system", "content": agent_system ~ "\\n\\n" ~ messages[0]["content"]}] + messages[1:] %}
{% else %}
{% set agent_part = [{"type": "text", "text": agent_system ~ "\\n\\n"}] %}
{% set messages = [{"role": "system", "content": agent_part + messages[0]["content"]}] + messages[1:] %}
{% endif %}
{% else %}
{% set messages = [{"role": "system", "content": agent_system}] + messages %}
{% endif %}
"""
"""What :func:`maporl.rollout.requests.opening` does. Renderers drop the first line end after a statement."""


def with_system(template: str, system: str | None) -> str:
    """Return a chat ``template`` that puts ``system`` before every conversation.

    It stands above a system prompt that the conversation has, as in training.
    """
    if not system:
        return template
    # an indented line would lose its blanks after a statement
    return f"{{% set agent_system = {_text(system)} %}}\n{_OPENING}{template}"


def with_systems(template: str, systems: Mapping[str, str | None]) -> str:
    """Return a chat ``template`` for several agents. Its variable :data:`AGENT` says whose system prompt it puts before
    a conversation.

    A request that does not say it is refused, because it would be answered without the prompt.
    """
    said = ", ".join(f"{_text(name)}: {_text(system or '')}" for name, system in systems.items())
    unknown = _text("chat_template_kwargs: expected the name of the model as agent")
    return (
        f"{{% set agent_systems = {{{said}}} %}}\n"
        f"{{% if {AGENT} is not defined or {AGENT} not in agent_systems %}}\n{{{{ raise_exception({unknown}) }}}}\n"
        f"{{% endif %}}\n{{% set agent_system = agent_systems[{AGENT}] %}}\n"
        f"{{% if agent_system %}}\n{_OPENING}{{% endif %}}\n{template}"
    )


def _text(value: str) -> str:
    """Return ``value`` as a string of Jinja, which has Python's escapes."""
    return json.dumps(value, ensure_ascii=False)
