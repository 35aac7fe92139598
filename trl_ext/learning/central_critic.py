"""A central critic: one critic for several policies, with a model and an optimizer of its own.

Actors that learn on their own each need a critic of their own. Where they share a reward, one critic can read what all
of them said and learn from the turns of all of them (MAAC, Iqbal & Sha 2019; CoMLRL). A critic on a policy's trunk
cannot do this, because its weights move with that policy.
"""

import copy
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor, nn

from trl_ext.learning.config import PPOv2Config
from trl_ext.learning.critics import ValueHead, freeze_attention, load_head, save_head
from trl_ext.learning.policy import load_weights
from trl_ext.learning.trained import Trained
from trl_ext.models.forward import head_width, share_reading, states_of
from trl_ext.models.randomness import quiet
from trl_ext.ppo.batch import TokenBatch
from trl_ext.ppo.options import rate_of
from trl_ext.process.distributed import WorldError
from trl_ext.sharding.choice import strategy_of
from trl_ext.sharding.spreading import place


def _whole_copy(model: Any) -> Any:
    """Return a copy of a model without PEFT, in whose weights the active adapter is, if PEFT can merge it."""
    if not isinstance(model, PeftModel):
        return copy.deepcopy(model)
    copied: Any = copy.deepcopy(model)
    try:
        return copied.merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError):  # the critic begins at the base
        return copy.deepcopy(model).unload()


class CentralCritic:
    """One critic for several learners. It starts as a copy of ``model`` with a head that is zero.

    Its weights are in float32, so that small steps add up whatever the precision of the policies.

    Args:
        model: the model whose weights it starts with. All of the copy's weights are trained,
            but its attention with ``critic_freeze``.
        args: the options. ``value_learning_rate``, or else ``learning_rate``, is its learning rate.
        outputs: the number of outputs, such as one for each turn.
    """

    def __init__(self, model: nn.Module, args: PPOv2Config, outputs: int = 1):
        self.model: Any = _whole_copy(model).float().requires_grad_(True)
        quiet(self.model)
        self.head = ValueHead(head_width(self.model), outputs, args)
        self.args = args
        if args.critic_freeze == "attention":
            freeze_attention(self.model, "the central critic")

    def prepare(self, accelerator: Any, updates: int) -> None:
        """Move the critic to the accelerator's device, and build its optimizer and schedule over ``updates`` updates.

        Raises:
            WorldError: the launcher shards weights. A forward of one policy would then have to gather the critic.
        """
        if strategy_of(accelerator).sharded:
            raise WorldError("critic: central cannot be sharded; start without DeepSpeed and FSDP, or use critic: head")
        args = self.args
        share_reading(self.model)
        place(self.model, accelerator.device)
        self.head.to(accelerator.device)
        rate = rate_of(args.value_learning_rate, args.learning_rate, adapter=False)
        learning = [p for p in (*self.model.parameters(), *self.head.parameters()) if p.requires_grad]
        group = {"params": learning, "lr": rate}
        self.trained = Trained(
            "the central critic", {"critic": self.model}, self.head, lambda: [group], args, accelerator, updates
        )

    def values(self, rows: TokenBatch) -> Tensor:
        """Return the values [M] of the states before the M sampled tokens of ``rows``, in row-major order."""
        return self.head(states_of(self.model, rows), rows.head[rows.sampled[0]])

    def step(self) -> float:
        """Sum the gradients of all learners and processes, clip them, step the optimizer and clear the gradients.

        Returns:
            The gradient norm before clipping.

        Raises:
            NonFiniteError: the gradient norm is NaN or infinite. The weights are unchanged.
        """
        return self.trained.step()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write the weights, the optimizer and the schedule into ``folder``."""
        self.model.save_pretrained(folder / "model")
        save_head(self.head, folder)
        self.trained.save(folder)

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote into ``folder``.

        Raises:
            CheckpointError: the weights cannot be read, or they are not those of this critic.
        """
        load_weights(self.model, None, folder / "model")
        load_head(self.head, folder)
        self.trained.load(folder)
