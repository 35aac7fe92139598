"""One training stage of a round of an outer loop (:mod:`maporl.loops`): from its rows to a folder with weights."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from transformers import set_seed

from maporl.config import Config
from maporl.config.schema import RewardSection, WarmStartSection
from maporl.errors import ConfigError, RunError
from maporl.loops.plan import Stage
from maporl.loops.ranked import RankHalves
from maporl.loops.rows import Comparison, Pair, Row, TrajectoryPair, described, written
from maporl.loops.section import (
    DPOStage,
    LoopSection,
    PolicyStage,
    PPOStage,
    PreferenceStage,
    RewardStage,
    TurnCriticStage,
)
from maporl.loops.shards import check_both_kinds, counts, dialogues_of, place_of, roles_of, speakers_in, stage_rows
from maporl.loops.stages import train_jointly, train_stage
from maporl.loops.turn_critic import FOLDER as TURN_CRITIC
from maporl.loops.turn_critic import read_by_critic, sample_candidates, train_turn_critic, turn_advantages
from maporl.loops.verifiers import FOLDER as VERIFIER
from maporl.loops.verifiers import train_verifier, verifier_of
from maporl.rollout.requests import opening
from maporl.run import ResolvedRun
from maporl.runs.build import build_trainer, find_device, load_checkpoint_weights, ready_to_play
from maporl.storage.run_folder import FINAL, INITIAL, RunFolder
from maporl.tasks.base import Task
from maporl.team.agents import Policy
from maporl.team.team import Team
from maporl.verifier.section import VerifierSection
from maporl.verifier.source import forget_verifiers
from trl_ext.chat.control_tokens import encode_words
from trl_ext.chat.encoding import encode_prompt, turn_end
from trl_ext.files.paths import below

OTHERS = "others"
"""What stages hand on beside the policies, such as a verifier."""


def team_with(config: Config, weights: Path) -> Team:
    """Return the team of a loop with the weights in one of its folders."""
    set_seed(config.seed)
    find_device(config)
    team = Team.from_config(config)
    for policy in team.policies.values():
        policy.load(below(weights, policy.name))
    return team


def save_team(team: Team, folder: Path) -> None:
    """Write the weights of all policies into ``folder``."""
    for policy in team.policies.values():
        policy.save(below(folder, policy.name))


class StageRun:
    """A stage of a round.

    Args:
        run: the run.
        stage: the stage with its builder.
        number: the number of the round, from 1.
        position: the number of the stage, from 0.
        sample: the folder of what was sampled in the round.
        weights: the folder of the weights before the stage.
        start: the folder of the weights at the start of the round.
        quiet: whether to hide progress.
        tell: is given warnings.
    """

    def __init__(
        self,
        run: ResolvedRun,
        stage: Stage,
        number: int,
        position: int,
        sample: Path,
        weights: Path,
        start: Path,
        quiet: bool,
        tell: Callable[[str], None],
    ):
        self.run, self.config, self.stage, self.section = run, run.config, stage, stage[0]
        self.number, self.position, self.sample = number, position, sample
        self.weights, self.start, self.quiet, self.tell = weights, start, quiet, tell
        self.root = Path(run.config.output_dir)

    def __call__(self, folder: Path) -> None:
        """Train, and write the weights, the rows and a manifest into ``folder``.

        Raises:
            RunError: no rows were made, or all rows of a policy are good, or bad, and it is trained by KTO.
        """
        rows = stage_rows(self.root, self.stage, self.number, self.position, self.config.seed)
        if (self.weights / OTHERS).is_dir():
            shutil.copytree(self.weights / OTHERS, folder / OTHERS)
        if isinstance(self.section, RewardStage):
            self._train_verifier(folder, self.section, [row for row in rows if isinstance(row, Comparison)])
        elif isinstance(self.section, TurnCriticStage):
            pairs = [row for row in rows if isinstance(row, TrajectoryPair)]
            self._train_turn_critics(folder, self.section, pairs)
        elif isinstance(self.section, PPOStage):
            self._update(folder, self.section)
        elif isinstance(builder := self.stage[1], RankHalves):
            states = [row for row in rows if isinstance(row, Row)]
            self._train_on(folder, self._ranked(folder, builder, states))
        else:
            self._train_on(folder, [row for row in rows if isinstance(row, Row | Pair)])

    def _train_verifier(self, folder: Path, section: RewardStage, comparisons: Sequence[Comparison]) -> None:
        """Train the verifier that later stages are paid by. The policies keep their weights."""
        (folder / "comparisons.jsonl").write_text(written(comparisons), encoding="utf-8")
        set_seed(self.config.seed)
        find_device(self.config)
        verifier = verifier_of(_verifier(self.config), self.weights if section.start == "last" else None)
        with tempfile.TemporaryDirectory() as scratch:
            figures = train_verifier(
                self.config, section, verifier, comparisons, self.run.task, Path(scratch), self.quiet
            )
        shutil.rmtree(folder / VERIFIER, ignore_errors=True)
        verifier.model.save_pretrained(folder / VERIFIER)
        verifier.tokenizer.save_pretrained(folder / VERIFIER)
        team = team_with(self.config, self.weights)
        save_team(team, folder)
        _write_manifest(folder, {"utterances": ""} | _untrained(team) | {"reward_model": figures})

    def _train_turn_critics(self, folder: Path, section: TurnCriticStage, rows: Sequence[TrajectoryPair]) -> None:
        """Train a critic of turns for each policy. The policies keep their weights."""
        critics, device = self._team(), find_device(self.config)
        ready_to_play(critics, device)
        figures: dict[str, Any] = dict(_untrained(critics))
        for policy in (p for p in critics.policies.values() if p.trainable):
            mine = [row for row in rows if row.policy == policy.name]
            if not mine:
                continue
            below(folder, f"{policy.name}.rows.jsonl").write_text(written(mine), encoding="utf-8")
            with tempfile.TemporaryDirectory() as scratch:
                figures[policy.name] |= train_turn_critic(self.config, section, policy, mine, Path(scratch), self.quiet)
            policy.save(below(folder / TURN_CRITIC, policy.name))
        del critics
        save_team(team_with(self.config, self.weights), folder)
        _write_manifest(folder, {"utterances": ""} | figures)

    def _ranked(self, folder: Path, builder: RankHalves, states: Sequence[Row]) -> list[Pair]:
        """Sample candidates in ``states``, rank them by the round's critics of turns, and return the pairs."""
        config, before = self.config, self.config.loop.stages[: self.position]
        number, learned = [(n, one) for n, one in enumerate(before) if isinstance(one, TurnCriticStage)][-1]
        trained = self.root / f"round-{self.number}/train-{number + 1}"
        began = self.root / INITIAL if learned.start == "initial" else trained  # it holds the unchanged policies
        said = {(d.prompt, d.rollout, u.id): (d, u) for d in dialogues_of(self.sample) for u in d.utterances}
        team = self._team()
        team.find_stop_ids(config.ppo)
        critics, reference = team_with(config, began), team_with(config, began)
        for one in (team, critics, reference):
            ready_to_play(one, find_device(config))
        pairs: list[Pair] = []
        with (folder / "candidates.jsonl").open("w", encoding="utf-8") as file:
            for name in dict.fromkeys(row.policy for row in states):
                if not below(trained / TURN_CRITIC, name).is_dir():
                    self.tell(
                        f"warning: {self._place}: policy {name!r} has no critic of turns, so nothing is ranked for it"
                    )
                    continue
                policy, critic, mine = (
                    team.policies[name],
                    critics.policies[name],
                    [r for r in states if r.policy == name],
                )
                critic.load(below(trained / TURN_CRITIC, name))
                key = (config.seed, "rank_halves", self.number, self.position)
                groups = sample_candidates(
                    self.run, policy, [(row, said[row.place][1]) for row in mine], builder.candidates, key
                )
                flat = [row for group in groups for row in group]
                reads = [
                    read_by_critic(critic.tokenizer, row, said[row.place][0].example, learned.privileged)
                    for row in flat
                ]
                plain = [(row.prompt_ids, row.completion_ids) for row in flat]
                by_reference = reads if builder.reference_reads == "answer" else plain
                values = turn_advantages(critic, reference.policies[name], reads, by_reference)
                ranked = iter([replace(row, value=value) for row, value in zip(flat, values, strict=True)])
                for group in groups:
                    candidates = [next(ranked) for _ in group]
                    file.write(written(candidates))
                    pairs += builder.paired(candidates)
        if not pairs:
            raise RunError(
                f"{self._place}: no pairs were made in {len(states)} states, because all candidates of a state are "
                "equal; sample at a higher temperature, or more candidates"
            )
        return pairs

    @property
    def _place(self) -> str:
        """How messages call this stage."""
        return place_of(self.section, self.number, self.position)

    def _update(self, folder: Path, section: PPOStage) -> None:
        """Train the policies by on-policy updates."""
        team, seed = self._team(), f"{self.config.seed}/ppo/{self.number}/{self.position}"
        figures = _train_by_updates(self.config, section, team, folder, self.weights, seed, self.quiet)
        save_team(team, folder)
        _write_manifest(folder, {"utterances": ""} | dict.fromkeys(_untrained(team), figures))

    def _team(self) -> Team:
        """Return the team with the weights at which the stage starts."""
        return team_with(self.config, self.root / INITIAL if self.section.start == "initial" else self.weights)

    def _train_on(self, folder: Path, rows: Sequence[Row | Pair]) -> None:
        """Train each policy on its own rows."""
        section, where = self.section, self._place
        dialogues = dialogues_of(self.sample)
        training_rows: dict[str, list[Row | Pair]] = {}
        references = {"round": self.start, "initial": self.root / INITIAL}
        reference = section.reference if isinstance(section, PreferenceStage) else None
        judge = team_with(self.config, references[reference]) if reference in references else None
        team = self._team()
        for one in filter(None, (judge, team)):
            ready_to_play(one, find_device(self.config))
        manifest: dict[str, Any] = {"utterances": counts(dialogues, section)}
        spoke = speakers_in(dialogues, roles_of(section))
        for policy in (p for p in team.policies.values() if p.trainable):
            mine = [
                encoded(row, policy, self._student(policy), self.run.task) if isinstance(row, Row) else row
                for row in rows
                if row.policy == policy.name
            ]
            manifest[policy.name] = described(mine)
            if mine:
                check_both_kinds(manifest[policy.name], where, policy.name)
                training_rows[policy.name] = mine
                below(folder, f"{policy.name}.rows.jsonl").write_text(written(mine), encoding="utf-8")
            elif policy.name in spoke:
                self.tell(f"warning: {where}: no rows for policy {policy.name!r}; its weights stay as they are")
        for name, figures in self._train_policies(team, judge, training_rows).items():
            manifest[name] |= figures
        save_team(team, folder)
        _write_manifest(folder, manifest)

    def _student(self, policy: Policy) -> str | None:
        """Return the system prompt of the agent that speaks with ``policy``."""
        return self.config.agents[policy.agents[0]].system

    def _train_policies(
        self, team: Team, judge: Team | None, rows: dict[str, list[Row | Pair]]
    ) -> dict[str, dict[str, float]]:
        """Train each policy on its rows, and return its figures. ``judge`` has the weights of the reference."""
        section, references = self.section, judge.policies if judge else {}
        assert isinstance(section, PolicyStage)
        with tempfile.TemporaryDirectory() as scratch:
            if isinstance(section, DPOStage) and section.joint:
                pairs = {
                    name: [row for row in policy_rows if isinstance(row, Pair)] for name, policy_rows in rows.items()
                }
                return train_jointly(self.config, section, team.policies, pairs, Path(scratch), self.quiet, references)
            return {
                name: train_stage(
                    self.config,
                    section,
                    team.policies[name],
                    policy_rows,
                    Path(scratch),
                    self.quiet,
                    references.get(name),
                )
                for name, policy_rows in rows.items()
            }


