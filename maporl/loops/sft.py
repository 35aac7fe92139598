"""Supervised training of a team's policies before PPO, on the task's own solutions or on the best recorded debates.

Token sequences are built as transcripts build them, so that PPO later sees the same sequences. TRL's ``SFTTrainer``
trains on them, with the loss on the agents' own utterances only.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from datasets import Dataset
from transformers import PrinterCallback

from maporl.config.schema import Config
from maporl.engines.transcript import supervised_rows
from maporl.errors import ConfigError
from maporl.from_trl import SFTConfig, SFTTrainer
from maporl.loops.sft_options import SFTOptions
from maporl.report.charts import finite
from maporl.report.files import unlike
from maporl.rollout.agent_tools import formats_of_schemas, tools_of_team
from maporl.run import ResolvedRun
from maporl.storage.run_folder import must_be_empty
from maporl.tasks.base import Task
from maporl.team.team import Team
from maporl.text import well_formed_json
from maporl.training.args import name_of_run
from maporl.types import Dialogue, Utterance, from_record
from trl_ext.files.atomic import new_folder
from trl_ext.files.jsonl import whole_lines
from trl_ext.files.lock import RunLock
from trl_ext.files.paths import below
from trl_ext.process import distributed
from trl_ext.sharding.master_weights import MasterAdamW


def solutions(team: Team, task: Task, opening: str, limit: int | None = None) -> list[Dialogue]:
    """Return one-turn dialogues in which every agent answers with :meth:`Task.solution`.

    ``opening`` is the prompt template with ``{question}``. ``limit`` takes the first questions only.
    """
    dialogues = []
    for number in range(min(len(task), limit or len(task))):
        example = task[number]
        prompt = [{"role": "user", "content": opening.replace("{question}", task.question(example))}]
        utterances = []
        for position, (name, agent) in enumerate(team.agents.items()):
            system = [{"role": "system", "content": agent.system}] if agent.system else []
            policy = team.policies_of[name][0].name if name in team.policies_of else name
            utterances.append(Utterance(position, name, policy, 0, 0, [*system, *prompt], task.solution(example)))
        dialogues.append(Dialogue(example, utterances))
    return dialogues


def best_debates(file: Path, share: float) -> list[Dialogue]:
    """Return the best ``share`` of the dialogues in a ``dialogues.jsonl``, by the mean score of their last turn.

    Of equally good ones, those on different questions come first, because many scores are 0 or 1.

    Raises:
        ConfigError: the file is missing or empty, ``share`` is not in (0, 1], or an answer has no score.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"--best: expected a share above 0 and at most 1, got {share}")
    recorded = recorded_dialogues(file)
    for number, (_, dialogue) in enumerate(recorded, 1):
        if any(finite(u.rewards.get("score")) is None for u in dialogue.answers()):
            raise ConfigError(f"{file}: line {number}: an answer has no score, so debates cannot be told apart")
    alike = Counter[tuple[int, int, float]]()
    rated = []
    for step, dialogue in recorded:
        score = _final_score(dialogue)
        rated.append((-score, alike[step, dialogue.prompt, score], dialogue))
        alike[step, dialogue.prompt, score] += 1
    rated.sort(key=lambda entry: entry[:2])
    return [dialogue for *_, dialogue in rated[: max(1, round(share * len(rated)))]]


