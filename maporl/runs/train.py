"""One run from a configuration: build, warm-start, evaluate, train, evaluate, save. What ``maporl train`` calls."""

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
        player = build_player(config, folder / "final")
        held_out = build_task(config.task, "eval", config.seed)
        settings = config.evaluation
        _record(player.play_evaluation(held_out, settings.questions, settings.temperature, config.seed), files[1])
    before, after = (Evaluation.from_json(json.loads(file.read_text())) if file.exists() else None for file in files)
    return before, after


def _claim(folder: Path, config: Config, resume: bool) -> None:
    """Take the output folder for this run, or make sure that it is this run's."""
    file, text = folder / "config.yaml", to_yaml(config)
    if resume:
        if not file.is_file():
            raise CheckpointError(f"{folder}: no config.yaml, so there is no run to resume; start without --resume")
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
    return _record(trainer.play_evaluation(), file)


def _record(dialogues: list[Dialogue], file: Path) -> Evaluation:
    """Measure this evaluation's dialogues, of all processes, and write them and their :class:`Evaluation` beside each other."""
    evaluation = evaluate_everywhere(dialogues)
    bare = distributed.to_main([without_tokens(d) for d in dialogues])
    if distributed.is_main():
        replace_file(file.with_suffix(".jsonl"), "".join(to_json(d) + "\n" for d in bare))
        replace_file(file, json.dumps(evaluation.to_json(), indent=1))
    return evaluation
