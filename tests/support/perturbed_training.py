"""Change one option of a recipe at a time, and train three updates of its tiny version, or its rounds: does anything
change?

An option of which no other value changes a metric is inert. Either it is a defect, or the recipe's card gives the
reason. Agents say what a script says, because answers of untaught models earn nothing: right and wrong answers in
several forms, calls, verdicts, and good, bad and illegal moves. The models that learn from this are real. In a loop,
models speak for themselves after a warm start, because how they sample is an option of the method.
"""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripted_training import TokenScript, route
from transformers import TrainerCallback

from maporl.advantages import BASELINES, RETURNS, SCALES, TRANSFORMS
from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file
from maporl.engines.base import Request
from maporl.errors import ConfigError, RunError
from maporl.loops.run import run_loop
from maporl.methods.tiny_versions import shrunk
from maporl.rewards import RewardFailure
from maporl.rewards.rules import RULES
from maporl.rollout.branching import BRANCHINGS
from maporl.runs.build import build_trainer
from maporl.storage.run_folder import RunFolder
from maporl.team.agents import Policy
from maporl.validation.load import from_dict
from trl_ext.learning.trained import NonFiniteError

Keys = tuple[str | int, ...]
Metrics = dict[str, float]

# what does not belong to the method: where a run writes, how long it is, which models and questions it has; what saves
# memory without changing a number; how an answer is sampled and cut and how long it may be, which a script does not ask
# (``tests/training/test_truncated_sampling.py`` tests what is cut); how a team is evaluated, which no update measures;
# and the names of the parts that the other keys belong to, such as the library that is searched; and what a verifier
# pays that does not learn, which no tiny version has (``tests/methods/test_propose.py`` tests it)
NO_OPTIONS = (
    "recipe", "output_dir", "updates", "task", "agent_defaults.model", "agents.*.model", "reward.verifier.model", "reward.verifier.pays", "agent_defaults.dtype",
    "training.gradient_checkpointing", "protocol.name", "protocol.game", "protocol.place", "protocol.tool", "environments", "tools.*.use",
    "agents.*.limits.parallel", "agents.*.sampling", "ppo.response_length", "ppo.top_p", "ppo.top_k", "evaluation",
)  # fmt: skip
NAMES: dict[str, tuple[Any, ...]] = {
    "returns": tuple(RETURNS), "baseline": tuple(BASELINES), "scale": tuple(SCALES), "post": tuple(TRANSFORMS),
    "rules": tuple(RULES), "how": (*BRANCHINGS, "max", "sum"), "unit": ("row", "rollout"), "singleton": ("error", "zero", "raw"),
    "multi_objective_aggregation": ("sum_then_normalize",),
    "of": ("turns",), "agents": ("each",), "calls": ("together",),
    "policy_per": ("agent", "turn"), "policy": ("another",), "lora": ({"r": 2}, {"r": 2, "alpha": 64}),
    "joint": ("cross",), "pick": ("sample",), "after_illegal": ("end", "replace"), "objective": ("ppo", "reinforce", "dis"), "ratio_to": ("update",), "critic_freeze": ("none",),
    "ratio": ("token", "sequence", "sequence_mean", "trajectory"), "kl_in": ("reward", "loss"),
    "kl_estimator": ("k1", "k2", "k3"), "value_loss": ("clipped",), "critic": ("head", "model"),
    "aggregation": ("token_mean", "sequence_mean", "sequence_sum", "per_main_rollout"),
    "at_end": ("answer",), "horizon": ("current", "last"), "share": ("individual",), "to": ("all",), "over": ("dialogue",),
    "mode": ("hint", "critic"), "visibility": ("predecessor",), "answering": ("all",), "critic_context": ("dialogue", "answer"),
    "lr_scheduler_type": ("linear", "cosine", "cosine_warmup_with_min_lr"), "by": ("legal",), "order": ("turns",), "call": ("text",), "vouch": ("given", "majority", "judge"), "check_argument": ("so",), "check_about": ("so",), "tag": ("q",), "within": ("dialogue",), "check": (None,), "grounding": ("env",), "proximity": ("label",),
    "approval": ("(?s)^",), "build": ("threshold",), "train": ("sft",), "select": ("random",), "loss": ("pairs",), "reference": ("stage",), "roles": (["solver"],),
    "form": ("cgc",), "reads": ("answer",), "critique": ("{draft}?",), "pairs": ("first",), "learn_from": ("new",), "when": ("always", "never"), "start": ("last",),
    "scores": ("answers",), "choose": ("random", "balanced"), "env": ("classic/connect_four-v3", "TicTacToe-v0"), "show": ("played_games:cells",), "mean_over": ("turn",), "reference_reads": ("answer",), "replay_size": ("all",), "pays": ("probability", "chips"), "end": ("done",), "posterior": ("beta",),
}  # fmt: skip
"""Other values of options that are words, by their key. Those that do not fit a recipe are refused."""
TELLING = {"dual_clip": 1.001, "max_grad_norm": 0.001, "huber_delta": 0.01}
"""The most telling value of an option that is a number."""
WITH = {"kl_coef": {"kl_in": "loss", "kl_estimator": "k3"}}
"""What changes too, where the checks refuse every other value alone: groups that are scaled have no KL in their
rewards."""
LONGEST, LONGEST_CALL, LONGEST_CALLS = 26, 40, 80
"""The most tokens of a scripted answer, of one that may be a call, and of one that may be two calls.

A longer one is cut off, as engines do it.
"""
SEED = 9
"""By this seed, past opponents of both ages speak within three updates."""
NO_TIMES = ("time/", "memory/", "tokens_per_second", "tools/seconds")


