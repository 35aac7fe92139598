"""A team and data as users of TRL's GRPOTrainer bring them."""

import torch

from maporl import Agent, MultiAgentPPOTrainer, Team, TinySection, build_tiny_model, build_tiny_tokenizer, recipe_parts

ROWS = [{"prompt": f"{n}+1=", "number": n} for n in range(4)]
CHATS = [
    {"prompt": [{"role": "system", "content": "0"}, {"role": "user", "content": f"{n}+1="}], "number": n}
    for n in range(4)
]


def agent(name):
    tiny = TinySection(alphabet="0123456789+=; ", hidden_size=32, layers=1)
    tokenizer = build_tiny_tokenizer(tiny)
    torch.manual_seed(0)
    return Agent(name, build_tiny_model(tiny, tokenizer), tokenizer)


def trainer_of(folder, functions, rows=ROWS, names=("solo",), overrides=(), **more):
    values = [
        "branching.group=4", "updates=2", "training.per_device_train_batch_size=2", "ppo.response_length=5",
        "training.gradient_accumulation_steps=1", "training.use_cpu=true", f"output_dir={folder}", "dialogues_logged=99",
    ]  # fmt: skip
    parts = recipe_parts("grpo_single", [*values, *overrides])
    parts["args"].disable_tqdm = True
    data = {} if rows is None else {"train_dataset": rows}
    team = Team([agent(name) for name in names])
    return MultiAgentPPOTrainer(**{"team": team, "reward_funcs": functions, **parts, **data, **more})
