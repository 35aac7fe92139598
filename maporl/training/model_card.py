"""Write a model card for each policy of a team."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from maporl.storage.run_folder import TAGS
from maporl.team.agents import Policy
from trl_ext.trainer.model_card import card_text

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


def write_model_card(folder: Path, policy: Policy, **facts: Any) -> None:
    """Write the model card of ``policy`` to ``folder/README.md``. ``facts`` are what it says of the training."""
    base = policy.model.config._name_or_path
    if policy.adapter is not None:
        kind = f"adapter on `{base}`" if base else "adapter on a model that has no name"
        below = f'AutoModelForCausalLM.from_pretrained("{base}")' if base else "...  # the run's initial/NAME/base"
        loading = f'base = {below}\nmodel = PeftModel.from_pretrained(base, "{policy.name}")'
    else:
        kind = f"full model, `{type(policy.model).__name__}`"
        loading = f'model = AutoModelForCausalLM.from_pretrained("{policy.name}")'
    body = _BODY.format(name=policy.name, agents=", ".join(policy.agents), kind=kind, loading=loading, **facts)
    library = "peft" if policy.adapter is not None else "transformers"
    card = card_text(body, library_name=library, base_model=base or None, tags=TAGS)
    ModelCard(card).save(folder / "README.md")
