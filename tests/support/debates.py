"""Debates that are played by a script and scored."""

from maporl import Arithmetic
from maporl.engines.scripted import ScriptedEngine
from maporl.rewards.labels import label
from maporl.rewards.scoring import fill_in, grade_answers, score_dialogues
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import Referee, SpeakerSpec
from maporl.types import Example
from trl_ext.ppo.options import GREEDY

TASK = Arithmetic(largest=9)
EXAMPLE = Example("e", "2+2=", "4")


def play(protocol, script, agents=("ann", "bob"), referee=None, examples=(EXAMPLE,)):
    """Play a script {agent: [text by turn]}. Return the dialogues, and each prompt's last message."""
    prompts = {agent: [] for agent in agents}

    def say(request):
        prompts[request.ask.agent].append(request.ask.messages[-1]["content"])
        return script[request.ask.agent][request.turn]

    specs = {name: SpeakerSpec("scripted", (name,)) for name in agents}
    engines = {"scripted": ScriptedEngine(say)}
    return RolloutDriver(TASK, protocol, specs, engines, GREEDY, CallsFunction(referee) if referee else None).play(
        list(examples)
    ), prompts


class CallsFunction(Referee):
    def __init__(self, function):
        self.function, self.seen = function, []

    def see(self, dialogue):
        self.seen.append(dialogue)

    def settle(self):
        seen, self.seen = self.seen, []
        self.function(seen)


def graded(dialogues):
    grade_answers(dialogues, TASK)
    fill_in(dialogues, TASK, {"label": label})


def scored(dialogues):
    graded(dialogues)
    score_dialogues(dialogues, TASK, {"label": label}, {"label": 1.0})
