"""What a loop does in a round: its stages with their builders, checked before anything is sampled. No torch."""

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from maporl.config.loops import PPOStage, RowsStage, StageSection, TurnCriticStage
from maporl.config.parse import build_named, entry_name
from maporl.config.schema import Config, TrainingOptions
from maporl.errors import ConfigError
from maporl.loops.builder import Builder
from maporl.loops.builders import BUILDERS
from maporl.loops.ranked import RankHalves
from trl_ext.process import distributed

Stage = tuple[StageSection, Builder | None]
PPO_ONLY = ("updates", "advantage", "schedule")


def stages_of(config: Config) -> list[Stage]:
    """Return the stages of a loop with their builders, after checking that they fit each other.

    Raises:
        ConfigError: a builder is unknown or has wrong options, a builder's rows do not fit its trainer, rounds are to
            be accepted without an evaluation, or more than one process was launched.
    """
    if config.loop.accept == "not_worse" and not config.evaluation.questions:
        raise ConfigError(
            "loop.accept: not_worse compares held-out scores, and evaluation.questions is 0; set how many questions "
            "to ask"
        )
    if distributed.size() > 1:
        raise ConfigError(
            f"loop: runs in one process, and {distributed.size()} were launched; start it without a launcher"
        )
    stages: list[Stage] = []
    for number, section in enumerate(config.loop.stages):
        if section.train == "reward":
            _check_verifier(config, f"loop.stages.{number}")
        where = f"loop.stages.{number}.build"
        if not isinstance(section, RowsStage):
            stages.append((section, None))
            continue
        (builder,) = build_named([section.build], BUILDERS, where, Builder)
        if builder.makes not in section.takes:
            fitting = [name for name, kind in BUILDERS.items() if kind.makes in section.takes]
            raise ConfigError(
                f"{where}: makes {builder.makes}, and train: {section.train} takes {' or '.join(section.takes)}; use "
                f"one of {fitting}"
            )
        builder.check(config, section, [earlier.train for earlier, _ in stages], f"loop.stages.{number}")
        stages.append((section, builder))
    _check_read(stages)
    return stages


def _check_read(stages: Sequence[Stage]) -> None:
    """Check that what a critic of turns learns is read by a later stage."""
    for number, (section, _) in enumerate(stages):
        if isinstance(section, TurnCriticStage) and not any(isinstance(s, RankHalves) for _, s in stages[number:]):
            raise ConfigError(
                f"loop.stages.{number}: train: turn_critic changes no policy, and no later stage ranks by the critic; "
                "add {train: dpo, build: rank_halves, norm: true}}"
            )


def _check_verifier(config: Config, where: str) -> None:
    """Check that there is a verifier in this process to train, which reads whole dialogues."""
    verifier = config.reward.verifier
    if verifier is None or (verifier.model is None and verifier.tiny is None):
        raise ConfigError(
            f"{where}: train: reward trains reward.verifier, and it names no model; add reward.verifier: {{model: "
            "NAME, reads: dialogue}"
        )
    if verifier.reads != "dialogue":
        raise ConfigError(
            f"{where}: train: reward compares whole dialogues, and reward.verifier.reads is {verifier.reads}; set "
            "reads: dialogue"
        )


def trained_on(section: StageSection) -> str:
    """Return what a stage trains by, and on what, in words."""
    if isinstance(section, PPOStage):
        return f"{section.updates} update{'' if section.updates == 1 else 's'} of {section.train}"
    assert isinstance(section, RowsStage)
    return f"{section.train} on {entry_name(section.build)}"


def check_loop(config: Config, dialogues: int, condition: str, questions: int) -> list[str]:
    """Check the stages of a loop. Return what a round plays and trains as lines of text.

    Args:
        config: the configuration.
        dialogues: the number of dialogues that are played on a question.
        condition: says when this number holds, or is empty.
        questions: the number of questions of the training split.

    Raises:
        ConfigError: the stages cannot run.
    """
    loop = config.loop
    trained = ", then ".join(trained_on(section) for section, _ in stages_of(config))
    asked = min(loop.questions, questions)
    times = "1 round" if loop.rounds == 1 else f"{loop.rounds} rounds"
    lines = [
        f"loop: {times} of {asked} questions, {dialogues} dialogues for each ({asked * dialogues} in a "
        f"round{condition}), then {trained}, into {config.output_dir}"
    ]
    if loop.questions > questions:
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
