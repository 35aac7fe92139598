"""Runs of a two-policy team on a service of the Tinker protocol, and the same runs with weights in this process.

The service is a stand-in. As a program it trains a team on a server that is there, and here, and prints by how much the
weights differ and what the probe found::

    python tests/support/tinker_runs.py ADDRESS BASE FOLDER

On SkyRL's server q, k and v have one matrix A, and gate and up have one, which so gets the sum of their gradients. They
are left out of what is compared.
"""

import json
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file
from tinker_stub import Stub, write_base

from maporl.engines.text import TextEngine
from maporl.integrations.tinker.engine import TinkerEngine
from maporl.integrations.tinker.service import Adapter, Service
from maporl.runs import build
from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict
from trl_ext.sampling.engine import Ready, TokenEngine

ALPHABET = {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1, "heads": 2, "context": 256}
RANK = 4


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of a tiny model with random weights, which the service serves."""
    from maporl.sections import TinySection
    from maporl.tiny import build_tiny_model, build_tiny_tokenizer

    section = TinySection(**ALPHABET)
    tokenizer = build_tiny_tokenizer(section)
    return write_base(
        tmp_path_factory.mktemp("base") / "tiny", lambda: (build_tiny_model(section, tokenizer), tokenizer)
    )


@pytest.fixture
def served(base):
    """``served(*wrong)`` starts a stand-in of the service."""
    stubs = []

    def start(*wrong, **options):
        stubs.append(Stub(base, wrong, **options))
        return stubs[-1]

    yield start
    for stub in stubs:
        stub.close()


def values_of(folder, base, sections=None, agents=None, **training):
    """The values of a configuration of a two-policy team, which trains in this process."""
    sections = dict(sections or {})
    ppo = {"response_length": 3, "temperature": 1.0, "kl_coef": 0.0, **sections.pop("ppo", {})}
    return {
        "output_dir": str(folder),
        "task": {"name": "toy_sum", "largest": 9},
        "agent_defaults": {"model": base, "lora": {"r": RANK}},
        "agents": agents or {"ann": {}, "bob": {}},
        "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}"},
        "reward": {"sources": {"tokens": 1.0}},  # so that rewards differ
        "advantage": {"returns": "utterance", "baseline": "mean", "scale": "none"},
        "updates": 3,
        "ppo": ppo,
        "training": {
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True, "critic": "none",
            "learning_rate": 1e-3, "save_steps": 1, **training,
        },
        "evaluation": {"questions": 0},
        "seed": 3,
        **sections,
    }  # fmt: skip


def on(stub, values, **section):
    """The same on a service."""
    return values | {"cluster": {"backend": "tinker", "tinker": {"base_url": stub.url}, **section}}


def trainer_of(values):
    return build_trainer(from_dict(values), quiet=True)


class Recorded(TokenEngine):
    """Gives the answers that a service gave before."""

    def __init__(self, answers):
        self.answers = answers

    def submit(self, requests):
        found = [self.answers[request.policy, request.key] for request in requests]
        assert [prompt for prompt, _ in found] == [request.prompt_ids for request in requests]
        return [Ready(answer) for _, answer in found]


@pytest.fixture
def recorded(monkeypatch):
    """What engines of services answer, with the prompts, by policy and key."""
    return recording(monkeypatch)


def recording(patch):
    answers, submit = {}, TinkerEngine.submit

    def recording_submit(self, requests):
        futures = submit(self, requests)
        for request, future in zip(requests, futures, strict=True):
            assert isinstance(future, Future)
            answers[request.policy, request.key] = (request.prompt_ids, future.result(300))
        return futures

    patch.setattr(TinkerEngine, "submit", recording_submit)
    return answers


def train_here(values, stub, recorded, folder):
    """Train the same team in this process, from the adapters that the service began with, on the same answers."""
    service = Service(stub.url, "NO_KEY", 1, 300.0)
    agents = {}
    for number, (name, section) in enumerate(values["agents"].items()):
        start = Path(folder, "start", name)
        start.mkdir(parents=True)
        adapter = Adapter(service, name, values["agent_defaults"]["model"], RANK, 3 + number)
        adapter.download(name, start)
        adapter.unload()
        agents[name] = {**section, "adapter": str(start)}
    service.close()
    defaults = {"model": values["agent_defaults"]["model"]}
    trainer = trainer_of(values | {"agents": agents, "agent_defaults": defaults, "output_dir": str(folder / "here")})
    tokens = Recorded(recorded)
    trainer.player.engines["transformers"] = TextEngine(trainer.team.policies, tokens, trainer.args.response_length)
    trainer.train()
    return trainer


def final_of(folder):
    return {
        file.parent.name: load_file(file) for file in sorted(Path(folder, "final").rglob("adapter_model.safetensors"))
    }


def difference(one, other):
    assert one.keys() == other.keys() and len(one) == 2
    assert all(one[name].keys() == other[name].keys() and len(one[name]) > 10 for name in one)
    return max(float((one[n][k] - other[n][k]).abs().max()) for n in one for k in one[n])


def trained_twice(tmp_path, base, stub, recorded, **options):
    """The ends of a run on a service, and of the same run here."""
    values = values_of(tmp_path / "there", base, **options)
    trainer_of(on(stub, values)).train()
    train_here(values, stub, recorded, tmp_path)
    return final_of(tmp_path / "there"), final_of(tmp_path / "here")


SHARED = ("q_proj.lora_A", "k_proj.lora_A", "v_proj.lora_A", "gate_proj.lora_A", "up_proj.lora_A")


def smooth(args):
    """Steps are nearly proportional to gradients, so that rounding, which is another in each library, stays small."""
    args.adam_epsilon = 1.0
    return args


def main(url, base, folder):
    ppo = {"num_ppo_epochs": 2, "num_mini_batches": 2, "kl_coef": 0.2, "kl_in": "loss", "kl_estimator": "k3"}
    options = {"sections": {"ppo": ppo, "updates": 2}, "max_grad_norm": 0.0, "learning_rate": 0.02}
    arguments = build.training_arguments
    with pytest.MonkeyPatch.context() as patch:
        recorded = recording(patch)
        patch.setattr(build, "training_arguments", lambda config: smooth(arguments(config)))
        there, here = trained_twice(Path(folder), base, SimpleNamespace(url=url), recorded, **options)
    ((facts,),) = (
        bases.values()
        for bases in json.loads(Path(folder, "there/audit.json").read_text())["built"]["service"].values()
    )
    own = [
        {n: {k: v for k, v in w.items() if not any(one in k for one in SHARED)} for n, w in end.items()}
        for end in (there, here)
    ]
    moved = max(float(v.abs().max()) for weights in there.values() for k, v in weights.items() if "lora_B" in k)
    print(json.dumps({"difference": difference(*own), "moved": moved, "facts": facts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
