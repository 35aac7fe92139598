"""Training on a device whose tensors do not mix with the CPU's, and how often the host waits for it."""

import copy
import json

import pytest
import second_device
import torch
from peft import LoraConfig, get_peft_model
from second_device import waits
from test_update_layouts import Plain
from tiny_run import config_of, end_of

from maporl.runs.train import train
from maporl.validation.preflight import check_run
from trl_ext.learner import Learner
from trl_ext.ppov2_config import PPOv2Config
from trl_ext.sampling import Sampling, sample
from trl_ext.token_advantages import assign_advantages
from trl_ext.token_batch import Completion, build_token_batch

pytestmark = pytest.mark.skipif(not second_device.AVAILABLE, reason="this torch takes no backend written in Python")
UPDATES = 2


@pytest.fixture
def sim():
    with second_device.second_device() as device:
        yield device


def test_the_device_refuses_tensors_of_the_cpu(sim):
    here, there = torch.ones(2, 3, device=sim), torch.ones(2, 3)
    mixed = [
        lambda: here + there,
        lambda: there.add_(here[0]),
        lambda: there.add_(here.sum()),
        lambda: torch.cat([here, there]),
        lambda: here @ there.T,
        lambda: there[torch.tensor([0], device=sim)],
        lambda: torch.where(there > 0, here, here),
        lambda: here.gather(1, torch.zeros(2, 1, dtype=torch.long)),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), here),
        lambda: here.masked_fill(there > 0, 0.0),
    ]
    for operation in mixed:
        with pytest.raises(RuntimeError, match="same device"):
            operation()
    with pytest.raises(TypeError, match="numpy"):
        here.numpy()
    allowed = [here * torch.tensor(2.0), here[torch.tensor([1])], torch.where(here > 0, here, torch.tensor(0.0))]
    assert all(tensor.device == sim for tensor in allowed)


def test_the_device_trains_and_moves_like_cuda(sim):
    layer = torch.nn.Linear(3, 2)
    weight = layer.weight
    layer.to(sim)
    assert layer.weight is weight and weight.device == sim and copy.deepcopy(layer).weight.device == sim
    with torch.autocast("sim", dtype=torch.bfloat16):
        out = layer(torch.ones(4, 3, device=sim))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert weight.grad.device == sim and weight.grad.tolist() == [[4.0] * 3] * 2
    torch.manual_seed(1)
    drawn = torch.rand(3, device=sim).tolist()
    torch.rand(3)
    torch.manual_seed(1)
    assert torch.rand(3, device=sim).tolist() == drawn


def test_the_device_counts_what_waits_for_it(sim):
    x = torch.arange(6.0, device=sim).view(2, 3)
    mask, index = x > 1, torch.tensor([1, 0], device=sim)
    expected = [
        (lambda: x.sum().item(), 1), (lambda: bool(mask.any()), 1), (lambda: x.tolist(), 1), (lambda: x.cpu(), 1),
        (lambda: x[mask], 1), (lambda: mask.nonzero(), 1), (lambda: x.clone().masked_fill_(mask, 0.0), 0),
        (lambda: x[index], 0), (lambda: x[torch.tensor([1, 0])], 0), (lambda: torch.tensor([1.0], device=sim), 0),
        (lambda: x.repeat_interleave(index, 0), 1), (lambda: x.repeat_interleave(index, 0, output_size=1), 0),
        (lambda: x.masked_select(mask), 1), (lambda: (x * 2).softmax(-1).sum(), 0), (lambda: torch.equal(x, x), 1),
    ]  # fmt: skip
    for number, (operation, times) in enumerate(expected):
        with waits() as found:
            operation()
        assert sum(found.values()) == times, (number, found)


TINY = {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1}
LORA = {"tiny": TINY, "lora": {"r": 4}}
GROUPS = {"advantage": {"returns": "utterance", "baseline": "mean", "key": ["prompt"]}, "branching": {"group": 2}}
RUNS = {
    "head": ({}, {}),
    "separate critic": ({"agent_defaults": {"tiny": TINY, "critic": "model"}}, {}),
    "adapter critic": ({"agent_defaults": LORA | {"critic": "adapter"}}, {}),
    "central critic": ({"agent_defaults": {"tiny": TINY, "critic": "central"}}, {}),
    "branches without a critic": (GROUPS, {}),
    "one base": ({"agent_defaults": LORA, "agents": {"ann": {"policy": "one"}, "bob": {"policy": "one"}}}, {}),
    "opponents": ({"schedule": {"opponent_pool": {"agent": "bob", "of": "ann"}}}, {}),
    "checkpointing": ({}, {"gradient_checkpointing": True}),
    "trajectories": (
        {
            "ppo": {
                "response_length": 3,
                "ratio": "trajectory",
                "entropy_coef": 0.01,
                "kl_in": "loss",
                "kl_estimator": "k3",
            }
        },
        {},
    ),
}


