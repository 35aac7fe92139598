"""Dialogues that are branched and played by a script."""

import itertools

from maporl import Arithmetic
from maporl.engines.scripted import ScriptedEngine
from maporl.rollout.branching import play_branched
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.types import Example
from trl_ext.ppo.options import Decoding

TASK = Arithmetic(largest=9)
EXAMPLES = [Example("e", "2+2=", "4"), Example("f", "3+3=", "6")]


def play(protocol, section, examples=EXAMPLES, task=TASK, judge=None, agents=("ann", "bob")):
    counter = itertools.count()
    engine = ScriptedEngine(lambda request: f"{request.ask.agent}{request.turn}.{next(counter)}")
    specs = {name: SpeakerSpec("scripted", (name,)) for name in agents}
    driver = RolloutDriver(task, protocol, specs, {"scripted": engine}, Decoding(1.0), common_seed=section.common_seed)
    return play_branched(driver, examples, section, judge or (lambda dialogues: [0.0] * len(dialogues)))
