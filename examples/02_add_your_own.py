"""Your own task, protocol, reward rule, advantage baseline and objective. Each is one class or function and one line
that names it.

    python examples/02_add_your_own.py

The line adds each part to the dict of its kind, so that a configuration can choose it. A team of tiny models then
trains three updates with all five parts. The script prints how many lines each part takes.
"""

import inspect
import random
import tempfile
from dataclasses import dataclass

import torch

from maporl import (
    BASELINES,
    PROTOCOLS,
    RULES,
    TASKS,
    Ask,
    Baseline,
    Example,
    Grade,
    Protocol,
    Rule,
    Task,
    from_dict,
    train,
)
from trl_ext.ppo.losses import OBJECTIVES, importance_ratio


@dataclass(frozen=True)
class Reversal(Task):
    """Write a string of digits backwards. The fields of the class are its options in a configuration."""

    digits: int = 3
    count: int = 500
    split: str = "train"
    seed: int = 0

    def __len__(self):
        return self.count if self.split == "train" else 100

    def __getitem__(self, index):
        rng = random.Random(f"{self.split}/{self.seed}/{index}")
        text = "".join(rng.choice("123456789") for _ in range(self.digits))
        return Example(f"{self.split}-{index}", text, text[::-1])

    def grade(self, example, text):
        right = text.strip() == example.answer
        return Grade(text.strip() or None, right, "equals the label" if right else "differs from the label")

    def write_answer(self, example, rng, right):
        """Needed only for warm starts."""
        return example.answer if right else "".join(rng.sample(example.answer, len(example.answer)))


@dataclass(frozen=True)
class Relay(Protocol):
    """The agents answer one after the other.

    Each sees the previous answer; an agent that repeats it ends the dialogue.
    """

    turns: int = 2

    def play(self, example, agents):
        last = None
        for turn in range(self.turns):
            for agent in agents:
                text = example.question if last is None else f"{last.text}?{example.question}"
                seen = () if last is None else (last.id,)
                (said,) = yield [Ask(agent, [{"role": "user", "content": text}], parents=seen)]
                if last is not None and said.text == last.text:
                    return f"agreed in turn {turn + 1}"
                last = said
        return None


@dataclass(frozen=True)
class Best(Rule):
    """Every utterance gets the best score of its dialogue."""

    def __call__(self, dialogues, credits):
        return [dict.fromkeys(own, max(own.values(), default=0.0)) for own in credits]


def median(returns, groups, weights, batch, config, state):
    """Use the median of the group instead of its mean, because one lucky dialogue does not move it."""
    base = torch.zeros_like(returns)
    for rows in groups:
        base[rows] = returns[rows][weights[rows] > 0].median()
    return base


def soft_clip(new, old, advantages, mask, options):
    """PPO's surrogate, with a ratio that saturates smoothly at 1 +- cliprange instead of being clipped."""
    ratio = importance_ratio(new, old, mask, options.ratio)
    bounded = 1 + options.cliprange * torch.tanh((ratio - 1) / options.cliprange)
    losses = -advantages * bounded
    beyond = ((ratio - 1).abs() > options.cliprange).to(losses.dtype)
    return losses, {"clipfrac": beyond, "ratio": ratio.detach()}


TASKS["reversal"] = Reversal
PROTOCOLS["relay"] = Relay
RULES["best"] = Best
BASELINES["median"] = Baseline(median, over="group")
OBJECTIVES["soft_clip"] = soft_clip

CONFIG = {
    "task": {"name": "reversal", "digits": 2},
    "protocol": {"name": "relay"},
    "agents": {"ann": {}, "bob": {}},
    "agent_defaults": {"tiny": {"alphabet": "0123456789?", "hidden_size": 48, "layers": 1}},
    "updates": 3,
    "warm_start": {"steps": 20},
    "branching": {"group": 4},
    "reward": {"rules": ["best"]},
    "advantage": {"returns": "utterance", "baseline": "median", "scale": "none", "key": ["prompt", "agent"]},
    "ppo": {"response_length": 4, "temperature": 1.0, "objective": "soft_clip", "num_ppo_epochs": 2},
    "training": {"learning_rate": 1e-3, "gradient_accumulation_steps": 1, "use_cpu": True},
    "evaluation": {"questions": 16},
}
LIMITS = {Reversal: 45, Relay: 40, Best: 10, median: 25, soft_clip: 30}

if __name__ == "__main__":
    for part, limit in LIMITS.items():
        lines = len(inspect.getsource(part).splitlines())
        assert lines <= limit, f"{part.__name__} has {lines} lines, more than {limit}"
        print(f"{part.__name__}: {lines} lines")
    with tempfile.TemporaryDirectory() as folder:
        before, after = train(from_dict({**CONFIG, "output_dir": f"{folder}/run"}), resume=False, quiet=True)
    print(
        f"held out, first turn: {before.turns[0].team.value:.0%} before, {after.turns[0].team.value:.0%} after three "
        "updates"
    )
