"""Run an outer loop (:mod:`maporl.loops`): sample, build, train, evaluate, repeat.

:func:`maporl.runs.train.train` calls this where a configuration has stages.
"""

import json
import random
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import lexists
from pathlib import Path
from typing import Any

from transformers import set_seed

from maporl.config import Config
from maporl.evaluation.metrics import SCORE, Evaluation
from maporl.loops.plan import Stage, stages_of
from maporl.loops.recorded import round_of_record
from maporl.loops.run_stage import StageRun, save_team, team_with
from maporl.loops.shards import dialogues_of
from maporl.report.audit import dialogue_counts
from maporl.rewards.build import asks_untrained
from maporl.rewards.identity import recall_verifiers, record_verifiers
from maporl.rollout.branching import play_branched
from maporl.rollout.player import Player, evaluate_everywhere
from maporl.rollout.restate import UntrainedWeights
from maporl.run import ResolvedRun
from maporl.runs.build import find_device, loaded_player, player_of, ready_to_play
from maporl.runs.claim import claim, must_be_free, must_hold_run
from maporl.runs.evaluate import CHUNK
from maporl.storage.run_folder import FINAL, INITIAL, RunFolder, has_final
from maporl.text import printable
from maporl.training.run_record import AFTER, BEFORE, CONFIG, RunRecord, record_evaluation
from maporl.types import Dialogue, to_json, without_tokens
from trl_ext.files.atomic import new_folder, replace_file
from trl_ext.files.lock import RunLock
from trl_ext.files.manifest import verify, write_manifest
from trl_ext.files.set_aside import ABANDONED, set_aside
from trl_ext.learning.audit import COUNT
from trl_ext.process.interruptions import Interrupted, Interruptions, Terminated
from trl_ext.process.messages import tell
from trl_ext.process.waits import Discarded

Tell = Callable[[str], None]
EVALUATION = "evaluation.json"


def run_loop(config: Config, resume: bool, quiet: bool = False, tell: Tell | None = None) -> list[dict[str, Any]]:
    """Run the loop of ``config`` to its end, and return the figures of its rounds.

    Args:
        config: the configuration. It has a section ``loop`` with stages.
        resume: whether to go on with the loop in ``output_dir``.
        quiet: whether to hide progress.
        tell: is given a line for every part of a round, and every warning. By default they go to standard error; with
            ``quiet`` only the warnings.

    Raises:
        ConfigError: the configuration cannot run.
        RunExists: the output folder is not empty, and ``resume`` is false.
        CheckpointError: the folder holds no loop to resume, or one of another configuration or of other data, or a part
            of a round is damaged.
        FolderInUse: another process works in the folder.
        RunError: the data set of a stage is empty.
        Interrupted: the user pressed Ctrl-C. The parts that are complete are kept.
        SystemExit: with status 143, after SIGTERM. The parts that are complete are kept.
    """
    run, stages, folder = ResolvedRun(config), stages_of(config), Path(config.output_dir)
    (must_hold_run if resume else must_be_free)(folder)
    with RunLock(folder):
        claim(folder, run, resume)
        try:
            return _interruptible(Loop(run, stages, quiet, tell or partial(_tell, quiet=quiet)))
        finally:
            RunRecord(folder, config).report(warn=False)


def _interruptible(loop: "Loop") -> list[dict[str, Any]]:
    """Run ``loop``. A signal drops the part that is being made, and the others are kept."""
    with Interruptions() as interruptions:
        try:
            with interruptions.droppable():
                return loop.run()
        except (Discarded, Interrupted, Terminated) as stopped:  # the last two are those of a stage that trains by PPO
            error = interruptions.error if isinstance(stopped, Discarded) else stopped
            name = "SIGTERM" if isinstance(error, Terminated) else "SIGINT"
            again = f"maporl train {shlex.quote(str(loop.folder / CONFIG))} --resume"
            told = f"{name}: stopped; the parts of the loop that are complete are kept; to go on: {again}"
            tell(told)
            raise error from None


def _tell(line: str, quiet: bool) -> None:
    if line.startswith("warning:") or not quiet:
        tell(printable(line))


def _write(folder: Path, dialogues: Sequence[Dialogue]) -> None:
    """Write what a round is trained on."""
    (folder / "dialogues.jsonl").write_text("".join(to_json(d) + "\n" for d in dialogues), encoding="utf-8")


