"""What a run leaves besides the records of its updates: its configuration, its evaluations, its weights and its report,
and what a training gave each token of the dialogues that are logged.

``MultiAgentPPOTrainer.train()`` writes all of it, whether a configuration or a Python program has built the trainer.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from os.path import abspath, lexists
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from maporl.config import Config, parse_config
from maporl.config.imports import FINGERPRINTS, is_import, module_files
from maporl.config.parse import MOST_FAULTS, lasting
from maporl.config.safe_yaml import dump_yaml, parse_yaml, read_yaml_file
from maporl.credentials import without_secrets
from maporl.errors import ConfigError, RunError
from maporl.evaluation.metrics import Evaluation
from maporl.report.files import unlike
from maporl.rewards.credit import origins
from maporl.rewards.identity import record_verifiers
from maporl.rewards.scoring import Scorer
from maporl.rollout.player import evaluate_everywhere
from maporl.storage.run_folder import (
    EVALUATED,
    FINAL,
    INITIAL,
    LEARNS_FROM,
    TOKENIZERS,
    RunExists,
    RunFolder,
    has_final,
)
from maporl.team.saving import SavedTeam
from maporl.team.team import Team
from maporl.team.weights import begin_from
from maporl.text import printable
from maporl.training.args import MultiAgentPPOConfig, changes, decisions_changed
from maporl.training.description import describe
from maporl.training.parts import RunParts
from maporl.training.samples import TeamUpdateBatch
from maporl.types import Dialogue, Trace, to_json, without_tokens
from trl_ext.chat.encoding import token_pieces
from trl_ext.files.atomic import new_folder, replace_file
from trl_ext.files.fingerprint import DATA, Fingerprint, check_data, fingerprint, remember_data
from trl_ext.files.lock import LOCK, is_leftover
from trl_ext.files.manifest import CheckpointError
from trl_ext.files.set_aside import ABANDONED, set_aside
from trl_ext.learning.audit import AUDIT
from trl_ext.process import distributed
from trl_ext.process.messages import tell

CONFIG, LOGS = "config.yaml", "logs"
BEFORE, AFTER = "evaluation_before.json", "evaluation_after.json"
PARTS = ("task", "protocol", "reward", "advantage", "branching", "schedule")
"""The sections of a configuration that decide what is learned, besides the options that checkpoints compare."""
UNTRAINED = {BEFORE, "evaluation_before.jsonl"}
"""What a run writes before it trains anything, besides its configuration, its data's fingerprints and ``initial/``."""
_BEFORE_TRAINING = {CONFIG, AUDIT, LEARNS_FROM, DATA, FINGERPRINTS, LOGS, *UNTRAINED}
logger = logging.getLogger(__name__)


