"""Arguments of :class:`maporl.MultiAgentPPOTrainer`."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from maporl.config.imports import look_up, must_take
from maporl.config.schema import Config, EvaluationSection, RunOptions, TrainingOptions
from maporl.credentials import without_secrets
from trl_ext.learning.arguments import deciding_names
from trl_ext.learning.config import PPOv2Config
from trl_ext.ppo.losses import OBJECTIVES, objective_of
from trl_ext.ppo.options import Decoding, PPOOptions, option

_OF_ONE_POLICY = (
    ("num_generations", 1, "branching=BranchingSection(group=...), the dialogues of each question"),
    ("critic_warmup", 0, "schedule=Schedule(critic_warmup=...)"),
)
"""Options of :class:`trl_ext.PPOv2Config` with their defaults, and what a team has in their place."""


@dataclass
class MultiAgentPPOConfig(TrainingOptions, RunOptions, PPOv2Config):  # type: ignore[misc]  # transformers' types are wider
    """:class:`trl_ext.PPOv2Config` for a team. An *episode* is a question that is asked. A
    branching may play several dialogues on it. (For one policy an episode is a completion.)

    Its options are those of the YAML sections ``ppo`` and ``training``, and those of
    ``transformers.TrainingArguments``. One update asks ``per_device_train_batch_size * gradient_accumulation_steps``
    questions, and plays as many dialogues for each as the branching says. Each policy then trains on all its utterances
    in them, ``per_device_train_batch_size`` rows at a time.

    Raises:
        ValueError: an option is out of its range, or is for a trainer of one policy.
    """

    may_change = PPOv2Config.may_change | {
        *("eval_questions", "eval_temperature", "eval_top_p", "eval_top_k", "dialogues_logged", "placement"),
    }

    eval_questions: int = option(
        EvaluationSection.questions, "Number of questions of the evaluation split that evaluate() plays."
    )
    eval_temperature: float = option(EvaluationSection.temperature, "Temperature of evaluation; 0 is greedy.")
    eval_top_p: float = option(EvaluationSection.top_p, "The same as top_p, in evaluations.")
    eval_top_k: int = option(EvaluationSection.top_k, "The same as top_k, in evaluations.")

    def __post_init__(self):
        if not self.save_steps:
            self.save_strategy, self.save_steps = "no", type(self).save_steps
        if self.eval_steps:
            self.eval_strategy = "steps"
        if self.load_best_model_at_end and not (self.eval_steps and self.metric_for_best_model):
            raise ValueError("load_best_model_at_end: needs eval_steps, and the name of a metric_for_best_model")
        PPOv2Config.__post_init__(self)
        for name, default, instead in _OF_ONE_POLICY:
            if getattr(self, name) != default:
                raise ValueError(f"{name}: is for PPOv2Trainer; a team has {instead}")

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments, with the ``sections`` of the configuration that a run tells its ``report_to``."""
        return super().to_dict() | vars(self).get("sections", {})

    @property
    def eval_decoding(self) -> Decoding:
        """How answers are sampled in evaluations."""
        return Decoding(self.eval_temperature, self.eval_top_p, self.eval_top_k)

    @classmethod
    def from_config(cls, config: Config) -> "MultiAgentPPOConfig":
        """Return the trainer's arguments for a YAML configuration.

        An objective of the user's own is put into :data:`trl_ext.ppo.losses.OBJECTIVES`, where learners look it up by
        its name.

        Raises:
            ConfigError: no objective has this name.
            ArgumentError: the objective fails on a few made-up tokens, or returns something else than it should.
            ValueError: transformers refuses an argument.
        """
        of_agents = {f"agents.{agent}.algorithm.": config.of(agent) for agent in config.agents}
        for name, place in {own.ppo.objective: at for at, own in (of_agents | {"": config}).items()}.items():
            objective = look_up(name, OBJECTIVES, f"{place}ppo.objective")
            must_take(objective, ("new", "old", "advantages", "mask", "options"), f"{place}ppo.objective: {name}")
            OBJECTIVES.setdefault(name, objective)
        processes = int(os.environ.get("WORLD_SIZE", "1"))  # each process plays its own batch in every update
        episodes = config.updates * config.questions_per_update() * processes
        args = cls(
            output_dir=config.output_dir,
            run_name=name_of_run(config.output_dir),
            seed=config.seed,
            eval_questions=config.evaluation.questions,
            eval_temperature=config.evaluation.temperature,
            eval_top_p=config.evaluation.top_p,
            eval_top_k=config.evaluation.top_k,
            dialogues_logged=config.dialogues_logged,
            restate=config.restate,
            **dataclasses.asdict(config.training),
            **dataclasses.asdict(config.ppo) | {"total_episodes": episodes},
        )
        objective_of(args)
        return args


