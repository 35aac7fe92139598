"""One run from a configuration: build, warm-start, evaluate, train, evaluate, save. What the command line calls."""

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import set_seed

from maporl.team.team import Team
from maporl.config.schema import Config
from maporl.errors import ConfigError
from maporl.config.parse import to_yaml
from maporl.engines import Engine
from maporl.engines.openai import OpenAIEngine
from maporl.evaluation.metrics import Evaluation, Share, evaluate_dialogues, majority_credit
from maporl.training.args import MultiAgentPPOConfig
from maporl.protocols import Protocol, build_protocol, speakers
from maporl.protocols.debate import Debate
from maporl.rewards import grade_answers
from maporl.validation.preflight import tasks_of, training_arguments
from maporl.storage.run_folder import RunExists
from maporl.config.schema import WarmStartSection
from maporl.evaluation.suite import SuiteResult, summarise
from maporl.tasks import Task, build_task
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.types import Dialogue, Grade, to_json, without_tokens
from maporl.training.warm_start import warm_start
from trl_ext import distributed
from trl_ext.atomic import new_folder, replace_file
from trl_ext.checkpoint import CheckpointError, list_checkpoints, load_weights, save_policy_weights


def build_trainer(config: Config, team: Team | None = None, quiet: bool = False) -> MultiAgentPPOTrainer:
    """The trainer of a configuration, its models loaded and warm-started (or read from the run's ``initial/``)."""
    set_seed(config.seed)
    args = training_arguments(config)
    names = tuple(config.agents)
    task, held_out = tasks_of(config)
    protocol = build_protocol(config.protocol, names)
    team = team or Team.from_config(config)
    if config.warm_start.steps:
        _warm_start(config, team, task, protocol, quiet)
    args.disable_tqdm = quiet
    stages = config.schedule.curriculum
    return MultiAgentPPOTrainer(
        args,
        team,
        task,
        protocol=protocol,
        eval_task=held_out,
        reward=config.reward,
        speakers=speakers(config.protocol, names),
        schedule=config.schedule,
        advantage=config.advantage,
        branching=config.branching,
        curriculum=[(s.update, build_task(config.task | s.task, "train", config.seed)) for s in stages],
        engines=_engines(config, team, args),
    )


def _engines(config: Config, team: Team, args: MultiAgentPPOConfig) -> dict[str, Engine]:
    """The engines that talk to servers."""
    engines: dict[str, Engine] = {}
    apis = {name: agent.api for name, agent in config.agents.items() if agent.api is not None}
    if apis:
        engines["openai"] = OpenAIEngine(apis, args.response_length)
    served = {name: agent.vllm for name, agent in config.agents.items() if agent.vllm is not None}
    sections = {p.name: served[p.agents[0]] for p in team.policies.values() if p.agents and p.agents[0] in served}
    if sections:
        from maporl.engines.vllm import VLLMEngine

        policies = {name: team.policies[name] for name in sections}
        folder = Path(config.output_dir) / "adapters"
        engines["vllm"] = VLLMEngine(policies, sections, args.response_length, args.temperature, folder)
    return engines


def _warm_start(config: Config, team: Team, task: Task, protocol: Protocol, quiet: bool) -> None:
    """Warm-start the team, or read it from the run's ``initial/``: it is PPO's reference, also after resuming."""
    initial = Path(config.output_dir) / "initial"
    if not distributed.is_main():
        distributed.barrier()  # for the main process to write it
    if initial.is_dir():
        for policy in team.policies.values():
            load_weights(policy.model, policy.adapter, initial / policy.name)
        if distributed.is_main():
            distributed.barrier()
        return
    names = speakers(config.protocol, tuple(config.agents))
    warm_start(team, task, protocol, config.warm_start, config.seed, names, quiet)
    with new_folder(initial) as partial:
        for policy in team.policies.values():
            save_policy_weights(policy.model, policy.adapter, policy.tokenizer, partial / policy.name)
    distributed.barrier()


