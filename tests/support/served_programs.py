"""Programs that talk to agents of a script through the real server, with real tokens."""

from tool_models import SayingEngine, characters

from maporl import Arithmetic
from maporl.rollout.agent_tools import formats_of_schemas
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.serving import gateway
from maporl.serving.program import Program
from maporl.team.agents import Voice
from maporl.types import Example
from trl_ext.ppo.options import Decoding

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Plain(Arithmetic):
    def question(self, example):
        return example.question


def play(solve, scripts, question="What is 2+3?", template=CHATML, **options):
    """The dialogue of a program with agents who say the lines of their scripts, and the bodies of its requests."""
    tokenizer = characters(template)
    voice = Voice("any", tokenizer, None, frozenset([tokenizer.eos_token_id]))
    lines = {name: [f"{line}<|im_end|>" for line in script] for name, script in scripts.items()}
    specs = {name: SpeakerSpec("said", (name,), formats=formats_of_schemas(name, voice, {})) for name in scripts}
    engine = SayingEngine(tokenizer, lines)
    protocol = Program(run=solve, seconds=60, **options)
    bodies, read = [], gateway._json

    async def recorded(request):
        bodies.append(await read(request))
        return bodies[-1]

    gateway._json = recorded
    try:
        example = Example("q", question, "5")
        (dialogue,) = RolloutDriver(Plain(largest=9), protocol, specs, {"said": engine}, Decoding(1.0)).play([example])
    finally:
        gateway._json = read
    check_tokens(dialogue)
    return dialogue, bodies


def check_tokens(dialogue):
    """What goes on with a conversation has its tokens, each as it was, before its own."""
    for u in dialogue.utterances:
        if u.after is not None:
            before = dialogue.utterances[u.after]
            earlier = before.prompt_ids + before.response_ids
            assert u.prompt_ids[: len(earlier)] == earlier, f"utterance {u.id} does not go on with {u.after}"


def call(name, **arguments):
    """A call as an agent writes it."""
    import json

    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def told(dialogue):
    """Of each utterance: who, whether it went on with an earlier one, and of what."""
    return [(u.agent, u.after, u.tags.get("history")) for u in dialogue.utterances]
