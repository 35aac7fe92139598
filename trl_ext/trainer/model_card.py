"""The model card of a policy that :class:`trl_ext.PPOv2Trainer` trained."""

from collections.abc import Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

_BODY = """
# {name}

{what}, trained by proximal policy optimisation (PPO) with `trl_ext.PPOv2Trainer`{data}.

- updates: {updates}, completions: {episodes}
- critic: {critic}, KL coefficient {kl_coef}, clip range {cliprange}, learning rate {learning_rate}

`critic/`, where present, is the critic. It is needed only to go on training.

## Citation

PPO: Schulman et al., *Proximal Policy Optimization Algorithms*, 2017, arXiv:1707.06347.
"""

TAGS = ("trl", "ppo", "reinforcement-learning")


def model_card(
    name: str, base: str | None, dataset: str | None, tags: Sequence[str], facts: dict[str, Any]
) -> ModelCard:
    """Return the card of a policy.

    Args:
        name: the policy's name.
        base: the model that training started from, by its name on the hub.
        dataset: the data set's name on the hub.
        tags: further tags.
        facts: the values of the card's list: updates, episodes, critic, kl_coef, cliprange, learning_rate.
    """
    data = ModelCardData(
        library_name="transformers",
        base_model=base,
        datasets=None if dataset is None else [dataset],
        tags=sorted({*TAGS, *tags}),
    )
    what = "A language model" if base is None else f"[{base}](https://huggingface.co/{base})"
    trained_on = "" if dataset is None else f" on the data set [{dataset}](https://huggingface.co/datasets/{dataset})"
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{_BODY.format(name=name, what=what, data=trained_on, **facts)}")
