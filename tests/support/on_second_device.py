"""Training on a device whose tensors do not mix with the CPU's, and how often the host waits for it."""

import json

import pytest
import second_device
import torch
from accelerate import PartialState
from one_policy import saved_verifier
from peft import LoraConfig, get_peft_model
from second_device import waits
from tiny_models import Plain, sample
from tiny_runs import assert_same_end, config_of, end_of

from maporl.config.recipes import recipe_files
from maporl.methods.tiny_versions import tiny_version
from maporl.runs import doctor
from maporl.runs.build import build_trainer
from maporl.runs.train import train
from maporl.team.loading import split
from maporl.training.run_record import trace_tokens
from maporl.training.trainer import MultiAgentPPOTrainer
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from maporl.verifier.model import Verifier
from trl_ext.learning.checkpoint import random_state, set_random_state
from trl_ext.learning.config import PPOv2Config
from trl_ext.learning.learner import Learner
from trl_ext.learning.metrics import peak_memory
from trl_ext.learning.policy import Policy
from trl_ext.ppo.advantages import assign_advantages
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.process.devices import process_device
from trl_ext.process.random_states import forked_rng
from trl_ext.sampling.request import Draw

pytestmark = pytest.mark.skipif(not second_device.AVAILABLE, reason="this torch takes no backend written in Python")
UPDATES = 2


@pytest.fixture
def sim():
    with second_device.second_device() as device:
        yield device


@pytest.fixture
def verifier(tiny, tmp_path):
    """``verifier(half=False)`` -> a folder with a random verifier, in bfloat16 if ``half``."""

    def build(half=False):
        _, tokenizer = tiny(alphabet="0123456789+=Answer:; ", context=256)
        return saved_verifier(tokenizer, tmp_path / f"verifier-{half}", dtype=torch.bfloat16 if half else torch.float32)

    return build


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
    "trajectories": ({"ppo": {"response_length": 3, "ratio": "trajectory", "entropy_coef": 0.01, "kl_in": "loss", "kl_estimator": "k3"}},
     {}),
}  # fmt: skip


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


def test_a_team_with_tools_trains_as_on_the_cpu(sim, tmp_path):
    sections = {
        "agent_defaults": {
            "tiny": TINY | {"alphabet": "0123456789+= :;?<>/acltuor", "context": 160}, "tools": ["calculator"], "call_format": "tags",
            "call_texts": {"intro": "", "line": "", "tags": "", "returned": "={text}", "failed": "?", "limit": ";"},
        },
        "tools": {"calculator": {"use": "calculator"}},
        "protocol": {"name": "debate", "turns": 1},
        "ppo": {"response_length": 36, "num_ppo_epochs": 1, "temperature": 1.0, "kl_in": "loss", "kl_estimator": "k3"},
        "advantage": GROUPS["advantage"] | {"unit": "turn"}, "branching": {"group": 2},
    }  # fmt: skip
    warm = {"warm_start": {"steps": 60, "batch_size": 32, "learning_rate": 1e-2, "calls": 1.0}}
    sizes = {"per_device_train_batch_size": 4, "learning_rate": 1e-4}
    run_of(tmp_path / "warm", True, sections | warm, sizes)  # both devices go on from the same weights
    tools = {key: value for key, value in sections["agent_defaults"].items() if key != "tiny"}
    sections |= {"agent_defaults": tools, "warm_start": {"steps": 0}}
    sections["agents"] = {name: {"model": str(tmp_path / "warm/final" / name)} for name in ("ann", "bob")}
    PartialState._reset_state()
    found = run_of(tmp_path / "sim", False, sections, sizes)
    second_device.leave()
    assert_near(found, run_of(tmp_path / "cpu", True, sections, sizes))
    assert found[2].count("</calculator>") > UPDATES


def test_a_resumed_run_ends_as_an_uninterrupted_one(sim, tmp_path, monkeypatch):
    def config(name):
        pool = {"schedule": {"opponent_pool": {"agent": "bob", "of": "ann"}}}
        return config_of(tmp_path / name, UPDATES, pool, use_cpu=False)

    class Stopped(Exception):
        """Ends a run after its first update."""

    finish = MultiAgentPPOTrainer.finish_update

    def stop(self, batch, clock=None):
        finish(self, batch, clock)
        raise Stopped

    train(config("whole"), resume=False, quiet=True)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(MultiAgentPPOTrainer, "finish_update", stop)
        train(config("parts"), resume=False, quiet=True)
    train(config("parts"), resume=True, quiet=True)
    assert_same_end(end_of(tmp_path / "whole", UPDATES), end_of(tmp_path / "parts", UPDATES))


