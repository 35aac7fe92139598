"""A model card for each policy of a team."""

from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData

if TYPE_CHECKING:
    from maporl.team.team import Policy
    from maporl.training.trainer import MultiAgentPPOTrainer

_BODY = """
# {name}

One policy of a team of language models ({team}) trained together with
`maporl`: multi-agent PPO on {protocol} dialogues, scored on the task `{task}`.
It speaks for: {agents}.

- kind: {kind}
- updates: {updates}, dialogues: {episodes}
- critic: {critic}, KL coefficient {kl_coef}, clip range {cliprange}, learning rate {learning_rate}

```python
{loading}
```

`value_head.safetensors`, where present, is the critic's head; it is needed only to go on training.

## Citation

MAPoRL: Park et al., *MAPoRL: Multi-Agent Post-Co-Training for Collaborative Large Language Models with Reinforcement
Learning*, ACL 2025, arXiv:2502.18439.
"""


def write_model_card(folder: Path, policy: "Policy", trainer: "MultiAgentPPOTrainer") -> None:
    """Write ``folder/README.md``."""
    learner, base = trainer.learners[policy.name], policy.model.config._name_or_path
    if policy.adapter is not None:
        kind = f"LoRA adapter on `{base}`"
        loading = f'base = AutoModelForCausalLM.from_pretrained("{base}")\nmodel = PeftModel.from_pretrained(base, "{policy.name}")'
    else:
        kind = f"full model, `{type(policy.model).__name__}`"
        loading = f'model = AutoModelForCausalLM.from_pretrained("{policy.name}")'
    data = ModelCardData(
        library_name="peft" if policy.adapter is not None else "transformers",
        base_model=base or None,
        tags=["maporl", "trl", "ppo", "multi-agent", "reinforcement-learning"],
    )
    body = _BODY.format(
        name=policy.name,
        team=", ".join(trainer.team.names()),
        protocol=type(trainer.protocol).__name__.lower(),
        task=type(trainer.task).__name__,
        agents=", ".join(policy.agents),
        kind=kind,
        updates=trainer.state.global_step,
        episodes=trainer.episodes,
        critic=learner.critic,
        kl_coef=trainer.args.kl_coef,
        cliprange=trainer.args.cliprange,
        learning_rate=learner.learning_rate,
        loading=loading,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{body}").save(folder / "README.md")