def words(request: Request, weights: str = "") -> str:
    """Say something that fits what is asked. It depends on the request's place in the run, and on ``weights``."""
    rng = random.Random(f"{request.rng_key or request.transcript.messages}{weights}")
    if moves := request.ask.tags.get("moves"):
        if rng.random() < 0.15:
            return "?"
        if request.ask.tags["game"] == "path_plans":
            return f"#### {json.dumps(route(request) if rng.random() < 0.5 else rng.choices(moves, k=2))}"
        return rng.choice(moves)
    if "entry_point" in request.example.meta:
        return rng.choice(program_texts(request.example.meta, request.ask.role))
    if request.ask.taught and request.ask.tags.get("game"):
        return "" if rng.random() < 0.15 else rng.choice(request.ask.taught)  # TextArena reads all but silence
    wrong = rng.random() < 0.5
    if request.ask.example is not None and request.example.question.startswith("0+"):
        return "1"  # all tries of such a proposal agree
    if "Verdict: good" in request.ask.taught:
        return rng.choice([*request.ask.taught, "no"])
    if "start" in request.example.meta:
        return rng.choice(looking_up(request, wrong))
    if request.example.id.startswith("judged") and "Score: N" in request.ask.messages[-1]["content"]:
        return rng.choice(["Score: 9", "Score: 5", "Score: 2", "no"])
    if request.example.id.startswith("judged") and "Label: 1" in request.ask.messages[-1]["content"]:
        return rng.choice(["Label: 1", "Label: 0", "Label: 0.5", "no"])
    number = str(int(request.example.answer or 0) + wrong * rng.randint(1, 5))
    answers = [number, f"Answer: {number}", f"Answer: {number}{' so' * 9}", "no"]
    special = {
        "orchestrator": [f"<next>{name}</next>" for name in ("solver", "critic", "writer", "end", "so")],
        "verifier": [f"<verify>{verdict}</verify>" for verdict in ("approve", "reject")],
        "designer": ["A: go", "A: go\nB: on", "A: go\nB: on\nC: end", "no"],
        "planner": ["<call>1+1</call>", number],
        "proposer": proposals(request),
        "judge": ["10", "9", "8", "1", "no"],
        "scorer": ["no", *(f"<score>{score}</score>" for score in (1, 2, 3))],
        None: ["Better: A", "Better: B"] if request.example.id.startswith("judged") else answers,
    }
    return rng.choice(special.get(request.ask.role, answers))


def proposals(request: Request) -> list[str]:
    """Return questions for the answer that a proposer is told, one for another answer, and none; with it where it is to
    be stated."""
    answer = request.example.answer
    sums = [f"{answer}+0", f"0+{answer}", "1+98"]
    if any(text.startswith("<q>") for text in request.ask.taught):
        return [*(f"<q>{text}</q><a>{answer}</a>" for text in sums), "<q>1</q>"]
    return [*sums, "no"]


def program_texts(meta: dict[str, Any], role: str | None) -> list[str]:
    """Right, half right, wrong and unreadable programs and tests of ``tiny_programs``, in few characters."""
    if role == "tester":
        return [f"assert f(0)=={meta['values'][0]}", "assert f(0)==99", "assert f(1)", "no"]
    right = meta["reference"].partition("return ")[2]
    half = f"({right})*(x<{len(meta['values']) + 1})"  # the values that are shown, and the first that is not
    return [*(f"```f=lambda x:{body}```" for body in (right, half, "-1")), "no"]


