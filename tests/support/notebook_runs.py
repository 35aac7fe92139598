"""What a notebook gives to the trainer, also one that was written for the GRPOTrainer of TRL."""

import copy

import torch

from maporl import (
    Agent,
    Arithmetic,
    Debate,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    RewardSection,
    Team,
    TinySection,
    build_tiny_model,
    build_tiny_tokenizer,
    recipe_parts,
)
from maporl.engines.text import TextEngine
from maporl.team.team import Policy
from trl_ext.sampling.own_weights import OwnWeights

TASK, HELD_OUT = Arithmetic(largest=9), Arithmetic(largest=9, split="eval")
DEBATE = Debate(turns=2, later="{others};{question}", quote="{text}", separator=";")
ALPHABET = "0123456789+=;"
READABLE = RewardSection(sources={"format": 1.0}, horizon="current", share="individual")
"""A reward that random models earn now and then."""


SMALL = {"temperature": 1.0, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}


def args(folder, updates=2, **options):
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "total_episodes": 4 * updates, "response_length": 3,
        "learning_rate": 1e-2, "eval_questions": 4, "num_ppo_epochs": 1, "seed": 3,
    }  # fmt: skip
    return MultiAgentPPOConfig(**SMALL | defaults | options)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def config(folder, **options):
    """Arguments of two updates by a team that debates."""
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "total_episodes": 16,
        "response_length": 4, "learning_rate": 1e-3, "eval_questions": 8,
    }  # fmt: skip
    return MultiAgentPPOConfig(**SMALL | defaults | options)


def odd(dialogues, task):
    return [[float(sum(u.response_ids) % 3) for u in d.utterances] for d in dialogues]


class CopiedWeights(OwnWeights):
    """Answers with copies of the weights as they were when it was last told of a change, as a server would."""

    remote = True

    def __init__(self, policies: dict[str, Policy], *arguments):
        copies = {name: copy.copy(policy) for name, policy in policies.items()}
        for one in copies.values():
            one.model = copy.deepcopy(one.model)
        super().__init__(copies, *arguments)
        self.real, self.digests = policies, []

    def submit(self, requests):
        digest = float(sum(p.detach().double().sum() for v in self.policies.values() for p in v.model.parameters()))
        self.digests += [digest] if not self.digests or self.digests[-1] != digest else []
        return super().submit(requests)

    def sync(self, policy, version):
        self.policies[policy].model.load_state_dict(self.real[policy].model.state_dict())
        self.release()


def trainer_of(tiny, folder, elsewhere, source=None, curriculum=(), agents=None, **options):
    """A trainer whose agents answer here or elsewhere. ``agents`` has more of each."""
    defaults = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "total_episodes": 40,
        "response_length": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "seed": 4, "kl_coef": 0.0,
    }  # fmt: skip
    args = MultiAgentPPOConfig(**SMALL | defaults | options)
    engine, more = "vllm" if elsewhere else "transformers", agents or {}
    models = (("ann", "llama", 1), ("bob", "qwen3", 2))
    team = Team([Agent(n, *tiny(a, seed=s), engine=engine, **more.get(n, {})) for n, a, s in models])
    team.find_stop_ids(args)
    engines = {"vllm": TextEngine(team.policies, CopiedWeights(team.policies, 64), 4)} if elsewhere else None
    reward, sources = RewardSection(sources={"odd": 1.0}), {"odd": source or odd}
    return MultiAgentPPOTrainer(
        args, team, TASK, DEBATE, None, reward, sources=sources, engines=engines, curriculum=curriculum
    )


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


def grpo_trainer_of(folder, functions, rows=ROWS, names=("solo",), overrides=(), **more):
    values = [
        "branching.group=4", "updates=2", "training.per_device_train_batch_size=2", "ppo.response_length=5",
        "training.gradient_accumulation_steps=1", "training.use_cpu=true", f"output_dir={folder}", "dialogues_logged=99",
    ]  # fmt: skip
    parts = recipe_parts("grpo_single", [*values, *overrides])
    parts["args"].disable_tqdm = True
    data = {} if rows is None else {"train_dataset": rows}
    team = Team([agent(name) for name in names])
    return MultiAgentPPOTrainer(**{"team": team, "reward_funcs": functions, **parts, **data, **more})
