"""Plays one batch of several recipes, and writes what each utterance is trained on; started by
tests/system/test_recipe_processes.py.

    torchrun --nproc_per_node 2 tests/support/recipes_worker.py OUT QUESTIONS RECIPE [RECIPE ...]

``QUESTIONS`` is the number of questions of a batch over all processes. Agents say what a script says, which depends on
the place of an answer in the run. Each process writes the rows of its own questions to ``OUT/RECIPE.RANK.json``.
"""

import json
import os
import sys
from pathlib import Path

from perturbed_training import SEED, longest_answer, script_of
from scripted_training import TokenScript, played, recipe_values, rows

from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict
from trl_ext.process import distributed


def batch_rows(name: str, folder: Path, questions: int) -> list[list]:
    """Return the rows of this process: where an utterance stands, its text, its credit, its advantage and its
    weight."""
    size = int(os.environ.get("WORLD_SIZE", "1"))  # before the first trainer joins the processes
    values = recipe_values(name, folder / name) | {"seed": SEED, "updates": 1, "evaluation": {"questions": 0}}
    values["training"] |= {"save_steps": 0, "per_device_train_batch_size": questions // size}
    trainer = build_trainer(from_dict(values, name), quiet=True)
    policies = trainer.team.policies
    engine = TokenScript(policies, script_of(policies), longest_answer(values))
    trainer.engines.update(dict.fromkeys(trainer.engines, engine))
    batch = played(trainer)
    places = {id(u): (d.prompt, d.rollout) for d in batch.dialogues for u in d.utterances}
    return [
        [*places[id(u)], u.id, row.policy, u.agent, u.text, u.rewards.get("credit"), row.advantage, row.weight]
        for row in rows(batch)
        if (u := row.utterance)
    ]


def main() -> None:
    out, questions, *names = sys.argv[1:]
    for name in names:
        found = batch_rows(name, Path(out), int(questions))
        (Path(out) / f"{name}.{distributed.rank()}.json").write_text(json.dumps(found))
    distributed.shutdown()


if __name__ == "__main__":
    main()