class RunRecord:
    """Writes what a run leaves. Only the main process writes, and all processes call the methods together.

    Args:
        folder: the run's folder.
        config: the configuration that the run was built from. None means that a Python program made it.
    """

    def __init__(self, folder: Path, config: Config | None):
        self.folder, self.config, self.run = folder, config, RunFolder(folder)
        self._begun = False
        self._kept: SavedTeam | None = None
        """A team whose weights go to other processes (:meth:`describe_team`)."""

    def must_be_new(self) -> None:
        """Check that the folder holds no results of another run.

        Raises:
            RunExists: it holds some.
        """
        for name in (FINAL, AFTER):
            if lexists(self.folder / name):
                raise RunExists(f"{self.folder}: holds {name} of another run, which stays; choose another output_dir")

    def describe_team(self, team: Team, args: MultiAgentPPOConfig, options: Mapping[str, Any]) -> Config:
        """Return a configuration from which other processes load the team, after :meth:`keep_team`.

        Raises:
            ConfigError: an agent cannot be described, because its turns have different kinds of models or options.
        """
        self._kept = self._saved(team, args, options)
        training = {"critic": args.critic, "placement": args.placement}
        return self._kept.config(abspath(str(args.output_dir)), seed=args.seed, training=training)

    def _saved(self, team: Team, args: MultiAgentPPOConfig, options: Mapping[str, Any]) -> SavedTeam:
        initial, tokenizers = (f"{abspath(str(args.output_dir))}/{name}" for name in (INITIAL, TOKENIZERS))
        return SavedTeam(team.agents, team.policies_of, initial, tokenizers, everything=False, options=options)

    def keep_team(self) -> None:
        """Save the described team's weights and tokenizers that have no other name.

        A run that is resumed begins with the weights that the folder has.
        """
        assert self._kept is not None, "the team has been described"
        if not self.folder.exists() or rest_of(self.folder) <= {*_BEFORE_TRAINING, INITIAL, TOKENIZERS}:
            for name in (INITIAL, TOKENIZERS):  # of a process that was killed before it trained anything
                if (self.folder / name).exists():
                    set_aside(self.folder / name, ABANDONED)
            self._begun = True
            self._kept.save(self.folder / INITIAL, self.folder / TOKENIZERS)

    def begin(self, parts: RunParts, resumes: bool, learns_from: Sequence[str]) -> None:
        """Write the configuration, what the run ``learns_from``, and the weights and tokenizers that have no other
        name.

        The weights are those before training, and whole (``whole_weights``).

        Raises:
            RunExists: the folder of a new run holds another configuration.
            CheckpointError: a resumed run has another task, protocol, reward, advantage, branching or schedule.
            DataChanged: a module of the user's that a resumed run names has changed.
        """
        if self.config is None:
            distributed.on_main(lambda: self._write(parts, resumes))
        elif distributed.is_main() and not (self.folder / CONFIG).exists():
            replace_file(self.folder / CONFIG, dump_yaml(lasting(asdict(self.config))))
        distributed.on_main(lambda: replace_file(self.folder / LEARNS_FROM, "\n".join(learns_from) + "\n"))
        self._begun = True

    def sections(self) -> dict[str, Any]:
        """Return who the agents are and what decides what they learn (:data:`PARTS`), as ``config.yaml`` has it.

        Secrets are left out.
        """
        values = read_yaml_file(self.folder / CONFIG)
        return without_secrets({name: values[name] for name in ("agents", *PARTS) if name in values})

    def _write(self, parts: RunParts, resumes: bool) -> None:
        saved = self._kept or self._saved(parts.team, parts.args, parts.engine_options)
        values = describe(parts, saved)
        config, file = _parsed(values), self.folder / CONFIG
        text = dump_yaml(lasting(values if config is None else asdict(config)))
        earlier = file.read_text(encoding="utf-8") if file.exists() else ""
        if earlier and earlier != text:
            if not resumes:
                raise RunExists(f"{file}: is another run's configuration, and stays; choose another output_dir")
            was, now = (_whole(parse_yaml(one, str(file))) for one in (earlier, text))
            self._must_be_same(was, now)
            logger.warning(
                "%s: resumes with other options; the earlier ones are in %s", self.folder, set_aside(file, ABANDONED)
            )
        if earlier and not resumes:  # a process was killed after it had written these, and before it trained anything
            weights = () if self._kept is not None else (INITIAL, TOKENIZERS)
            for name in (*weights, *sorted(UNTRAINED)):
                if (self.folder / name).exists():
                    set_aside(self.folder / name, ABANDONED)
        modules = {} if config is None else module_fingerprints(config)
        if resumes:
            check_data(self.folder, modules, FINGERPRINTS, "module")
        if earlier and earlier != text:
            evaluate_again(self.folder, was, now)
        self._begun = True
        replace_file(file, text)
        if modules:
            remember_data(self.folder, modules, FINGERPRINTS)
        if self._kept is None and not (self.folder / INITIAL).exists() and not (self.folder / TOKENIZERS).exists():
            saved.save(self.folder / INITIAL, self.folder / TOKENIZERS)

    def _must_be_same(self, was: dict[str, Any], now: dict[str, Any]) -> None:
        """Check that a resumed run has the parts that decide what is learned, as far as both descriptions have them."""
        both = [name for name in PARTS if name in was and name in now]
        old, new = ({name: values[name] for name in both} for values in (was, now))
        if "__main__." in json.dumps([old, new]):  # a class that once ran as __main__.X is MODULE:X
            old, new = _without_modules(old), _without_modules(new)
        if changed := decisions_changed(old, new):
            raise CheckpointError(
                f"{self.folder}: its run was started with another configuration ({'; '.join(changed[:MOST_FAULTS])}); "
                "resume with the same one, or begin another run in another output_dir, "
                f"{begin_from(self.folder, None)}"
            )

    def add(self, batch: TeamUpdateBatch, learners: Mapping[str, Any], most: int, scorer: Scorer) -> None:
        """Record the first ``most`` dialogues of all processes in an update, and the verifiers of ``scorer``."""
        recorded = distributed.share_of_first(batch.dialogues, most)
        trace_tokens(batch, recorded, learners)
        trace_credit(batch, recorded, scorer)
        self.run.add_dialogues(batch.number, distributed.to_main(recorded))
        if distributed.is_main():
            record_verifiers(self.folder, batch.number, scorer.sources)

    def evaluate(self, when: str, play: Callable[[], list[Dialogue]] | None) -> Evaluation | None:
        """Return the evaluation that the folder has, or else that of the dialogues of all processes, and write it.

        ``play`` plays the dialogues of this process. Without it, nothing is evaluated.

        Raises:
            RunError: the evaluation in the folder is damaged.
        """
        file = self.folder / when
        text = distributed.broadcast_from_main(file.read_text() if distributed.is_main() and file.exists() else None)
        if text is not None:
            return read_evaluation(text, file)
        return None if play is None else record_evaluation(play(), file)

    def end(self, save_model: Callable[[str], None]) -> None:
        """Save the weights in ``final/``, unless the folder has them. Something else of that name is set aside."""
        final = self.folder / FINAL
        if not distributed.broadcast_from_main(has_final(self.folder)):
            if distributed.is_main() and lexists(final):
                logger.warning("%s: holds no weights; it is now %s", final, set_aside(final, ABANDONED))
            with new_folder(final, distributed.is_main()) as partial:
                save_model(str(partial))

    def failed(self) -> None:
        """Empty the folder of a run that was made in Python and ended before it trained anything.

        Otherwise write its report.
        """
        if not self._begun or not distributed.is_main():
            return
        if self.config is None:
            release(self.folder, {INITIAL, TOKENIZERS})
        self.report(warn=False)

    def report(self, warn: bool = True) -> None:
        """Write the report. The run is saved by now, so what fails here is a warning, and no run is lost to its report.

        Without ``warn`` nothing is printed, because the run's own error follows. On a full disk the two have one cause.
        """
        if not distributed.is_main() or not (self.folder / "metrics.jsonl").exists():
            return
        from maporl.report import page  # with Jinja, which the start of a run can do without

        try:
            page.write_report([self.folder])
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if warn:
                told = f"warning: no report was written ({what}); try: maporl report {self.folder}"
                tell(printable(told))


