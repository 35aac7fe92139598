"""Write a model card for each policy of a team."""

from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from maporl.team.agents import Policy

_BODY = """
# {name}

One policy of a team of language models ({team}) trained together with
`maporl` by reinforcement learning on {protocol} dialogues about the task `{task}`.
It speaks for: {agents}.

- kind: {kind}
- updates: {updates}, dialogues: {dialogues}
- {learned}, clip range {cliprange}
- {audit}

```python
{loading}
```

`critic/`, where present, is the critic; it is needed only to go on training.

## Citation

MAPoRL: Park et al., *MAPoRL: Multi-Agent Post-Co-Training for Collaborative Large Language Models with Reinforcement
Learning*, ACL 2025, arXiv:2502.18439.
"""


@dataclass(frozen=True)
class CardFacts:
    """The facts about a policy's training that its card states."""

    team: tuple[str, ...]
    protocol: str
    task: str
    updates: int
    dialogues: int
    learned: str
    audit: str
    cliprange: float


def write_model_card(folder: Path, policy: Policy, facts: CardFacts) -> None:
    """Write the model card of ``policy`` to ``folder/README.md``."""
    base = policy.model.config._name_or_path
    if policy.adapter is not None:
        kind = f"adapter on `{base}`" if base else "adapter on a model that has no name"
        below = f'AutoModelForCausalLM.from_pretrained("{base}")' if base else "...  # the run's initial/NAME/base"
        loading = f'base = {below}\nmodel = PeftModel.from_pretrained(base, "{policy.name}")'
    else:
        kind = f"full model, `{type(policy.model).__name__}`"
        loading = f'model = AutoModelForCausalLM.from_pretrained("{policy.name}")'
    data = ModelCardData(
        library_name="peft" if policy.adapter is not None else "transformers",
        base_model=base or None,
        tags=["maporl", "trl", "ppo", "multi-agent", "reinforcement-learning"],
    )
    filled = asdict(facts) | {"team": ", ".join(facts.team)}
    body = _BODY.format(name=policy.name, agents=", ".join(policy.agents), kind=kind, loading=loading, **filled)
    ModelCard(f"---\n{data.to_yaml()}\n---\n{body}").save(folder / "README.md")