def test_models_on_different_devices_train_as_on_one(sim, tmp_path, monkeypatch):
    """One base model is on the device, and the other is on the CPU, which stands for a second one."""
    shared = run_of(tmp_path / "shared", True, {}, {})
    PartialState._reset_state()
    monkeypatch.setattr("maporl.team.loading.accelerators", lambda: [sim, torch.device("cpu")])
    assert_near(run_of(tmp_path / "split", False, {}, {"placement": "split"}), shared)


def test_mixed_precision_trains_in_bfloat16(sim, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    weights, records, _ = run_of(tmp_path, False, {}, {"bf16": True})
    assert any(record.get(f"{name}/grad_norm", 0.0) > 0 for record in records for name in ("ann", "bob"))
    assert all(t.dtype == torch.float32 for name, part in weights.items() if "final" in name for t in part.values())


def test_a_verifier_in_the_process_is_on_the_device_of_the_run(sim, verifier, tmp_path, monkeypatch):
    devices = []
    score = Verifier.score
    monkeypatch.setattr(Verifier, "score", lambda self, chats: devices.append(self.model.device) or score(self, chats))
    sections = {"reward": {"sources": {"verifier": 1.0}, "verifier": {"model": verifier(True), "learn_every": 1}}}
    sections["warm_start"] = {"steps": 10, "batch_size": 8, "learning_rate": 1e-2}
    run_of(tmp_path / "sim", False, sections, {})
    assert set(devices) == {sim}
    PartialState._reset_state()
    devices.clear()
    run_of(tmp_path / "cpu", True, sections, {})
    assert set(devices) == {torch.device("cpu")}


def test_the_warm_start_trains_where_the_run_does(sim, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(
        "maporl.runs.build.warm_start", lambda team, *_: found.extend(p.model.device for p in team.policies.values())
    )
    for use_cpu in (False, True):
        build_trainer(config_of(tmp_path / str(use_cpu), use_cpu=use_cpu))
        PartialState._reset_state()
    assert found == [sim, sim, torch.device("cpu"), torch.device("cpu")]


# -- which device a process uses --------------------------------------------------------------------------------------


def test_a_model_that_no_trainer_places_is_on_the_device_of_the_process(sim):
    assert process_device() == sim
    PartialState(cpu=True)
    assert process_device() == torch.device("cpu")
    second_device.leave()
    assert process_device() == torch.device("cpu")


def test_placement_split_on_the_cpu_takes_no_accelerator(sim):
    assert split(["ann"], use_cpu=False) == [sim] and split(["ann"], use_cpu=True) == [torch.device("cpu")]


def test_a_forked_random_state_is_restored_on_every_device_without_a_warning(recwarn):
    with second_device.second_device(count=2):
        torch.manual_seed(7)
        before = random_state()
        with forked_rng():
            torch.manual_seed(8)
            torch.rand(3), torch.rand(3, device="sim"), second_device.generator(1).seed()
        after = random_state()
        assert sorted(before[0]) == ["sim.0", "sim.1", "torch"]
        assert all(before[0][name].equal(after[0][name]) for name in before[0])
        second_device.generator(1).seed()
        set_random_state(before)
        assert all(state.equal(before[0][name]) for name, state in random_state()[0].items())
    assert not recwarn.list


def test_the_peak_is_that_of_the_fullest_device(monkeypatch):
    class Module:
        def max_memory_allocated(self, device):
            return [1, 3][device.index] * 2**30

    real = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda d: Module() if d.type == "cuda" else real(d))
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert peak_memory(devices) == 3.0 and peak_memory([*devices, torch.device("cpu")]) == 3.0
    assert 0.01 < peak_memory([torch.device("cpu")]) < 1000.0


def test_the_doctor_names_every_accelerator():
    with second_device.second_device(count=2):
        assert [found.what for found in doctor._devices()][1:] == ["GPU 0", "GPU 1"]
    assert [found.what for found in doctor._devices()][1:] == ["GPU"]


def test_a_verifier_has_one_digest_in_either_precision(verifier):
    wide, narrow = (Verifier.load(verifier(), "cpu", dtype) for dtype in ("float32", "bfloat16"))
    assert wide.digest() == narrow.digest() == Verifier.load(verifier(True), "cpu").digest()
    with torch.no_grad():
        wide.model.score.weight[0, 0] += 0.1
    assert wide.digest() != narrow.digest()


# -- recipes ----------------------------------------------------------------------------------------------------------

QUICK = {"salt"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in recipe_files()]
)
def test_a_recipe_trains_on_the_device(sim, tmp_path, name):
    values = tiny_version(name, str(tmp_path / "run"))
    values["training"]["use_cpu"] = False
    values["warm_start"] = {"steps": 8, "batch_size": 8, "learning_rate": 1e-2}
    config = from_dict(values, name)
    check_run(config)
    train(config, resume=False, quiet=True)
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