def run_of(folder, use_cpu, sections, training):
    """What a run leaves that does not depend on its speed, with weights on the CPU."""
    config = config_of(folder, UPDATES, {"evaluation": {"questions": 4}, **sections}, use_cpu=use_cpu, **training)
    check_run(config)
    before, after = train(config, resume=False, quiet=True)
    assert before.questions == after.questions == 4
    return end_of(folder, UPDATES)


def assert_near(found, expected):
    """Equal dialogues, and numbers that differ only by the order of additions."""
    (weights, records, dialogues), (other_weights, other_records, other_dialogues) = found, expected
    assert dialogues_of(dialogues) == dialogues_of(other_dialogues)
    assert len(records) == len(other_records) and weights.keys() == other_weights.keys()
    for record, other in zip(records, other_records, strict=True):
        assert record == pytest.approx(other, rel=1e-3, abs=1e-4, nan_ok=True)
    for name in (name for name in weights if name.startswith("final")):
        for key, value in weights[name].items():
            torch.testing.assert_close(value, other_weights[name][key], rtol=1e-3, atol=1e-4)


def dialogues_of(lines):
    return [[u["text"] for u in json.loads(line)["utterances"]] for line in lines.splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_a_team_trains_as_on_the_cpu(sim, tmp_path, name):
    found = run_of(tmp_path / "sim", False, *RUNS[name])
    second_device.leave()
    assert_near(found, run_of(tmp_path / "cpu", True, *RUNS[name]))


# -- how often the host waits for the device ----------------------------------------------------------------------------

CONVERSATIONS = [([3, 4 + n], [5, 6 + n % 3, 7, 8][: 2 + n % 3], n // 2) for n in range(8)]


def learner_on(device, tiny, folder, critic="head", lora=False, **options):
    model, tokenizer = tiny("qwen3")
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    defaults = {"output_dir": str(folder), "report_to": [], "temperature": 1.0, "kl_coef": 0.1}
    args = PPOv2Config(**{**defaults, "per_device_train_batch_size": 2, **options})
    learner = Learner("policy", model, tokenizer, args, critic=critic)
    learner.prepare(Plain(), updates=1, device=device)
    completions = [
        Completion(p, r, True, str(i), score=i % 3, trajectory=(t,)) for i, (p, r, t) in enumerate(CONVERSATIONS)
    ]
    return learner, build_token_batch(completions, device)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"critic": "model"}, {"critic": "none"}, {"critic": "adapter", "lora": True}, {"kl_in": "loss", "kl_estimator": "k3"},
        {"ratio": "trajectory"}, {"entropy_coef": 0.01, "logits_chunk": 4}, {"aggregation": "sequence_mean"},
        {"objective": "reinforce", "engine_tis_cap": 2.0}, {"optim": "adamw_torch", "max_grad_norm": 0},
    ],
    ids=lambda options: " ".join(map(str, options)) or "default",
)  # fmt: skip
def test_an_update_waits_at_most_twice_for_a_micro_batch(sim, tiny, tmp_path, options):
    """Transformers waits once in each forward, to see whether positions are packed. The rest is for the whole minibatch."""
    learner, rows = learner_on(sim, tiny, tmp_path, **options)
    with waits() as before:
        learner.compute_old_logprobs_and_values(rows)
        assign_advantages(rows, learner.args, learner.critic != "none")
    parts = rows.microbatches(torch.arange(8), 2)
    forwards = 2 if options.get("critic") in ("model", "adapter") else 1
    assert len(parts) == 4
    with waits() as found:
        measures = learner.accumulate(rows, torch.arange(8))
        norm = learner.step()
    assert measures["loss"] == measures["loss"] and norm > 0
    assert sum(found.values()) <= forwards * len(parts) + 2, found
    assert sum(found.values()) <= 2 * forwards * len(parts)
    reads = forwards + 1  # the reference's too
    assert sum(before.values()) <= reads * len(parts) + 30, before


def test_the_number_of_rows_does_not_matter_to_the_waits_of_advantages(sim, tiny, tmp_path):
    counts = []
    for copies in (1, 4):
        learner, _ = learner_on(sim, tiny, tmp_path)
        completions = [
            Completion(p, r, True, str(i), score=float(i)) for i, (p, r, _) in enumerate(CONVERSATIONS * copies)
        ]
        rows = build_token_batch(completions, sim)
        with waits() as found:
            assign_advantages(rows, learner.args)
        counts.append(sum(found.values()))
    assert counts[0] == counts[1] <= 16


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_waits_once_for_sixteen_tokens(sim, tiny, temperature):
    """Each step reads what it chose, and transformers reads its attention mask once more."""
    model, _ = tiny("qwen3")
    model.to(sim)
    counts = []
    for length in (4, 12):
        options = Sampling(length, temperature, batch_size=32)
        with waits() as found:
            rows = sample(model, [[3, 4, 5 + n % 4] for n in range(32)], options, keys=[(n,) for n in range(32)])
        assert all(len(row.ids) == length for row in rows)
        counts.append(sum(found.values()))
    assert counts[1] - counts[0] <= 2 * 8  # eight steps more
    assert counts[1] <= 12 * 32 / 16, found