def name_of_run(folder: str | Path) -> str:
    """Return the name of a run in the services of ``report_to``: that in ``WANDB_NAME`` or ``MLFLOW_RUN_NAME``, or the
    last two parts of its folder. Otherwise a service draws words at random.

    >>> name_of_run("/data/runs/debate/seed-3")
    'debate-seed-3'
    """
    named = os.environ.get("WANDB_NAME") or os.environ.get("MLFLOW_RUN_NAME")
    return named or "-".join(Path(folder).absolute().parts[1:][-2:])


_SERVERS = ("urls", "base_url", "key_variable", "concurrency", "timeout", "retries")
_ENGINES = ("length_field", "leave_out", "base", "folder", "gpu_memory_utilization", "sleep", "seconds")
_INSTANCES = ("seconds", "open_seconds", "close_seconds", "at_once", "on_lost", "lost_at_most", "isolate")
MAY_CHANGE = (
    *("output_dir", "pythonpath", "cluster", "evaluation", "dialogues_logged", "tools.*.seconds"),
    *("task*.source", "task*.eval_source", "schedule.*.source", "schedule.*.eval_source"),
    *("advantage*.singleton", "branching.posterior", "reward.judge.unreadable"),
    *(f"agents.*.{key}" for key in _SERVERS + _ENGINES),
    *(f"environments.*.{key}" for key in _INSTANCES),
    *(f"reward.verifier.{key}" for key in (*_SERVERS, "batch_size", "on_failure", "on_change")),
    *(
        f"{section}.{option.name}"
        for section, kind in (("ppo", PPOOptions), ("training", TrainingOptions))
        for option in dataclasses.fields(kind)
        if option.name not in deciding_names(MultiAgentPPOConfig)
    ),
)
"""The options that a run may change when it is resumed, as patterns: what decides no weights, what is compared
otherwise (rows of data have fingerprints, and a checkpoint knows its batch), and what mends a stop. Those of ``ppo``
and ``training`` are the options that checkpoints do not compare."""
OF_PROGRAMS = tuple(f"protocol.{key}" for key in ("on_failure", "seconds", "concurrency", "ignore"))
"""The same of the protocol ``program``. Another protocol may call something else so."""


def decisions_changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how the plain values of a run that is resumed differ from what they were, but for :data:`MAY_CHANGE`."""
    program = was.get("protocol", {}).get("name") == "program"
    return changes(was, now, MAY_CHANGE + OF_PROGRAMS * program)


def changes(was: Any, now: Any, free: Iterable[str] = (), at: str = "") -> list[str]:
    """Return how plain values differ from what they were, by option, but for those that are ``free``."""
    if any(fnmatchcase(at, pattern) for pattern in free):
        return []
    if isinstance(was, list | tuple) and isinstance(now, list | tuple) and len(was) == len(now):
        was, now = dict(enumerate(was)), dict(enumerate(now))
    if not (isinstance(was, Mapping) and isinstance(now, Mapping)):
        told = [without_secrets(value, at.rpartition(".")[2]) for value in (was, now)]
        return [] if was == now else [f"{at} was {told[0]!r:.80} and is {told[1]!r:.80}"]
    pairs = {key: (was.get(key), now.get(key), free, f"{at}.{key}".removeprefix(".")) for key in [*was, *now]}
    return [line for pair in pairs.values() for line in changes(*pair)]
