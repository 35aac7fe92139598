"""``trainer.model`` of :class:`trl_ext.PPOv2Trainer`: the policy and its separate critic, under TRL's names."""

from typing import Any

from torch import nn

from trl_ext.learning.learner import Learner


class PolicyAndValue(nn.Module):
    """The policy and the value model of a learner.

    Scripts for TRL's trainer save and read ``trainer.model.policy`` and ``trainer.model.value_model``. Everything else
    that they ask of ``trainer.model``, such as ``config`` or ``generate``, is the policy's.

    ``value_model`` exists if the critic is a model of its own (``value_model=``, or ``critic="model"``).
    """

    def __init__(self, learner: Learner):
        super().__init__()
        self.policy = learner.model
        self.critic = learner.critic.kind
        if learner.critic.model is not None:
            self.value_model = learner.critic.model

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of this module, or else of the policy.

        Raises:
            AttributeError: neither has it. For ``value_model`` the message says where the critic is.
        """
        modules = self.__dict__["_modules"]
        if name in modules:
            return modules[name]
        if name == "value_model":
            raise AttributeError(
                f"trainer.model.value_model: the critic {self.critic!r} is not a separate model; "
                "trainer.learners['policy'].value_head is its head. Pass value_model= to the trainer, or "
                "critic='model' in its arguments, for a separate one"
            )
        return getattr(modules["policy"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the policy, and return its output."""
        return self.policy(*args, **kwargs)
