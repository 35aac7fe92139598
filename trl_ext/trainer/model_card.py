"""The model card of a policy that :class:`trl_ext.PPOv2Trainer` trained."""

from collections.abc import Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

_BODY = """
# {name}

{what}, trained by proximal policy optimisation (PPO) with `trl_ext.PPOv2Trainer`{data}.

- updates: {updates}, completions: {episodes}
- critic: {learner.critic.kind}, KL coefficient {args.kl_coef}, clip range {args.cliprange}, learning rate {learner.learning_rate}

`critic/`, where present, is the critic. It is needed only to go on training.

## Citation

PPO: Schulman et al., *Proximal Policy Optimization Algorithms*, 2017, arXiv:1707.06347.
"""  # noqa: E501

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
        facts: what the card's list is about: updates, episodes, the learner, and the trainer's args.
    """
    what = "A language model" if base is None else f"[{base}](https://huggingface.co/{base})"
    trained_on = "" if dataset is None else f" on the data set [{dataset}](https://huggingface.co/datasets/{dataset})"
    body = _BODY.format(name=name, what=what, data=trained_on, **facts)
    datasets = None if dataset is None else [dataset]
    all_tags = sorted({*TAGS, *tags})
    return ModelCard(card_text(body, library_name="transformers", base_model=base, datasets=datasets, tags=all_tags))


def card_text(body: str, **data: Any) -> str:
    """Return the text of a model card: ``data`` (``ModelCardData``) as its front matter, and ``body``."""
    return f"---\n{ModelCardData(**data).to_yaml()}\n---\n{body}"