def _verifier(config: Config) -> VerifierSection:
    """Return the section of the verifier, which :func:`maporl.loops.plan.stages_of` has checked to be there."""
    if config.reward.verifier is None:
        raise ConfigError("reward.verifier: a stage trains it, and it is not described")
    return config.reward.verifier


def _untrained(team: Team) -> dict[str, dict[str, int]]:
    """Return what a manifest says of policies that learn, and that a stage leaves as they are."""
    return {policy.name: {"rows": 0} for policy in team.policies.values() if policy.trainable}


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


# -- on-policy updates as a stage --------------------------------------------------------------------------------------

_RUN = "run"
"""The folder of a stage in which the updates leave their metrics and dialogues."""


def _train_by_updates(
    config: Config, stage: PPOStage, team: Team, folder: Path, weights: Path, seed: str, quiet: bool
) -> dict[str, float]:
    """Train ``team`` in place, as the sections of ``config`` describe updates.

    Args:
        config: the loop's configuration.
        stage: the stage.
        team: the team, with the weights at which the stage starts.
        folder: the stage's folder.
        weights: the folder of the stage before it. If a verifier was trained there, it pays.
        seed: decides the order of questions and all that is sampled.
        quiet: whether to hide progress.

    Returns:
        The number of dialogues, and the mean score over the updates.
    """
    run = folder / _RUN
    trained = replace(
        config,
        output_dir=str(run),
        seed=Random(seed).getrandbits(31),
        updates=stage.updates,
        loop=LoopSection(),
        warm_start=WarmStartSection(),
        reward=_paid_by(config.reward, weights),
        branching=config.branching if stage.group is None else replace(config.branching, group=stage.group),
        training=replace(config.training, learning_rate=stage.learning_rate, save_steps=0),
        evaluation=replace(config.evaluation, questions=0),
    )
    forget_verifiers()
    try:
        build_trainer(trained, team, quiet).train()
        if trained.cluster.backend == "ray":  # other processes have trained copies of the weights
            load_checkpoint_weights(team.policies, run / FINAL)
    finally:
        forget_verifiers()
    metrics = RunFolder(run).read_metrics()
    return {"dialogues": metrics[-1]["episode"], "score": fmean(_score(record) for record in metrics)}