def train(config: Config, resume: bool, quiet: bool = False) -> tuple[Evaluation | None, Evaluation | None]:
    """Run ``config`` to its end; returns the evaluations before and after, None where evaluation is off.

    ``resume`` goes on from the newest checkpoint; a run that was stopped before its first one starts again.
    """
    folder = Path(config.output_dir)
    if distributed.is_main():
        _claim(folder, config, resume)
    if resume and (folder / "final").is_dir():
        if distributed.is_main():
            print(f"{folder}: its run has ended; there is nothing to go on with", file=sys.stderr, flush=True)
        return _ended(config, folder)
    try:
        trainer = build_trainer(config, quiet=quiet or not distributed.is_main())
        before = _evaluation(trainer, folder / "evaluation_before.json")
        from_checkpoint = distributed.broadcast_from_main(resume and bool(list_checkpoints(folder)))
        if resume and not from_checkpoint:
            if distributed.is_main():
                print(f"{folder}: has no whole checkpoint; the run begins anew", file=sys.stderr, flush=True)
            trainer.run.rewind(0)
        trainer.train(resume_from_checkpoint=from_checkpoint)
    except Exception:
        if not resume and distributed.is_main():
            _release(folder)
        raise
    with new_folder(folder / "final", distributed.is_main()) as partial:
        trainer.save_model(str(partial))
    return before, _evaluation(trainer, folder / "evaluation_after.json")


def _ended(config: Config, folder: Path) -> tuple[Evaluation | None, Evaluation | None]:
    """The evaluations of a run that has its final weights; the last one is made up for where the run was killed before it."""
    files = [folder / f"evaluation_{when}.json" for when in ("before", "after")]
    if config.evaluation.questions and not files[1].exists():
        with tempfile.TemporaryDirectory() as scratch:
            settings = dataclasses.replace(config, output_dir=scratch, warm_start=WarmStartSection(steps=0))
            trainer = build_trainer(settings, quiet=True)
            load_checkpoint_weights(trainer, folder / "final")
            _evaluation(trainer, files[1])
    before, after = (Evaluation.from_json(json.loads(file.read_text())) if file.exists() else None for file in files)
    return before, after


def _claim(folder: Path, config: Config, resume: bool) -> None:
    """Take the output folder for this run, or make sure that it is this run's."""
    file, text = folder / "config.yaml", to_yaml(config)
    if resume:
        if not file.is_file():
            raise CheckpointError(f"{folder}: no config.yaml, so there is no run to resume; start without --resume")
        if file.read_text() != text:
            changed = _changed_lines(file.read_text(), text)
            raise CheckpointError(
                f"{folder}: its run was started with another configuration ({changed}); resume with the same one"
            )
        return
    if folder.exists() and any(folder.iterdir()):
        raise RunExists(
            f"{folder}: exists and is not empty; nothing was overwritten. Go on with its run (--resume), or choose another "
            "folder (--set output_dir=...)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with file.open("x") as new:  # another run that claims the folder at this very moment fails
        new.write(text)


def _release(folder: Path) -> None:
    """Empty the folder of a run that failed before anything was trained, so that a corrected one can have it."""
    untrained = {"config.yaml", "evaluation_before.json", "evaluation_before.jsonl", ".partial-initial"}
    if {path.name for path in folder.iterdir()} <= untrained:
        shutil.rmtree(folder / ".partial-initial", ignore_errors=True)
        for path in folder.iterdir():
            path.unlink()


def _changed_lines(old: str, new: str) -> str:
    pairs = [(a.strip(), b.strip()) for a, b in zip(old.split("\n"), new.split("\n"), strict=False) if a != b]
    return f"was {pairs[0][0]!r}, is {pairs[0][1]!r}" if pairs else "it has other keys"


def _evaluation(trainer: MultiAgentPPOTrainer, file: Path) -> Evaluation | None:
    """Measure the team now and record it in ``file``; a resumed run finds what it measured before."""
    if trainer.eval_task is None:
        return None
    known = distributed.broadcast_from_main(file.read_text() if distributed.is_main() and file.exists() else None)
    if known is not None:
        return Evaluation.from_json(json.loads(known))
    dialogues = trainer.play_evaluation()
    evaluation = evaluate_dialogues(dialogues)
    if distributed.is_main():
        replace_file(file.with_suffix(".jsonl"), "".join(to_json(without_tokens(d)) + "\n" for d in dialogues))
        replace_file(file, json.dumps(evaluation.to_json(), indent=1))
    return evaluation


def load_checkpoint_weights(trainer: MultiAgentPPOTrainer, checkpoint: Path) -> None:
    """Weights of a ``checkpoint-N`` or ``final`` folder into the team, for evaluation."""
    root = checkpoint / "policies" if (checkpoint / "policies").is_dir() else checkpoint
    for policy in trainer.team.policies.values():
        if policy.trainable:
            if not (root / policy.name).is_dir():
                raise CheckpointError(
                    f"{checkpoint}: no folder for policy {policy.name!r}; expected a checkpoint-N or final folder"
                )
            load_weights(policy.model, policy.adapter, root / policy.name)
