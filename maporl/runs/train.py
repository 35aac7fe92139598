"""Run a configuration: build, warm-start, evaluate, train, evaluate and save. ``maporl train`` calls this."""

import json
import sys
from pathlib import Path

from maporl.config import Config
from maporl.errors import RunError
from maporl.evaluation.metrics import Evaluation
from maporl.rollout.player import evaluate_everywhere
from maporl.runs.build import build_player, build_trainer
from maporl.runs.claim import claim, must_be_free, must_hold_run, release
from maporl.tasks import build_task
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.types import Dialogue, to_json, without_tokens
from trl_ext import distributed
from trl_ext.atomic import new_folder, replace_file
from trl_ext.checkpoint_folder import numbered_checkpoints
from trl_ext.run_lock import RunLock


def train(config: Config, resume: bool, quiet: bool = False) -> tuple[Evaluation | None, Evaluation | None]:
    """Run ``config`` to its end, and return the evaluations before and after training.

    An evaluation is None if evaluation is turned off.

    Args:
        config: the configuration.
        resume: whether to resume from the newest checkpoint. A run without a checkpoint starts again.
        quiet: whether to hide progress bars.

    Raises:
        RunExists: the output folder is not empty, and ``resume`` is false.
        CheckpointError: the output folder holds no run to resume, or a run of another configuration or of other data.
        FolderInUse: another process trains in the output folder.
        ConfigError: the configuration cannot run.
    """
    folder = Path(config.output_dir)
    if not distributed.is_main():
        return _train(config, folder, resume, quiet=True)
    (must_hold_run if resume else must_be_free)(folder)  # before the lock, whose file is new
    with RunLock(folder):
        claim(folder, config, resume)
        return _train(config, folder, resume, quiet)


def _train(config: Config, folder: Path, resume: bool, quiet: bool) -> tuple[Evaluation | None, Evaluation | None]:
    if resume and (folder / "final").is_dir():
        if distributed.is_main():
            print(f"{folder}: its run has ended; nothing is left to train", file=sys.stderr, flush=True)
        return _ended(config, folder)
    try:
        trainer = build_trainer(config, quiet=quiet)
        before = _evaluation(trainer, folder / "evaluation_before.json")
        from_checkpoint = distributed.broadcast_from_main(resume and bool(numbered_checkpoints(folder)))
        if resume and not from_checkpoint:
            if distributed.is_main():
                print(f"{folder}: has no checkpoint; the run starts again", file=sys.stderr, flush=True)
                trainer.run.set_results_aside()
            trainer.run.rewind(0)
        trainer.train(resume_from_checkpoint=from_checkpoint)
    except Exception:
        if not resume and distributed.is_main():
            release(folder)
        raise
    with new_folder(folder / "final", distributed.is_main()) as partial:
        trainer.save_model(str(partial))
    return before, _evaluation(trainer, folder / "evaluation_after.json")


def _ended(config: Config, folder: Path) -> tuple[Evaluation | None, Evaluation | None]:
    """Return the evaluations of a run that has its final weights. If the last one is missing, it is made now."""
    files = [folder / f"evaluation_{when}.json" for when in ("before", "after")]
    if config.evaluation.questions and not files[1].exists():
        player = build_player(config, folder / "final")
        held_out = build_task(config.task, "eval", config.seed)
        settings = config.evaluation
        _record(player.play_evaluation(held_out, settings.questions, settings.decoding, config.seed), files[1])
    before, after = (_read_evaluation(file.read_text(), file) if file.exists() else None for file in files)
    return before, after


def _evaluation(trainer: MultiAgentPPOTrainer, file: Path) -> Evaluation | None:
    """Evaluate the team and record the result in ``file``. A resumed run reads its earlier result."""
    if trainer.eval_task is None:
        return None
    known = distributed.broadcast_from_main(file.read_text() if distributed.is_main() and file.exists() else None)
    if known is not None:
        return _read_evaluation(known, file)
    return _record(trainer.play_evaluation(), file)


def _read_evaluation(text: str, file: Path) -> Evaluation:
    try:
        return Evaluation.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{file}: is damaged ({error!r}); remove it, and the evaluation is made again") from None


def _record(dialogues: list[Dialogue], file: Path) -> Evaluation:
    """Evaluate the dialogues of all processes, and write them and their :class:`Evaluation` to two files."""
    evaluation = evaluate_everywhere(dialogues)
    bare = distributed.to_main([without_tokens(d) for d in dialogues])
    if distributed.is_main():
        replace_file(file.with_suffix(".jsonl"), "".join(to_json(d) + "\n" for d in bare))
        replace_file(file, json.dumps(evaluation.to_json(), indent=1))
    return evaluation
