"""Count what an update of each recipe costs, relative to plain PPO.

    python benchmarks/recipe_costs.py --tokenizer MODEL              # all recipes, into
    benchmarks/results/recipe_costs.json python benchmarks/recipe_costs.py --tokenizer MODEL gdpo rloo    # only these;
    the file keeps the figures of the others

The unit is a token that passes through a model: once where it is read or sampled, and three times where it is trained,
because the backward pass does twice the work of the forward pass. Tokens of policies, references, critics and judges
count alike. Plain PPO is the same team with the same questions, protocol, rewards and lengths: each dialogue is played
once, every policy has a critic and a reference, and a batch is passed once. An update of an outer loop is one round.

Both train three updates as ``maporl recipes try`` does, with the recipe's own group sizes, rounds and drafts. The
models are tiny and random, with the tokenizer of ``--tokenizer`` (a folder, or a name on the Hub; docs/recipes.md has
the figures of SmolLM2's), so that prompts have as many tokens as in real runs, and answers are as long as they may be.
Where agents propose, call, plan or write programs, or answers are paired, the models are those of ``try`` after their
warm start, because random ones ask for nothing and give no answers. Real dialogues have other lengths, so the ratio is
a guide and no promise.
"""

import argparse
import json
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

RESULTS = Path(__file__).parent / "results/recipe_costs.json"
BACKWARD = 3
ANSWER = 128
QUESTIONS = 4


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the tokens that pass through models, weighted, in the one number of the list."""
    count = [0]

    def add(module: torch.nn.Module, arguments: Any) -> None:
        if isinstance(module, torch.nn.Embedding):
            count[0] += arguments[0].numel() * (BACKWARD if torch.is_grad_enabled() else 1)

    handle = register_module_forward_pre_hook(add)
    try:
        yield count
    finally:
        handle.remove()


def tokens(values: dict[str, Any], name: str) -> float:
    """Return the weighted tokens for each question that a configuration trains on. Its warm start does not count."""
    from maporl.loops.run import run_loop
    from maporl.runs.build import build_trainer
    from maporl.validation.load import from_dict

    with tempfile.TemporaryDirectory() as folder:
        config = from_dict(values | {"output_dir": f"{folder}/run"}, name)
        loop = config.loop.stages
        run = partial(run_loop, config, resume=False, quiet=True) if loop else build_trainer(config, quiet=True).train
        with counted() as count:
            run()
        return count[0] / (config.loop.rounds * config.loop.questions if loop else config.updates * QUESTIONS)


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of plain PPO for the same team, questions, protocol, rewards and lengths.

    A tournament compares the dialogues of a question, of which plain PPO has one. It is paid for labels instead. What
    an agent contributed is not known without ablations, and pays nothing.
    """
    from maporl.rewards.rules import build_rules

    kept = {key: value for key, value in values.items() if key not in ("branching", "advantage", "loop")}
    freeze = values.get("schedule", {}).get("freeze", [])
    ppo = {"response_length": values["ppo"]["response_length"], "num_ppo_epochs": 1, "num_mini_batches": 1}
    training = {key: value for key, value in values["training"].items() if key not in ("critic", "value_learning_rate")}
    sources = {source: weight for source, weight in values["reward"]["sources"].items() if source != "arena"}
    reward = {key: value for key, value in values["reward"].items() if key != "arena"} | {
        "sources": sources or {"label": 1.0}
    }
    if "ablate" in values.get("branching", {}):
        rules = zip(reward["rules"], build_rules(reward["rules"]), strict=True)
        reward["rules"] = [entry for entry, rule in rules if not rule.reads & {"marginal", "shapley"}]
    return kept | {"ppo": ppo, "training": training, "schedule": {"freeze": freeze}, "reward": reward}


def coin(completions: list[Any], **columns: Any) -> list[float]:
    """Pay every second text 1, so that a loop finds rows among answers that are all wrong."""
    return [float(zlib.crc32(str(text).encode()) % 2) for text in completions]


def random_model(tokenizer: str, folder: str) -> str:
    """Save a tiny random model with the vocabulary of ``tokenizer`` in ``folder``, and return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = AutoConfig.from_pretrained(tokenizer, **size, head_dim=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


def cost(name: str, model: str) -> float:
    """Return how many times the tokens of plain PPO an update of the recipe ``name`` costs, with the model in a
    folder."""
    from maporl.config.parse import read_yaml
    from maporl.config.recipes import recipe_file
    from maporl.methods.tiny_versions import tiny_version

    own, values = read_yaml(recipe_file(name)), tiny_version(name, "")
    values |= {"branching": own.get("branching", {}), "evaluation": {"questions": 0}}
    if "rounds" in own["protocol"]:
        values["protocol"]["rounds"] = own["protocol"]["rounds"]
    paired = own.get("branching", {}).get("choose") == "frequent"
    if own["protocol"]["name"] not in ("propose", "call_return", "code", "orchestrate", "design") and not paired:
        values |= {"warm_start": {"steps": 0}, "ppo": values["ppo"] | {"response_length": ANSWER}}
        values["agent_defaults"] = {"model": model}
    # several forwards, as in real runs: the graph of a batch that one forward reads is kept, which saves a forward
    values["training"] |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": QUESTIONS, "save_steps": 0}
    if "loop" in own:
        # a round's updates ask as many questions as it samples, in the recipe and here, and of a tenth of the dialogues
        # one must be whole
        updates = any(stage["train"] == "ppo" for stage in own["loop"]["stages"])
        kept = [
            {"updates": 1, "group": stage["group"]} if stage["train"] == "ppo" else {"epochs": stage.get("epochs", 1)}
            for stage in own["loop"]["stages"]
        ]
        stages = [stage | each for stage, each in zip(values["loop"]["stages"], kept, strict=True)]
        read = {name: weight for name, weight in values["reward"]["sources"].items() if name == "nll"}
        values["reward"]["sources"] = {"recipe_costs:coin": 1.0} | read
        asked = 10 if "rank_halves" in str(stages) else QUESTIONS if updates else 1
        values["loop"] |= {"questions": asked, "rounds": 1, "stages": stages}
    return tokens(values, name) / tokens(plain(values), name)


def main() -> None:
    """Count, print and write."""
    from maporl.config.recipes import recipe_files

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; by default all")
    parser.add_argument("--tokenizer", required=True, help="a model's folder or name")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(options.tokenizer, folder)
        for name in options.names or recipe_files():
            found[name] = float(f"{cost(name, model):.2g}")
            print(f"{name:24} {found[name]:g}", flush=True)
            RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
