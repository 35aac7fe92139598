"""What exists only so that scripts for the ``PPOTrainer`` of TRL 1.12 run with their import changed."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from trl_ext.ppo.batch import Completion
from trl_ext.ppo.options import GREEDY, option
from trl_ext.process import distributed


@dataclass
class TRLScriptOptions:
    """The options that scripts set or read, and the trainer does not."""

    dataset_num_proc: int | None = option(
        None, "Unused here: each batch is tokenised when it is sampled; kept for scripts written for TRL."
    )
    sft_model_path: str = option("EleutherAI/pythia-160m", "Unused here; kept for scripts written for TRL.")
    reward_model_path: str = option("EleutherAI/pythia-160m", "Unused here; kept for scripts written for TRL.")
    ds3_gather_for_generation: bool = option(
        True, "Unused here: weights are always gathered for generation; kept for scripts written for TRL."
    )


class TRLScriptMethods:
    """The methods of :class:`trl_ext.PPOv2Trainer` that scripts call, and the trainer does not."""

    def generate_completions(self: Any, sampling: bool = False) -> list[str]:
        """Return the texts of completions of the evaluation set, and print the first five.

        They are greedy unless ``sampling``. Scripts call this method at their end, also without an evaluation set. It
        then returns no texts.

        Raises:
            RewardError: a reward source failed, or left a completion without a score.
        """
        if self.eval_dataset is None:
            return []
        rows = [self.eval_dataset[i] for i in range(len(self.eval_dataset))]
        with self.sampling_weights():
            completions = self._sample(rows, self.args.decoding if sampling else GREEDY)
            self._score(completions)
        if distributed.is_main():
            _show(completions[:5])
        return [c.text for c in completions]


class PolicyAndValue(nn.Module):
    """``trainer.model`` of :class:`trl_ext.PPOv2Trainer`: the policy and the value model of its learner.

    Scripts save and read ``trainer.model.policy`` and ``trainer.model.value_model``. Everything else
    that they ask of ``trainer.model``, such as ``config`` or ``generate``, is the policy's.

    ``value_model`` exists if the critic is a model of its own (``value_model=``, or ``critic="model"``).
    """

    def __init__(self, policy: nn.Module, critic: str, value_model: nn.Module | None):
        super().__init__()
        self.policy, self.critic = policy, critic
        if value_model is not None:
            self.value_model = value_model

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


def _show(completions: list[Completion]) -> None:
    """Print what was asked and answered. ``repr`` shows control characters, which a terminal would obey."""
    for done in completions:
        print(
            f"query           {done.prompt.prompt!r}\nmodel response  {done.text!r}\nscore           {done.score:.4g}\n"
        )