def recorded_dialogues(file: Path) -> list[tuple[int, Dialogue]]:
    """Return the dialogues in a ``dialogues.jsonl``, each with the step in which it was recorded.

    Raises:
        ConfigError: the file is missing or empty, or a line of it is not a dialogue.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; give a run's dialogues.jsonl (dialogues_logged says how many it has)")
    dialogues = []
    for number, (_, record) in enumerate(whole_lines(file), 1):
        with unlike(f"{file}: line {number}: is not a dialogue", kind=ConfigError):
            dialogues.append((int(record.get("step", 0)), from_record(well_formed_json(record))))
            _ = [dict(u.rewards) for u in dialogues[-1][1].utterances]
    if not dialogues:
        raise ConfigError(f"{file}: holds no dialogues")
    return dialogues


def _final_score(dialogue: Dialogue) -> float:
    scores = [u.rewards["score"] for u in dialogue.at(dialogue.turns() - 1)]
    return sum(scores) / len(scores) if scores else -math.inf  # nobody answered


def spoken_by_team(dialogue: Dialogue, team: Team) -> Dialogue:
    """Return ``dialogue`` as the policies of ``team`` would have said it, where others did, such as models behind an
    API."""

    def policy(utterance: Utterance) -> str:
        speaking = team.policies_of.get(utterance.agent, ())
        if not speaking or utterance.policy in team.policies:
            return utterance.policy
        return speaking[min(utterance.turn, len(speaking) - 1)].name

    return replace(dialogue, utterances=[replace(u, policy=policy(u)) for u in dialogue.utterances])


def train_supervised(
    config: Config,
    team: Team,
    dialogues: Sequence[Dialogue],
    folder: Path,
    options: SFTOptions | None = None,
    quiet: bool = False,
) -> dict[str, float]:
    """Train every trainable policy on its agents' utterances in ``dialogues``, and save it in ``folder/NAME``.

    A configuration reads these folders as ``agents.NAME.model``, or as ``agents.NAME.adapter`` for a LoRA. A policy's
    folder appears when it is complete.

    Returns:
        The mean training loss by policy.

    Raises:
        RunExists: ``folder`` exists and is not empty.
        FolderInUse: another process trains into ``folder``.
    """
    must_be_empty(folder)
    if not distributed.is_main():
        return _train_policies(config, team, dialogues, folder, options or SFTOptions(), quiet)
    with RunLock(folder):
        must_be_empty(folder)  # another process may have written it since
        return _train_policies(config, team, dialogues, folder, options or SFTOptions(), quiet)


def _train_policies(
    config: Config, team: Team, dialogues: Sequence[Dialogue], folder: Path, options: SFTOptions, quiet: bool
) -> dict[str, float]:
    losses = {}
    run = ResolvedRun(config)
    tools = run.open_tools()
    may_call = tools_of_team(tools, team, 0, run.protocol, run.speakers)
    formats = {name: formats_of_schemas(name, team.voice_of(name), tools.grants) for name in run.speakers}
    tools.world.close()
    dialogues = [spoken_by_team(dialogue, team) for dialogue in dialogues]
    for policy in (p for p in team.policies.values() if p.trainable):
        rows = supervised_rows(policy, dialogues, may_call, formats=formats)
        if not rows:
            continue
        args = SFTConfig(
            output_dir=str(folder),
            num_train_epochs=options.epochs,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=options.batch_size,
            completion_only_loss=True,
            max_length=None,
            bf16=config.training.bf16,
            gradient_checkpointing=config.training.gradient_checkpointing,
            use_cpu=config.training.use_cpu,
            seed=config.seed,
            weight_decay=policy.algorithm.of_learner.get("weight_decay", config.training.weight_decay),
            logging_steps=10,
            save_strategy="no",
            report_to=config.training.report_to,
            run_name=name_of_run(folder),
            disable_tqdm=quiet,
        )
        with policy.active():
            trainer = SFTTrainer(
                model=policy.model,
                args=args,
                train_dataset=Dataset.from_list(
                    [{"input_ids": ids, "completion_mask": [int(sampled) for sampled in mask]} for ids, mask in rows]
                ),
                processing_class=policy.tokenizer,
                optimizer_cls_and_kwargs=(MasterAdamW, {"lr": options.learning_rate}),
            )
            if quiet:
                trainer.remove_callback(PrinterCallback)
            losses[policy.name] = float(trainer.train().training_loss)
        if distributed.is_main():
            with new_folder(below(folder, policy.name)) as partial:
                policy.save(partial)
    return losses
