"""Two tiny models with different architectures learn two skills by debating. This is multi-agent PPO on in-memory objects.

    python examples/01_tiny_debate.py

Sixty updates take a minute or two on two quiet CPU cores. They show how the parts fit together; `make quickstart` learns
more. The notebook of the same name has the same code, with its outputs.
"""

import os
import tempfile

import torch

from maporl import (
    Agent,
    Debate,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    RewardSection,
    Skills,
    Team,
    TinySection,
    WarmStartSection,
    build_tiny_model,
    build_tiny_tokenizer,
    warm_start,
)

torch.manual_seed(0)

UPDATES = int(os.environ.get("UPDATES", "60"))  # tests set lower values
WARM_START = int(os.environ.get("WARM_START", "60"))

# Two agents. Each has its own weights, architecture and tokenizer. You can use any causal language model that has a chat
# template instead: Agent("ann", AutoModelForCausalLM.from_pretrained(...), AutoTokenizer.from_pretrained(...)).
agents = []
for name, architecture, alphabet in (("ann", "llama", "0123456789+*;"), ("bob", "qwen3", ";*+9876543210")):
    section = TinySection(architecture=architecture, alphabet=alphabet, hidden_size=96, layers=2)
    tokenizer = build_tiny_tokenizer(section)
    agents.append(Agent(name, build_tiny_model(section, tokenizer), tokenizer))
team = Team(agents)

# `47+` asks for the next of every digit (58), and `47*` for the digits reversed (74). A fifth of the numbers is held out.
task, held_out = Skills(digits=2), Skills(digits=2, split="eval")

# In the second turn each agent reads the other agent's answer and then the question again.
debate = Debate(turns=2, later="{others};{question}", quote="{text}", separator=";")

# Random weights know nothing, so first train them on a few dialogues of pupils who are often wrong.
warm_start(team, task, debate, WarmStartSection(steps=WARM_START, wrong=0.3), seed=0)

trainer = MultiAgentPPOTrainer(
    args=MultiAgentPPOConfig(
        output_dir=tempfile.mkdtemp(),
        total_episodes=128 * UPDATES,
        per_device_train_batch_size=128,
        num_ppo_epochs=2,
        num_mini_batches=4,
        response_length=4,
        temperature=1.0,
        kl_coef=0.0,
        vf_coef=0.5,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        value_learning_rate=3e-3,
        report_to=[],
        save_strategy="no",
    ),
    team=team,
    task=task,
    protocol=debate,
    eval_task=held_out,
    reward=RewardSection(horizon="discounted_sum", share="all", discount=0.3),
)

# This also evaluates the team on held-out questions, before and after.
trainer.train()
for number, (old, new) in enumerate(zip(trainer.before.turns, trainer.after.turns, strict=True), 1):
    print(f"turn {number}: held-out accuracy {old.team.value:.0%} before, {new.team.value:.0%} after")
print("open report.html, or run maporl eval, play, or push, with the folder", trainer.args.output_dir)