class Loop:
    """The parts of a loop. Each makes its folder, unless it is there and complete.

    Args:
        run: the run.
        stages: its stages with their builders.
        quiet: whether to hide progress.
        tell: is given a line for every part of a round.
    """

    def __init__(self, run: ResolvedRun, stages: Sequence[Stage], quiet: bool, tell: Tell):
        self.resolved, self.config = run, run.config
        self.stages, self.quiet, self.tell = stages, quiet, tell
        self.folder = Path(self.config.output_dir)

    def run(self) -> list[dict[str, Any]]:
        """Run all rounds, and leave the last weights in ``final/``. Return the figures of the rounds."""
        weights = self._part("initial", self._write_initial)
        self._evaluate(weights, self.folder / BEFORE)
        figures: list[dict[str, Any]] = []
        accepted = self.folder / BEFORE
        for number in range(1, self.config.loop.rounds + 1):
            start = weights
            sample = self._part(f"round-{number}/sample", partial(self._sample, number=number, weights=start))
            for position, stage in enumerate(self.stages):
                weights = self._part(
                    f"round-{number}/train-{position + 1}",
                    StageRun(self.resolved, stage, number, position, sample, weights, start, self.quiet, self.tell),
                )
            self._warn_untrained(number)
            ended = self._part(f"round-{number}/evaluate", partial(self._evaluate_into, weights=weights))
            figures.append(self._figures(number, ended))
            if self._accepted(accepted, ended / EVALUATION):
                accepted = ended / EVALUATION
            else:
                weights, figures[-1]["accepted"] = start, 0
                self.tell(f"warning: round {number}: the held-out score fell, so its weights are not kept")
            self._record(number, sample, figures[-1])
        self._end(weights, accepted)
        replace_file(self.folder / "rounds.json", json.dumps(figures, indent=1))
        return figures

    def _record(self, number: int, sample: Path, figures: dict[str, Any]) -> None:
        """Add what a round measured to the files in which every run has its metrics and dialogues."""
        run, dialogues = RunFolder(self.folder), dialogues_of(sample)
        logged = dialogues[: self.config.dialogues_logged]
        there = [run.read_metrics() if run.metrics.exists() else [], run.read_dialogues()]
        if [sum(record["step"] == number for record in records) for records in there] == [1, len(logged)]:
            return
        run.rewind(number - 1)  # a kill, or a hand, may have left the one without the other
        run.add_dialogues(number, [without_tokens(d) for d in logged])
        stages = [{name: value for name, value in stage.items() if name != "utterances"} for stage in figures["stages"]]
        held_out = Evaluation.from_json(figures["evaluation"]) if figures["evaluation"] else None
        asked = number * len({d.prompt for d in dialogues})
        run.add_metrics(
            number, {"episode": asked, "accepted": figures["accepted"], **round_metrics(dialogues, stages, held_out)}
        )

    def _part(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return the folder ``name`` of the loop, and ``make`` it first if it is missing."""
        target = self.folder / name
        if target.is_dir():
            verify(target, required=())
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(target) as hidden:
            make(hidden)
            write_manifest(hidden)
        self.tell(f"{target}: done")
        return target

    def _player(self, weights: Path) -> Player:
        untrained = None
        if asks_untrained(self.config.restate, self.config.reward.asked):
            rows = self.config.ppo.batch_rows
            first = team_with(self.config, self.folder / INITIAL)
            first.find_stop_ids(self.config.ppo)
            untrained = UntrainedWeights.before_training(first, rows)
        team = team_with(self.config, weights)
        team.find_stop_ids(self.config.ppo)
        ready_to_play(team, find_device(self.config))
        return player_of(self.resolved, team, untrained)

    def _write_initial(self, folder: Path) -> None:
        save_team(loaded_player(self.resolved).team, folder)

    def _sample(self, folder: Path, number: int, weights: Path) -> None:
        """Play the round's questions, score what was said, and write the dialogues with their token ids.

        The first round may have recorded dialogues in place of them.
        """
        if number == 1 and self.config.loop.dialogues is not None:
            self._take_record(folder, Path(self.config.loop.dialogues), weights)
            return
        config, task, player = self.config, self.resolved.task, self._player(weights)
        rng = random.Random(f"{config.seed}/loop/{number}")
        chosen = rng.sample(range(len(task)), min(config.loop.questions, len(task)))
        learning = frozenset(policy.name for policy in player.team.policies.values() if policy.trainable)
        set_seed(rng.getrandbits(32))
        player.inform_engines()
        player.world.renew()
        worth = partial(player.scorer.worth, task=task)
        played: list[Dialogue] = []
        sources = player.scorer.sources
        recall_verifiers(self.folder, number, sources)
        for first in range(0, len(chosen), CHUNK):
            examples = [task[i] for i in chosen[first : first + CHUNK]]
            driver = player.driver(
                task,
                config.ppo.decoding,
                specs=player.specs({}, {}, learning, training=True),
                batch=number,
                rng_key=(config.seed, "loop", number),
                numbers=range(first, first + len(examples)),
            )
            dialogues = play_branched(driver, examples, config.branching, worth)
            player.world.check_lost(dialogues)
            complete = [dialogue for dialogue in dialogues if not dialogue.lost]
            try:
                player.scorer.credit(complete, task)
            finally:
                player.world.drop_scored(dialogues)
            played += complete
        player.world.close()
        record_verifiers(self.folder, number, sources)
        _write(folder, played)

    def _take_record(self, folder: Path, file: Path, weights: Path) -> None:
        """Write the dialogues of a record as a round that the team has played. Its credits are those of this run."""
        player = self._player(weights)
        dialogues = [d for d in round_of_record(file, player.team, player.specs()) if not d.lost]
        player.scorer.credit(dialogues, self.resolved.task)
        player.world.close()
        _write(folder, dialogues)

    def _warn_untrained(self, number: int) -> None:
        """Warn of every policy that no stage of the round has trained."""
        manifests = [self._manifest(number, position) for position in range(len(self.stages))]
        for policy in [name for name in manifests[0] if name not in ("utterances", "reward_model")]:
            if not any(manifest[policy].get("rows") or manifest[policy].get("dialogues") for manifest in manifests):
                self.tell(
                    f"warning: round {number}: no stage trains policy {policy!r}; freeze its agents, or see the roles"
                )

    def _manifest(self, number: int, position: int) -> dict[str, Any]:
        file = self.folder / f"round-{number}/train-{position + 1}/manifest.json"
        return json.loads(file.read_text())

    def _evaluate(self, weights: Path, file: Path) -> None:
        """Evaluate the team on held-out questions, unless that is turned off or done."""
        section, held_out = self.config.evaluation, self.resolved.held_out
        if held_out is None or file.exists():
            return
        player = self._player(weights)
        record_evaluation(player.play_evaluation(held_out, section.questions, section.decoding, self.config.seed), file)
        player.world.close()

    def _evaluate_into(self, folder: Path, weights: Path) -> None:
        self._evaluate(weights, folder / EVALUATION)

    def _figures(self, number: int, ended: Path) -> dict[str, Any]:
        stages = [self._manifest(number, position) for position in range(len(self.stages))]
        file = ended / EVALUATION
        return {
            "round": number,
            "accepted": 1,
            "stages": stages,
            "evaluation": json.loads(file.read_text()) if file.exists() else None,
        }

    def _accepted(self, before: Path, after: Path) -> bool:
        """Whether the next round goes on from the weights that were evaluated last."""
        if self.config.loop.accept == "always":
            return True
        was, now = (Evaluation.from_json(json.loads(file.read_text())) for file in (before, after))
        return held_out_score(now) >= held_out_score(was)

    def _end(self, weights: Path, ended: Path) -> None:
        """Copy the evaluation of the last weights and these weights to where every run has them."""
        for suffix in (".jsonl", ".json"):
            if (source := ended.with_suffix(suffix)).exists():
                target = (self.folder / AFTER).with_suffix(suffix)
                replace_file(target, source.read_text(encoding="utf-8"))
        if not has_final(self.folder):
            if lexists(self.folder / FINAL):
                aside = set_aside(self.folder / FINAL, ABANDONED)
                self.tell(f"warning: {self.folder / FINAL}: held no weights; it is now {aside}")
            with new_folder(self.folder / FINAL) as hidden:
                for policy in sorted(path for path in weights.iterdir() if path.is_dir()):
                    shutil.copytree(policy, hidden / policy.name)
                write_manifest(hidden)


def round_metrics(
    dialogues: Sequence[Dialogue], stages: Sequence[Mapping[str, Any]], held_out: Evaluation | None
) -> dict[str, float]:
    """Return the numbers of a round as a flat dict.

    Args:
        dialogues: what was sampled, graded and scored.
        stages: what the manifest of each stage says of each policy.
        held_out: the evaluation after the round.
    """
    metrics = evaluate_everywhere(list(dialogues)).metrics() | lengths(dialogues)
    for number, stage in enumerate(stages, 1):
        for policy, about in stage.items():
            numbers = {key: value for key, value in about.items() if isinstance(value, int | float)}
            metrics |= {f"{policy}/stage_{number}/{key}": float(value) for key, value in numbers.items()}
    counts = dialogue_counts(dialogues)
    for policy in dict.fromkeys(policy for stage in stages for policy in stage if policy != "reward_model"):
        learned = [about.get("rows") or about.get("dialogues") or 0 for s in stages if (about := s.get(policy))]
        counts |= {f"learner/{policy}/rounds": 1, f"learner/{policy}/rows": sum(learned)}
    metrics |= {COUNT + name: float(number) for name, number in counts.items()}
    if held_out is not None:
        metrics |= {f"eval_{name}": value for name, value in held_out.metrics().items()}
    return metrics


def held_out_score(held_out: Evaluation) -> float:
    """Return the accuracy of the last answers, or without labels the mean score; 0 if that is not measured."""
    return held_out.final().value if held_out.final().total else held_out.rewards.get(SCORE, 0.0)


def lengths(dialogues: Sequence[Dialogue]) -> dict[str, float]:
    """Return the mean number of sampled tokens of each policy's answers, and the share that was cut off.

    An answer that dialogues share counts once.
    """
    said: dict[str, dict[Any, tuple[int, bool]]] = {}
    for dialogue in dialogues:
        for u in dialogue.utterances:
            if u.response_ids:
                key = (dialogue.prompt, u.sample) if u.sample is not None else (dialogue.prompt, dialogue.rollout, u.id)
                said.setdefault(u.policy, {})[key] = len(u.response_ids), not u.stop.whole
    metrics = {}
    for policy, answers in said.items():
        for name, column in (("mean_length", 0), ("clipped_ratio", 1)):
            numbers = [answer[column] for answer in answers.values()]
            metrics[f"{policy}/completions/{name}"] = sum(numbers) / len(numbers)
    return metrics