def looking_up(request: Request, wrong: bool) -> list[str]:
    """Return what an agent of a team that looks facts up may say: calls, verdicts and queries, and right or wrong
    names."""
    start = request.example.meta["start"]
    name = start if wrong else request.example.answer
    answers = [name, f"Answer: {name}", f"Answer: {name}{' so' * 12}", "no"]
    if request.ask.agent == "lead" and request.ask.continues is None:
        return [*answers, *[f"<ask_searcher>{start}></ask_searcher>" * 2] * 3]
    if request.ask.agent == "searcher" and request.ask.role == "planner":
        return [*answers, *[f"<search>{start}</search>"] * 4]
    return {
        "orchestrator": [f"<next>{name}: {start}</next>" for name in ("searcher", "thinker", "done")],
        "verifier": ["<verify>stop</verify>", "<verify>continue</verify>", "no"],
        "judge": [*request.ask.taught, "no"],
        "router": [
            "<verify>yes</verify>",
            "<verify>yes</verify><verify>no</verify>",
            *["<verify>no</verify>"] * 4,
            "no",
        ],
        "searcher": [f"<search>{start}</search>", start],
        "planner": [*answers, *([] if request.ask.continues else [f"<ask_searcher>{start}></ask_searcher>"] * 3)],
        "worker": [*answers, *([] if request.ask.continues else [f"<search>{start}</search>"] * 3)],
    }.get(request.ask.role or "", answers)


def script_of(policies: dict[str, Policy]) -> Callable[[Request], str]:
    """Return the script of a team. What policies of the past say depends on their weights."""

    def script(request: Request) -> str:
        policy = policies[request.policy]
        own = [
            p for name, p in policy.model.named_parameters() if f".{policy.adapter}." in name or policy.adapter is None
        ]
        return words(request, "" if policy.trainable else str(float(sum(p.detach().double().sum() for p in own))))

    return script


def longest_answer(values: dict[str, Any]) -> int:
    if "parallel" in str(values["agents"]):
        return LONGEST_CALLS
    return LONGEST_CALL if values.get("environments") else LONGEST


def leaves(values: Any, path: Keys = ()) -> Iterator[Keys]:
    """Yield the path of every value that is neither a mapping with keys nor a list that contains mappings."""
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    elif isinstance(values, list) and any(isinstance(v, dict) for v in values):
        for number, value in enumerate(values):
            yield from leaves(value, (*path, number))
    else:
        yield path


def is_option(path: Keys) -> bool:
    parts = [str(part) for part in path]
    if parts[0] == "agents" and len(parts) == 2:
        return False  # an agent without options of its own
    patterns = [pattern.split(".") for pattern in NO_OPTIONS]
    return not any(
        len(pattern) <= len(parts) and all(a in ("*", b) for a, b in zip(pattern, parts, strict=False))
        for pattern in patterns
    )


def at(values: Any, path: Keys) -> Any:
    for part in path:
        values = values[part]
    return values


