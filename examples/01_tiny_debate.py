"""Two tiny specialists learn when to listen to each other. This is multi-agent PPO on in-memory objects.

    python examples/01_tiny_debate.py

Eighty updates take two to three minutes on two quiet CPU cores. It is the quickstart, written in Python. The notebook
of the same name has the same code, with its outputs.
"""

import os
import tempfile

import torch

from maporl import (
    Agent,
    Debate,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    PupilSection,
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

UPDATES = int(os.environ.get("UPDATES", "80"))  # tests set lower values
WARM_START = int(os.environ.get("WARM_START", "400"))

# Two agents. Each has its own weights, architecture and tokenizer. You can use any causal language model that has a
# chat template instead: Agent("ann", AutoModelForCausalLM.from_pretrained(...), AutoTokenizer.from_pretrained(...)).
agents = []
for name, architecture, alphabet in (("ann", "llama", "0123456789+*;"), ("bob", "qwen3", ";*+9876543210")):
    section = TinySection(architecture=architecture, alphabet=alphabet, hidden_size=96, layers=2)
    tokenizer = build_tiny_tokenizer(section)
    agents.append(Agent(name, build_tiny_model(section, tokenizer), tokenizer))
team = Team(agents)

# `472+` asks for the next of every digit (583), and `472*` for the digits reversed (274). A fifth of the numbers is
# held out.
task, held_out = Skills(), Skills(split="eval")

# In the second turn each agent reads the other agent's answer and then the question again.
debate = Debate(turns=2, later="{others};{question}", quote="{text}", separator=";")

# Before PPO each agent is taught one skill, which it uses whatever the question asks for. In the second turn it repeats
# the other's answer three times in ten, at random. PPO then teaches it when to.
pupils = {"ann": PupilSection(skill="next", gives_in=0.3), "bob": PupilSection(skill="reversed", gives_in=0.3)}
warm_start(team, task, debate, WarmStartSection(steps=WARM_START, learning_rate=2e-3, agents=pupils), seed=0)

trainer = MultiAgentPPOTrainer(
    args=MultiAgentPPOConfig(
        output_dir=tempfile.mkdtemp(),
        total_episodes=128 * UPDATES,
        per_device_train_batch_size=128,
        num_ppo_epochs=2,
        num_mini_batches=4,
        response_length=5,
        temperature=1.0,
        kl_coef=0.02,
        vf_coef=0.5,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
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