def _parsed(values: dict) -> Config | None:
    """Return the configuration of a described run. None if it has a name or a value that no configuration may have."""
    try:
        return parse_config(values)
    except ConfigError as error:
        values["only_in_python"] = values.get("only_in_python", {}) | {"configuration": str(error)}
        return None


def _whole(values: Any) -> dict[str, Any]:
    """Return the values of a described run, with the defaults of what an earlier version did not describe."""
    config = _parsed(values) if isinstance(values, dict) else None
    return asdict(config) if config is not None else values if isinstance(values, dict) else {}


def module_fingerprints(config: Config) -> dict[str, Fingerprint]:
    """Return a fingerprint of each module of the user's that ``config`` names, by its lines."""
    return {
        name: fingerprint(file.read_text(encoding="utf-8", errors="replace").split("\n"))
        for name, file in module_files(config).items()
    }


def release(folder: Path, more: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Empty the folder of a run that ended before it trained anything, so that a corrected run can use the folder.

    ``more`` names what the run may have written besides its configuration, its data's fingerprints and an evaluation.
    """
    if not rest_of(folder) <= {*_BEFORE_TRAINING, *more}:
        return
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LOCK):  # the lock last: until then nobody begins
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def rest_of(folder: Path) -> set[str]:
    """Return the names of what is in ``folder``, without what killed processes left."""
    return {path.name for path in folder.iterdir() if not is_leftover(path)}


def evaluate_again(folder: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Set aside the evaluations in ``folder``, if the plain values of its run, which goes on, say that it is evaluated
    otherwise. The trainer then makes that before training again, with the weights before training, so that it can be
    compared with the one at the end.
    """
    changed = changes(was.get("evaluation"), now.get("evaluation"), at="evaluation")
    there = [folder / name for name in (*sorted(UNTRAINED), *EVALUATED) if (folder / name).exists()]
    if changed and there:
        aside = ", ".join(set_aside(file, ABANDONED).name for file in there)
        told = f"{folder}: {'; '.join(changed)}; the weights before training are evaluated again ({aside})"
        logger.warning("%s; evaluations of earlier updates, in metrics.jsonl, are not comparable with later ones", told)


def _without_modules(value: Any) -> Any:
    """Return ``value`` with the names of classes and functions in place of ``__main__.X`` and ``MODULE:X``."""
    if isinstance(value, dict):
        return {_without_modules(key): _without_modules(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_modules(entry) for entry in value]
    if not isinstance(value, str):
        return value
    return value.partition(":")[2] if is_import(value) else value.removeprefix("__main__.")


def read_evaluation(text: str, file: Path) -> Evaluation:
    """Return the evaluation in the ``text`` of ``file``.

    Raises:
        RunError: it is damaged.
    """
    with unlike(f"{file}: is damaged", "; remove it, and the evaluation is made again", RunError):
        return Evaluation.from_json(json.loads(text))


def record_evaluation(dialogues: list[Dialogue], file: Path) -> Evaluation:
    """Evaluate the dialogues of all processes, and write them and their :class:`Evaluation` to two files."""
    evaluation = evaluate_everywhere(dialogues)
    bare = distributed.to_main([without_tokens(d) for d in dialogues])
    if distributed.is_main():
        replace_file(file.with_suffix(".jsonl"), "".join(to_json(d) + "\n" for d in bare))
        replace_file(file, json.dumps(evaluation.to_json(), indent=1))
    return evaluation


TRACE_DIGITS = 4
"""The number of decimals that are recorded."""


def trace_tokens(batch: TeamUpdateBatch, recorded: Sequence[Dialogue], learners: Mapping[str, Any]) -> None:
    """Fill in the :class:`~maporl.types.Trace` of the trained utterances in the ``recorded`` dialogues.

    ``batch`` has token batches with advantages. Values are recorded of those of ``learners`` that have a critic.
    """
    wanted = {id(u) for d in recorded for u in d.utterances}
    for policy, rows in batch.token_batches.items():
        names = ["old_logprobs", "advantages", *(["values"] if learners[policy].critic.gives_values else [])]
        samples = [batch.samples[policy][place] for place in rows.sample.tolist()]
        wanted_rows = [row for row, sample in enumerate(samples) if id(sample.utterance) in wanted]
        row, column = rows.sampled_on_host
        chosen = torch.isin(row, torch.tensor(wanted_rows, dtype=torch.long))
        place = row[chosen], column[chosen]
        # all tokens at once, to wait for the device once
        numbers = torch.stack([getattr(rows, name)[place] for name in names]).tolist()
        rounded = [[round(number, TRACE_DIGITS) for number in each] for each in numbers]
        start = 0
        for sample in [samples[number] for number in wanted_rows]:
            end = start + len(sample.response_ids)
            logprobs, advantages, *values = [each[start:end] for each in rounded]
            start = end
            texts = token_pieces(learners[policy].tokenizer, sample.response_ids)
            compared = batch.compared.get(sample.columns.name)
            mean = round(fmean(advantages), TRACE_DIGITS)
            sample.utterance.trace = Trace(texts, logprobs, advantages, [*values, None][0], compared, advantage=mean)


def trace_credit(batch: TeamUpdateBatch, recorded: Sequence[Dialogue], scorer: Scorer) -> None:
    """Fill in, in the traces of the ``recorded`` dialogues, whose scores each credit came from."""
    for dialogue in recorded:
        siblings = [other for other in batch.dialogues if other.prompt == dialogue.prompt]
        parts = origins(dialogue, siblings, scorer.speakers, scorer.reward, batch.number)
        for number, utterance in enumerate(dialogue.utterances):
            if utterance.trace is not None:
                earned = parts.get(number, [])
                utterance.trace.earned = [(dialogue.utterances[i].id, round(part, TRACE_DIGITS)) for i, part in earned]