# -- how often the host waits for the device ---------------------------------------------------------------------------

CONVERSATIONS = [([3, 4 + n], [5, 6 + n % 3, 7, 8][: 2 + n % 3], n // 2) for n in range(8)]


def learner_on(device, tiny, folder, critic="head", lora=False, half=False, **options):
    model, tokenizer = tiny("qwen3")
    if half:
        model.to(torch.bfloat16)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    defaults = {"output_dir": str(folder), "report_to": [], "temperature": 1.0, "kl_coef": 0.1}
    args = PPOv2Config(**{**defaults, "per_device_train_batch_size": 2, **options})
    learner = Learner(Policy("policy", model, tokenizer), args, critic=critic)
    learner.prepare(Plain(), updates=1, device=device)
    completions = [
        Completion(p, r, True, str(i), score=i % 3, trajectory=(t,)) for i, (p, r, t) in enumerate(CONVERSATIONS)
    ]
    return learner, build_token_batch(completions, device)


@pytest.mark.parametrize("options", [
    {}, {"critic": "model"}, {"critic": "none"}, {"half": True}, {"critic": "adapter", "lora": True}, {"kl_in": "loss", "kl_estimator": "k3"},
    {"ratio": "trajectory"}, {"entropy_coef": 0.01, "logits_chunk": 4}, {"aggregation": "sequence_mean"},
    {"objective": "reinforce", "engine_tis_cap": 2.0}, {"optim": "adamw_torch", "max_grad_norm": 0},
], ids=lambda options: " ".join(map(str, options)) or "default")  # fmt: skip
def test_an_update_waits_at_most_twice_for_a_micro_batch(sim, tiny, tmp_path, options):
    """Transformers waits once in each forward, to see whether positions are packed.

    The rest is for the whole minibatch.
    """
    learner, rows = learner_on(sim, tiny, tmp_path, **options)
    with waits() as before:
        learner.annotate(rows)
        assign_advantages(rows, learner.args, learner.critic.gives_values)
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


def test_traces_wait_twice_for_a_policy(sim, tmp_path, monkeypatch):
    counts = []

    def counted(batch, recorded, *others):
        assert len(recorded) > 1
        for some in (recorded[:1], recorded):
            with waits() as found:
                trace_tokens(batch, some, *others)
            counts.append(sum(found.values()))

    monkeypatch.setattr("maporl.training.run_record.trace_tokens", counted)
    run_of(tmp_path, False, {}, {})
    assert len(counts) == 2 * UPDATES and set(counts) == {2 * 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_waits_once_for_sixteen_tokens(sim, tiny, temperature):
    """Each step reads what it chose, and transformers reads its attention mask once more."""
    model, _ = tiny("qwen3")
    model.to(sim)
    counts = []
    for length in (4, 12):
        drawn = Draw(length, temperature)
        with waits() as found:
            rows = sample(
                model, [[3, 4, 5 + n % 4] for n in range(32)], drawn, [(n,) for n in range(32)], batch_size=32
            )
        assert all(len(row.ids) == length for row in rows)
        counts.append(sum(found.values()))
    assert counts[1] - counts[0] <= 2 * 8  # eight steps more
    assert counts[1] <= 12 * 32 / 16, found
