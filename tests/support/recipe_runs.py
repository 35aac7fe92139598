"""Recipes with scripted answers and a judge's verdicts, their loss and gradients, and how long some train.

The configurations of MAPoRL and of published tables have tiny models, verifiers and data in the place of theirs. As a
program this plays one batch of several recipes, and writes what each utterance is trained on::

    torchrun --nproc_per_node 2 tests/support/recipe_runs.py OUT QUESTIONS RECIPE [RECIPE ...]

``QUESTIONS`` is the number of questions of a batch over all processes. Agents say what a script says, which depends on
the place of an answer in the run. Each process writes the rows of its own questions to ``OUT/RECIPE.RANK.json``.
"""

import json
import os
import string
import sys
from pathlib import Path

import pytest
import torch
from folders import ROOT
from one_policy import saved_verifier
from perturbed_training import SEED, longest_answer, script_of
from scripted_training import TokenScript, played, recipe_values, rows

from maporl.config.parse import read_yaml
from maporl.config.schema import TinySection
from maporl.methods import tiny_versions
from maporl.runs.build import build_trainer
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.validation.load import from_dict
from trl_ext.ppo.losses import Totals, micro_batch_loss
from trl_ext.process import distributed


class Output:
    """A learner's output at the sampled tokens of a token batch, without a critic."""

    def __init__(self, logprobs):
        self.logprobs, self.values, self.entropies = logprobs, None, torch.zeros_like(logprobs.detach())


def loss_and_gradients(trainer, tokens, parts=None, shift=0.0):
    """Return the loss of a token batch and the gradient of each row's tokens, with all new log-probabilities moved.

    ``parts`` cuts the batch into micro-batches. By default one reads all rows.
    """
    args = trainer.args
    everything = torch.arange(len(tokens))
    totals = Totals.of(tokens, everything, args)
    new = (tokens.old_logprobs + shift).detach().requires_grad_(True)
    objective = next(iter(trainer.learners.values())).objective
    total = torch.zeros(())
    for part in [everything] if parts is None else parts:
        piece = tokens.take(part)
        width = piece.input_ids.shape[1]
        output = Output(new[part][:, :width][piece.sampled_mask])
        total = total + micro_batch_loss(piece, output, totals, args, objective)[0]
    total.backward()
    gradients = [new.grad[i][tokens.sampled_mask[i]] for i in range(len(tokens))]
    return float(total.detach()), gradients


def rollout_of(request):
    """Return the number of a request's dialogue among those on the same question."""
    return int(request.label.rsplit(".", 1)[1])


# enough for answers of different worth, without which groups of equals have no gradient
BRIEF = {"steps": 15, "batch_size": 8, "learning_rate": 1e-2}
STEPS = {
    40: ("g_ra", "spa_rl", "turn_ppo", "oni", "cooper", "metaagent_x"),
    60: ("co_rl", "search_self_play", "parl", "absolute_zero"),
    80: ("at_grpo_code", "spice"),
}
LONGER = {name: {"steps": steps} for steps, names in STEPS.items() for name in names}
LONGER["reseek"] = {"steps": 60, "batch_size": 32}
RIGHT = (True, True, False, False)
VERDICTS = ((1, 1, -1), (1, -1, None), (1, 1, 1), (-1, -1, -1))
WORDS = {1: "Verdict: good", -1: "Verdict: bad", None: "Verdict: good. Verdict: bad"}


def one_step_values(tmp_path, **changes):
    """The recipe's judge, rewards and advantages for an agent that answers a sum once."""
    values = recipe_values("rl_anything", tmp_path)
    values["protocol"] = {"name": "debate", "turns": 1, "step_judge": values["protocol"]["step_judge"]}
    values["agents"] = {"ann": {}, "judge": {}}
    values["task"] = {"name": "toy_sum", "largest": 3}
    values["reward"]["sources"] = {"label": 1.0}
    values["branching"] = {"group": 4}
    return values | changes


