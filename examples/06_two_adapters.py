"""A planner and a solver: two LoRA adapters on one model in memory, and a protocol of their own.

    python examples/06_two_adapters.py

The model is tiny and random, so that the script takes seconds and shows no learning. To train a real one, replace the
two lines of the model with `AutoModelForCausalLM.from_pretrained(NAME)` and `AutoTokenizer.from_pretrained(NAME)`, take
a task such as `GSM8K()`, and raise the lengths.
"""

import os
from dataclasses import dataclass

from peft import LoraConfig

import maporl
from maporl import (
    Agent,
    Arithmetic,
    Ask,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    Protocol,
    Team,
    TinySection,
    build_tiny_model,
    build_tiny_tokenizer,
)


@dataclass(frozen=True)
class PlanThenSolve(Protocol):
    """The first agent plans, and the second one answers with the plan."""

    roles = True

    def play(self, example, agents):
        planner, solver = agents
        # the planner reads the bare question, without the task's instruction to end with an answer
        told = [{"role": "user", "content": example.bare_question}]
        (plan,) = yield [Ask(planner, told, role="planner", answers=False)]
        told = [{"role": "user", "content": f"{plan.text};{example.question}"}]
        yield [Ask(solver, told, role="solver", parents=(plan.id,))]


section = TinySection(hidden_size=32, layers=1)
tokenizer = build_tiny_tokenizer(section)
model = build_tiny_model(section, tokenizer)

team = Team.on_one_base(model, tokenizer, [Agent("ann", role="planner"), Agent("bob", role="solver")], LoraConfig(r=8))

trainer = MultiAgentPPOTrainer(
    MultiAgentPPOConfig(
        output_dir=os.environ.get("OUTPUT", "runs/two_adapters"),
        total_episodes=32,
        per_device_train_batch_size=16,
        response_length=4,
        learning_rate=1e-3,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    ),
    team,
    Arithmetic(largest=9),
    PlanThenSolve(),
    eval_task=Arithmetic(largest=9, split="eval"),
)
maporl.check(trainer)  # prints what `maporl check` prints for a configuration
trainer.train()
for policy, (everything, learned) in team.count_parameters().items():
    print(f"{policy}: {learned:,} of {everything:,} parameters are its own and learn")
