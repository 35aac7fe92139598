"""Run a configuration: build, warm-start, evaluate, train, evaluate and save. ``maporl train`` calls this."""

import json
import shutil
import sys
from pathlib import Path

from maporl.config import Config, parse_config, read_yaml, to_yaml
from maporl.evaluation.metrics import Evaluation
from maporl.rollout.player import evaluate_everywhere
from maporl.runs.build import build_player, build_trainer
from maporl.storage.run_folder import RunExists
from maporl.tasks import build_task
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.types import Dialogue, to_json, without_tokens
from trl_ext import distributed
from trl_ext.atomic import new_folder, replace_file
from trl_ext.checkpoint import CheckpointError, list_checkpoints


def train(config: Config, resume: bool, quiet: bool = False) -> tuple[Evaluation | None, Evaluation | None]:
    """Run ``config`` to its end, and return the evaluations before and after training.

    An evaluation is None if evaluation is turned off.

    Args:
        config: the configuration.
        resume: whether to resume from the newest checkpoint. A run without a checkpoint starts again.
        quiet: whether to hide progress bars.

    Raises:
        RunExists: the output folder is not empty, and ``resume`` is false.
        CheckpointError: the output folder holds no run to resume, or a run of another configuration.
        ConfigError: the configuration cannot run.
    """
    folder = Path(config.output_dir)
    if distributed.is_main():
        _claim(folder, config, resume)
    if resume and (folder / "final").is_dir():
        if distributed.is_main():
            print(f"{folder}: its run has ended; nothing is left to train", file=sys.stderr, flush=True)
        return _ended(config, folder)
    try:
        trainer = build_trainer(config, quiet=quiet or not distributed.is_main())
        before = _evaluation(trainer, folder / "evaluation_before.json")
        from_checkpoint = distributed.broadcast_from_main(resume and bool(list_checkpoints(folder)))
        if resume and not from_checkpoint:
            if distributed.is_main():
                print(f"{folder}: has no whole checkpoint; the run starts again", file=sys.stderr, flush=True)
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
    """Return the evaluations of a run that has its final weights. If the last one is missing, it is made now."""
    files = [folder / f"evaluation_{when}.json" for when in ("before", "after")]
    if config.evaluation.questions and not files[1].exists():
        player = build_player(config, folder / "final")
        held_out = build_task(config.task, "eval", config.seed)
        settings = config.evaluation
        _record(player.play_evaluation(held_out, settings.questions, settings.decoding, config.seed), files[1])
    before, after = (Evaluation.from_json(json.loads(file.read_text())) if file.exists() else None for file in files)
    return before, after


def _claim(folder: Path, config: Config, resume: bool) -> None:
    """Take the output folder for this run. With ``resume``, check that it holds this run."""
    file, text = folder / "config.yaml", to_yaml(config)
    if resume:
        if not file.is_file():
            raise CheckpointError(f"{folder}: no config.yaml, so it holds no run to resume; start without --resume")
        begun = parse_config(read_yaml(file), str(file))  # an earlier version may have written fewer keys
        if begun != config:
            changed = _changed_lines(to_yaml(begun), text)
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
    with file.open("x") as new:  # fails if another run takes the folder at the same moment
        new.write(text)


def _release(folder: Path) -> None:
    """Empty the folder of a run that failed before it trained anything, so that a corrected run can use the folder."""
    untrained = {"config.yaml", "evaluation_before.json", "evaluation_before.jsonl", ".partial-initial"}
    if {path.name for path in folder.iterdir()} <= untrained:
        shutil.rmtree(folder / ".partial-initial", ignore_errors=True)
        for path in folder.iterdir():
            path.unlink()


def _changed_lines(old: str, new: str) -> str:
    pairs = [(a.strip(), b.strip()) for a, b in zip(old.split("\n"), new.split("\n"), strict=False) if a != b]
    return f"was {pairs[0][0]!r}, is {pairs[0][1]!r}" if pairs else "it has other keys"


def _evaluation(trainer: MultiAgentPPOTrainer, file: Path) -> Evaluation | None:
    """Evaluate the team and record the result in ``file``. A resumed run reads its earlier result."""
    if trainer.eval_task is None:
        return None
    known = distributed.broadcast_from_main(file.read_text() if distributed.is_main() and file.exists() else None)
    if known is not None:
        return Evaluation.from_json(json.loads(known))
    return _record(trainer.play_evaluation(), file)


def _record(dialogues: list[Dialogue], file: Path) -> Evaluation:
    """Evaluate the dialogues of all processes, and write them and their :class:`Evaluation` to two files."""
    evaluation = evaluate_everywhere(dialogues)
    bare = distributed.to_main([without_tokens(d) for d in dialogues])
    if distributed.is_main():
        replace_file(file.with_suffix(".jsonl"), "".join(to_json(d) + "\n" for d in bare))
        replace_file(file, json.dumps(evaluation.to_json(), indent=1))
    return evaluation