def with_value(values: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """Return a copy of ``values`` with another value at a path.

    If the value names an agent, two agents change places. Adapters change in all agents, because some schedules let
    agents exchange them.
    """
    changed = copy.deepcopy(values)
    for agent in changed["agents"] if path[0] == "agents" and "lora" in path else ():
        at(changed, ("agents", agent, *path[2:-1]))[path[-1]] = value
    section, key = at(changed, path[:-1]), path[-1]
    if value in list(values["agents"]):
        section |= {other: section[key] for other, named in section.items() if named == value}
    section[key] = value
    return changed


def others(path: Keys, value: Any) -> list[Any]:
    """Return other values for a key, the most telling first."""
    key = next(part for part in reversed(path) if isinstance(part, str))
    if isinstance(value, bool):
        found: list[Any] = [not value]
    elif key in TELLING:
        found = [TELLING[key]]
    elif isinstance(value, int):
        found = [2 * value, 1, 2, value + 1, 0]
    elif isinstance(value, float):
        found = [value / 1000, 2 * value, 1.0, value + 0.5]
    elif isinstance(value, list):
        shorter = [value[:n] + value[n + 1 :] for n in range(len(value))]
        found = [value[::-1], *([name] for name in NAMES.get(key, ())), *shorter]
    else:
        found = [*NAMES.get(key, (f"So, {value}",))]
    return [other for other in found if other != value]


class Record(TrainerCallback):
    """Records the metrics of updates without times, and ends the training after the first that is not ``expected``."""

    def __init__(self, expected: list[Metrics] | None):
        self.expected, self.found = expected, []

    def on_log(self, args, state, control, logs, **kwargs):
        self.found.append({key: value for key, value in logs.items() if not key.startswith(NO_TIMES)})
        control.should_training_stop = self.expected is not None and self.differs()

    def differs(self) -> bool:
        """Return whether an update measured something else."""
        return self.found != self.expected[: len(self.found)]


class Perturbed:
    """A recipe's tiny version, and whether three updates of it measure something else if one option is changed."""

    def __init__(self, name: str, folder: Path):
        self.name, self.recipe, self.folder = name, read_yaml(recipe_file(name)), folder
        self.values = self._tiny(self.recipe)
        self.loops = "loop" in self.values
        self.plain = self._train(self.values, None).found
        assert len(self.plain) == (self.values["loop"]["rounds"] if self.loops else 3)
        assert self.differs(self.values) is False, f"{name}: the same run measured something else"

    def _tiny(self, recipe: dict[str, Any]) -> dict[str, Any]:
        values = shrunk(recipe, str(self.folder)) | {"evaluation": {"questions": 0}, "seed": SEED}
        if "label" in values["reward"]["sources"]:  # the tiny version has added a reward
            values["reward"]["sources"] = recipe.get("reward", {}).get("sources", {"label": 1.0})
        if "annotator" in values["reward"]["sources"]:
            values["task"] |= {"count": 2}  # so that what is observed comes again within three updates
        values["training"] |= {} if "loop" in values else {"save_steps": 0}
        if "loop" not in values:
            del values["warm_start"]
        return values

    def _train(self, values: dict[str, Any], expected: list[Metrics] | None) -> Record:
        """Train, as long as updates measure what is ``expected``.

        Raises:
            ConfigError: the configuration is refused.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.loops:
            return self._run_loop(values, expected)
        trainer = build_trainer(from_dict(values, self.name), quiet=True)
        policies = trainer.team.policies
        engine = TokenScript(policies, script_of(policies), longest_answer(values), "distill" in values["reward"])
        trainer.engines.update(dict.fromkeys(trainer.engines, engine))
        record = Record(expected)
        trainer.add_callback(record)
        trainer.train()
        return record

    def _run_loop(self, values: dict[str, Any], expected: list[Metrics] | None) -> Record:
        record = Record(expected)
        run_loop(from_dict(values, self.name), resume=False, quiet=True, tell=lambda line: None)
        record.found = RunFolder(self.folder).read_metrics()
        return record

    def differs(self, values: dict[str, Any]) -> bool | None:
        """Return whether a configuration measures something else, or stops. None means that it is refused."""
        try:
            return self._train(values, self.plain).differs()
        except ConfigError:
            return None
        except (ValueError, NonFiniteError, RunError, RewardFailure):
            return True

    def changed(self, path: Keys, other: Any) -> dict[str, Any]:
        """Return the tiny version with another value of the recipe's key, or of its own key if it has replaced it."""
        values = self._tiny(with_value(self.recipe, path, other))
        return with_value(self.values, path, other) if values == self.values else values

    def options(self) -> Iterator[tuple[str, Keys, list[Any]]]:
        """Yield every option that the recipe sets: its name, its path, and other values.

        Each column of the advantage's key is an option.
        """
        for path in filter(is_option, leaves(self.recipe)):
            name = ".".join(map(str, path))
            if path[-1] == "key":
                columns = at(self.recipe, path)
                for column in columns:
                    yield f"{name}.{column}", path, [[other for other in columns if other != column]]
            else:
                yield name, path, self._others(path)

    def _others(self, path: Keys) -> list[Any]:
        try:
            value = at(self.values, path)
        except (KeyError, IndexError, TypeError):  # the tiny version says it in another way
            value = at(self.recipe, path)
        agents = list(self.recipe["agents"])
        return [a for a in agents if a != value] if value in agents else others(path, value)

    def acts(self, name: str, path: Keys, values: list[Any]) -> bool:
        """Return whether one of these values of an option changes a metric.

        A name acts too if the checks refuse every other name in its place.

        Raises:
            ValueError: the checks refuse every other value of an option that is not a name.
        """
        found = []
        for value in values:
            changed = self.changed(path, value)
            found.append(self.differs(changed))
            if found[-1] is None and path[-1] in WITH:
                found[-1] = self.differs(changed | {path[0]: changed[path[0]] | WITH[str(path[-1])]})
            if found[-1]:
                return True
        if False not in found and not self._is_name(path):
            raise ValueError(f"{self.name}: {name}: all of {values} are refused; add others to NAMES")
        return False not in found

    def _is_name(self, path: Keys) -> bool:
        value = at(self.recipe, path)
        return path[-1] in NAMES or set(value if isinstance(value, list) else [value]) <= set(self.recipe["agents"])

    def inert(self) -> list[str]:
        return [option[0] for option in self.options() if not self.acts(*option)]
