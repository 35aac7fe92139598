"""The data of one update of a team."""

from dataclasses import dataclass, field

from maporl.schedules import Plan
from maporl.tasks.base import Task
from maporl.training.samples import TrainingSample
from maporl.types import Dialogue
from trl_ext.trainer.update_batch import UpdateBatch


@dataclass(kw_only=True)
class TeamUpdateBatch(UpdateBatch):
    """An :class:`trl_ext.trainer.update_batch.UpdateBatch` of dialogues.

    Args:
        task: the task that has the questions and grades the answers. With a curriculum it differs between batches.
        plan: which agents are trained in this update, and whose weights speak for which agent.
        dialogues: the dialogues that this process played.
        samples: the samples that each policy is trained on. ``TokenBatch.sample`` has the index of each row's sample.
    """

    task: Task
    plan: Plan
    dialogues: list[Dialogue] = field(default_factory=list)
    samples: dict[str, list[TrainingSample]] = field(default_factory=dict)