def _paid_by(reward: RewardSection, weights: Path) -> RewardSection:
    """Return the rewards of the updates: the score of the verifier that a stage before has trained, or else those of
    the run."""
    if not (weights / VERIFIER).is_dir() or reward.verifier is None:
        return reward
    verifier = replace(reward.verifier, model=str(weights / VERIFIER), tiny=None)
    return replace(reward, sources={"verifier": 1.0}, verifier=verifier)


def _score(metrics: Mapping[str, float]) -> float:
    return metrics["reward/score"]


def encoded(row: Row, policy: Policy, system: str | None, task: Task) -> Row:
    """Return ``row`` with token ids, if it holds texts: the question as a chat, the pieces one by one, and what ends an
    answer.

    Args:
        row: the row.
        policy: the policy that learns it.
        system: the system prompt of the agent that speaks with the policy.
        task: says how the question is put.
    """
    if row.example is None:
        return row
    question = {"role": "user", "content": task.question(row.example)}
    prompt = encode_prompt(policy.tokenizer, [*opening(system, task.before_question(row.example)), question], None)
    ids: list[int] = []
    bears: list[bool] = []
    for text, learned in row.pieces:
        new = encode_words(policy.tokenizer, text, special=True)
        ids += new
        bears += [learned] * len(new)
    end = turn_end(policy.tokenizer).ids
    bears += [True] * len(end)
    return replace(row, prompt_ids=prompt, completion_ids=[*ids, *end], bears_loss=bears, pieces=(), example=None)
