"""What an update of a team works on."""

from dataclasses import dataclass, field

from maporl.schedules import Plan
from maporl.tasks.base import Task
from maporl.training.samples import TrainingSample
from maporl.types import Dialogue
from trl_ext.update_batch import UpdateBatch


@dataclass(kw_only=True)
class TeamUpdateBatch(UpdateBatch):
    """An :class:`trl_ext.update_batch.UpdateBatch` of dialogues.

    Args:
        task: where the questions come from and who grades them; with a curriculum it changes from batch to batch.
        plan: who learns in this update, and whose weights speak for whom.
        dialogues: what this process played.
        samples: by policy, what it learns from, in the order of the rows of its token batch before any was left out
            (``TokenBatch.sample`` has each row's place here).
    """

    task: Task
    plan: Plan
    dialogues: list[Dialogue] = field(default_factory=list)
    samples: dict[str, list[TrainingSample]] = field(default_factory=dict)
