"""What a loop does in a round: its stages with their builders, checked before anything is sampled. No torch.

``BUILDERS`` names the builders (:mod:`maporl.loops.builder`).
"""

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from maporl.config.imports import Parts
from maporl.config.parse import build_named, entry_name
from maporl.config.schema import Config, TrainingOptions
from maporl.errors import Fault, refuse
from maporl.loops.builder import Builder
from maporl.loops.pairs import Comparisons, Gap, Siblings
from maporl.loops.ranked import RankHalves, TrajectoryPairs
from maporl.loops.section import PPOStage, RowsStage, StageSection, TurnCriticStage
from maporl.loops.singles import BestOf, Signs, Threshold
from trl_ext.process import distributed

BUILDERS = Parts(
    {
        "threshold": Threshold,
        "siblings": Siblings,
        "best_of": BestOf,
        "gap": Gap,
        "signs": Signs,
        "flatten": "maporl.methods.chain_of_agents:Flatten",
        "repair": "maporl.methods.agent_rlvr:Repair",
        "comparisons": Comparisons,
        "trajectory_pairs": TrajectoryPairs,
        "rank_halves": RankHalves,
    }
)
"""Name -> builder. What one method alone uses is in :mod:`maporl.methods`, and imported when it is looked up."""


Stage = tuple[StageSection, Builder | None]
PPO_ONLY = ("updates", "advantage", "schedule")


def stages_of(config: Config) -> list[Stage]:
    """Return the stages of a loop with their builders.

    Raises:
        ConfigError: :func:`faults` yields an error, or a builder is unknown or has wrong options.
    """
    refuse(faults(config))
    return _built(config)


def faults(config: Config) -> Iterator[Fault]:
    """Yield stages that do not fit each other, their builders or the run: a builder's rows do not fit its trainer,
    rounds are to be accepted without an evaluation, or more than one process was launched.

    Raises:
        ConfigError: a builder is unknown or has wrong options.
    """
    if config.loop.accept == "not_worse" and not config.evaluation.questions:
        what = "not_worse compares held-out scores, and evaluation.questions is 0"
        yield Fault("loop.accept", what, "set how many questions to ask")
    if config.loop.dialogues is not None and not Path(config.loop.dialogues).is_file():
        what = f"{config.loop.dialogues}: no such file"
        yield Fault("loop.dialogues", what, "give a dialogues.jsonl that maporl record or a run wrote")
    if distributed.size() > 1:
        what = f"runs in one process, and {distributed.size()} were launched"
        yield Fault("loop", what, "start it without a launcher")
    stages = _built(config)
    for number, (section, builder) in enumerate(stages):
        where = f"loop.stages.{number}"
        if section.train == "reward":
            yield from _verifier(config, where)
        if builder is None:
            continue
        assert isinstance(section, RowsStage)
        if builder.makes not in section.takes:
            fitting = [name for name, kind in BUILDERS.items() if kind.makes in section.takes]
            what = f"makes {builder.makes}, and train: {section.train} takes {' or '.join(section.takes)}"
            yield Fault(f"{where}.build", what, f"use one of {fitting}")
        yield from builder.check(config, section, [earlier.train for earlier, _ in stages[:number]], where)
        if isinstance(section, TurnCriticStage) and not any(isinstance(s, RankHalves) for _, s in stages[number:]):
            what = "train: turn_critic changes no policy, and no later stage ranks by the critic"
            yield Fault(where, what, "add {train: dpo, build: rank_halves, norm: true}")


def _built(config: Config) -> list[Stage]:
    """Return the stages of a loop with their builders, whether they fit or not."""
    return [
        (
            section,
            build_named([section.build], BUILDERS, f"loop.stages.{number}.build", Builder)[0]
            if isinstance(section, RowsStage)
            else None,
        )
        for number, section in enumerate(config.loop.stages)
    ]


def _verifier(config: Config, where: str) -> Iterator[Fault]:
    """Yield why the run has no verifier in this process that can be trained on whole dialogues."""
    verifier = config.reward.verifier
    if verifier is None or (verifier.model is None and verifier.tiny is None):
        what = "train: reward trains reward.verifier, and it names no model"
        yield Fault(where, what, "add reward.verifier: {model: NAME, reads: dialogue}")
    elif verifier.reads != "dialogue":
        what = f"train: reward compares whole dialogues, and reward.verifier.reads is {verifier.reads}"
        yield Fault(where, what, "set reads: dialogue")


def trained_on(section: StageSection) -> str:
    """Return what a stage trains by, and on what, in words."""
    if isinstance(section, PPOStage):
        return f"{section.updates} update{'' if section.updates == 1 else 's'} of {section.train}"
    assert isinstance(section, RowsStage)
    return f"{section.train} on {entry_name(section.build)}"


def loop_lines(config: Config, dialogues: int, condition: str, questions: int) -> list[str]:
    """Return what a round of a loop plays and trains, as lines of text.

    Args:
        config: the configuration.
        dialogues: the number of dialogues that are played on a question.
        condition: says when this number holds, or is empty.
        questions: the number of questions of the training split.
    """
    loop = config.loop
    trained = ", then ".join(trained_on(section) for section in loop.stages)
    asked = min(loop.questions, questions)
    rounds = loop.rounds - (loop.dialogues is not None)
    times = "1 round" if rounds == 1 else f"{rounds} rounds"
    lines = [
        f"loop: {times} of {asked} questions, {dialogues} dialogues for each ({asked * dialogues} in a "
        f"round{condition}), then {trained}, into {config.output_dir}"
    ]
    if loop.dialogues is not None:
        later = f"; after it {lines[0].removeprefix('loop: ')}" if rounds else ""
        lines = [f"loop: the dialogues of {loop.dialogues}, then {trained}, into {config.output_dir}{later}"]
    elif loop.questions > questions:
        lines.append(
            f"warning: loop.questions={loop.questions}, but the training split has {questions}; a round asks each once"
        )
    return lines if any(section.train == "ppo" for section in loop.stages) else [*lines, *_unread(config)]


def _unread(config: Config) -> list[str]:
    """Return a warning for each part of the configuration that was changed and that a loop does not read."""
    declared = {field.name: field for field in fields(Config)}
    changed = [name for name in PPO_ONLY if getattr(config, name) != _default(declared[name])]
    if config.training.learning_rate != TrainingOptions().learning_rate:
        changed.append("training.learning_rate")
    instead = {"updates": "loop.rounds", "training.learning_rate": "learning_rate of each stage"}
    return [
        f"warning: {name}: PPO reads it, and a loop does not; "
        f"{f'set {instead[name]}' if name in instead else 'remove it'}"
        for name in changed
    ]


def _default(field: Field) -> Any:
    """Return the default of a dataclass's field."""
    return field.default if field.default_factory is MISSING else field.default_factory()