def script(request, verdicts=VERDICTS, right=RIGHT):
    number = request.rng_key[-2]
    if request.ask.role == "judge":
        return WORDS[verdicts[number][request.utterance - 1]]
    return str(int(request.example.answer) + (0 if right[number] else 1))


ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
CODE = "def simple_math_problem():\n    return {a} + {b}\n"


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Folders: two models of different architectures, a verifier, and data of both kinds."""
    root = tmp_path_factory.mktemp("stand-ins")
    for name, architecture in (("first", "llama"), ("second", "qwen3")):
        section = TinySection(architecture=architecture, alphabet=ALPHABET, hidden_size=64, layers=2, context=8192)
        tokenizer = build_tiny_tokenizer(section)
        build_tiny_model(section, tokenizer).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    saved_verifier(tokenizer, root / "verifier")
    tiny_gsm = [
        {"id": f"t{i}", "question": f"Ann has {i} and {i + 1}. How many?", "code": CODE.format(a=i, b=i + 1)}
        for i in range(16)
    ]
    anli = [{"id": f"a{i}", "question": f"Premise: {i}", "answer": "neutral"} for i in range(16)]
    for name, lines in (("tinygsm.jsonl", tiny_gsm), ("anli.jsonl", anli)):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    return root


def small(path, root, folder):
    """The configuration at ``path`` with everything heavy replaced, and nothing else."""
    values = read_yaml(path)
    agents = [values["agent_defaults"], *values["agents"].values()]
    names = dict.fromkeys(agent["model"] for agent in agents if "model" in agent)  # in order of first mention
    models = dict(zip(names, (str(root / "first"), str(root / "second")), strict=False))
    for agent in agents:
        if "model" in agent:
            agent["model"] = models[agent["model"]]
        agent.pop("pad_token", None)
    values["agent_defaults"]["load_in_4bit"] = False
    values["agent_defaults"]["dtype"] = "float32"
    data = str(root / f"{values['task']['name']}.jsonl")
    values["task"] |= {"source": data} | (
        {"held_out": 4} if values["task"]["name"] == "tinygsm" else {"eval_source": data}
    )
    if values["reward"].get("verifier"):
        values["reward"]["verifier"]["model"] = str(root / "verifier")
    if values["reward"].get("penalties"):
        values["reward"]["penalties"]["min_tokens"] = 2
    values["ppo"] |= {"response_length": 6, "num_mini_batches": min(values["ppo"]["num_mini_batches"], 2)}
    values["training"] |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    values["training"] |= {"use_cpu": True, "save_steps": 0}
    values |= {"updates": 2, "output_dir": str(folder / "run"), "evaluation": {"questions": 2}}
    return from_dict(values)


FOLDER = ROOT / "configs/ppo/reproduce"


def tiny_values(name, folder, monkeypatch):
    monkeypatch.setattr(tiny_versions, "recipe_file", lambda name: FOLDER / f"{name}.yaml")
    return tiny_versions.tiny_version(name, folder)


def batch_rows(name: str, folder: Path, questions: int) -> list[list]:
    """Return the rows of this process: where an utterance stands, its text, its credit, its advantage and its
    weight."""
    size = int(os.environ.get("WORLD_SIZE", "1"))  # before the first trainer joins the processes
    values = recipe_values(name, folder / name) | {"seed": SEED, "updates": 1, "evaluation": {"questions": 0}}
    values.get("schedule", {}).pop("critic_warmup", None)  # the policies learn in the one update
    values["training"] |= {"save_steps": 0, "per_device_train_batch_size": questions // size}
    trainer = build_trainer(from_dict(values, name), quiet=True)
    policies = trainer.team.policies
    engine = TokenScript(policies, script_of(policies), longest_answer(values), "distill" in values["reward"])
    trainer.engines.update(dict.fromkeys(trainer.engines, engine))
    batch = played(trainer)
    places = {id(u): (d.prompt, d.rollout) for d in batch.dialogues for u in d.utterances}
    return [
        [*places[id(u)], u.id, row.policy, u.agent, u.text, u.rewards.get("credit"), row.advantage, row.weight]
        for row in rows(batch)
        if (u := row.utterance)
    ]


def main() -> None:
    out, questions, *names = sys.argv[1:]
    for name in names:
        found = batch_rows(name, Path(out), int(questions))
        (Path(out) / f"{name}.{distributed.rank()}.json").write_text(json.dumps(found))
    distributed.shutdown()


if __name__ == "__main__":
    main()
