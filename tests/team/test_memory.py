"""The memory estimate of ``maporl check`` against the peak of a run."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from half_precision import learner_of, rows_of
from peft import LoraConfig, get_peft_model

from maporl.config.parse import to_yaml
from maporl.config.schema import AgentSection, LoraSection, TinySection
from maporl.errors import ConfigError
from maporl.run import ResolvedRun
from maporl.team import memory
from maporl.team.memory import LIBRARIES, estimate
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext import PPOv2Config
from trl_ext.learning.learner import Learner
from trl_ext.learning.learners import DoesNotFit, limit_microbatches
from trl_ext.learning.policy import Policy
from trl_ext.models.shape import PLANNED, Shape

MODEL = {"alphabet": "0123456789+=;", "hidden_size": 768, "layers": 6, "heads": 12, "context": 256}


def config_of(folder, **training):
    return from_dict(
        {
            "output_dir": str(folder), "task": {"name": "toy_sum", "largest": 9}, "agents": {"ann": {"tiny": MODEL}},
            "protocol": {"name": "debate", "turns": 1, "opening": "{question} " + "0123456789" * 10}, "updates": 2,
            "ppo": {"response_length": 16, "num_ppo_epochs": 1, "temperature": 1.0, "stop_token": "none"},
            "training": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_cpu": True, **training},
            "evaluation": {"questions": 0},
        }
    )  # fmt: skip


def model_of(monkeypatch, parameters, on_cpu=True, bytes=2, **changes):
    """The configuration of two agents, whose models have so many parameters of so many bytes."""
    shape = Shape(parameters, 2, hidden=8, intermediate=16, queries=8, keys=8, vocabulary=100, tied=True, bytes=bytes)
    monkeypatch.setattr(memory, "shape_of", lambda section: shape)
    monkeypatch.setattr(memory, "training_on_cpu", lambda config: on_cpu)  # True or False on every machine
    return from_dict({
        "output_dir": "unused", "task": {"name": "toy_sum"}, "evaluation": {"questions": 0},
        "agents": {"ann": {"model": "org/model"}, "bob": {"model": "org/model"}}, **changes,
    })  # fmt: skip


ONE = {"agents": {"ann": {"model": "org/model"}}}
OTHERS = [{"critic": "model"}, {"gradient_checkpointing": True}]


@pytest.mark.slow
@pytest.mark.parametrize("training", [{}, *OTHERS])
def test_the_estimate_is_within_a_quarter_of_the_peak(tmp_path, training):
    config = config_of(tmp_path / "run", **training)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    subprocess.run([sys.executable, "-m", "maporl", "train", str(file), "-q"], check=True, capture_output=True)
    peak = [json.loads(text)["memory/peak"] for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][-1]
    told = next(text for text in check_run(config_of(tmp_path / "other", **training)) if text.startswith("memory:"))
    about = float(told.split("about ")[1].split(" ")[0])
    print(f"{training}: estimated {about}, measured {peak:.2f} GiB; {told}")
    assert about == pytest.approx(peak, rel=0.25)


def test_half_precision_weights_have_float32_copies_moments_and_sums_of_gradients(monkeypatch):
    parts = estimate(ResolvedRun(model_of(monkeypatch, 1000, **ONE)), longest=10, dialogues=1)
    assert [parts["weights"], parts["references"]] == [2 * 1000, 2 * 1000]
    assert parts["optimizer"] == 1000 * (4 + 2 * 4)
    assert parts["gradients"] == 1000 * (4 + 2), "the sums, and one micro-batch's own"
    parts = estimate(ResolvedRun(model_of(monkeypatch, 1000, bytes=4, **ONE)), longest=10, dialogues=1)
    assert [parts["optimizer"], parts["gradients"]] == [1000 * 2 * 4, 1000 * 4]


def test_adapters_share_a_base_and_keep_float32_copies(monkeypatch):
    monkeypatch.setattr(memory, "adapter_parameters", lambda section: 1234)
    agent = {"model": "org/model", "lora": {"r": 4}}
    training = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    config = model_of(
        monkeypatch, 1000, agents={"ann": agent, "bob": agent}, training=training, ppo={"response_length": 5}
    )
    parts = estimate(ResolvedRun(config), longest=10, dialogues=1)
    adapter = 1234
    assert parts["weights"] == 2 * 1000 + 2 * 2 * adapter, "one base, two adapters"
    assert parts["references"] == 0, "the base without adapters"
    assert parts["optimizer"] == 2 * adapter * (4 + 2 * 4)
    assert parts["activations"] == 2 * 10 * 2 * 2 * (8 * 8 + 4 * 16), "one policy's at a time: two micro-batches"
    with_critic = {
        kind: estimate(ResolvedRun(replace(config, training=replace(config.training, critic=kind))), 10, 1)
        for kind in ("adapter", "model")
    }
    for kind, base in (("adapter", 0), ("model", 2 * 1000)):
        assert with_critic[kind]["activations"] == 2 * parts["activations"], "it reads again"
        assert with_critic[kind]["weights"] == parts["weights"] + 2 * (base + 2 * adapter), kind
        for what in ("gradients", "optimizer"):
            assert with_critic[kind][what] == 2 * parts[what], "it has an adapter of its own for each policy"
    assert LIBRARIES < 1e9


def test_adapters_are_counted_as_peft_builds_them(tmp_path):
    tiny = TinySection(alphabet="01:", hidden_size=64, layers=2, heads=2)
    whole, four = AgentSection(tiny=tiny, lora=LoraSection(r=4)), [4 * 2 * (64 + 64), 4 * 2 * 3 * (64 + 170)]
    assert memory.adapter_parameters(whole) == four[0] * 4 + four[1], "q, k, v, o, and gate, up, down"
    few = AgentSection(tiny=tiny, lora=LoraSection(r=4, target_modules=["q_proj", "v_proj"]))
    assert memory.adapter_parameters(few) == four[0] * 2
    model = build_tiny_model(tiny, build_tiny_tokenizer(tiny))
    get_peft_model(model, LoraConfig(r=12, target_modules=["q_proj"], inference_mode=True)).save_pretrained(tmp_path)
    saved = AgentSection(tiny=tiny, adapter=str(tmp_path))
    assert memory.adapter_parameters(saved) == 3 * four[0], "its own rank and layers"


# -- the device ---------------------------------------------------------------------------------------------------


def learners_of(tiny, folder, **options):
    """Two prepared learners that are said to be on one accelerator."""
    args = PPOv2Config(output_dir=str(folder), report_to=[], use_cpu=True, **options)
    learners = []
    for number in range(2):
        learner = Learner(Policy(f"policy {number}", *tiny(seed=number)), args)
        learner.prepare(Accelerator(cpu=True), 1)
        learner.device = torch.device("meta")
        learners.append(learner)
    return learners


def test_microbatches_are_chosen_from_the_free_memory_of_an_accelerator(tiny, tmp_path):
    learners = learners_of(tiny, tmp_path)
    model = learners[0].model
    trained = sum(p.numel() for p in model.parameters()) + 64 + 1
    layer = 4 * (8 * 64 + 4 * 170)
    each = 2 * (2 * layer + model.config.vocab_size * 2 * (4 + 4))  # two learners may keep a graph each
    to_come = 2 * trained * (4 + 2 * 4)
    for tokens in (1, 64, 100, 127, 128):
        limit_microbatches(learners, lambda device, tokens=tokens: to_come + int(tokens * each / PLANNED) + 8)
        assert [own.most_tokens for own in learners] == [2 ** int(math.log2(tokens))] * 2
    learners[0].optimizer.state["any"] = {}  # after the first step the moments are in memory
    limit_microbatches(learners, lambda device: to_come + int(127 * each / PLANNED))
    assert learners[0].most_tokens == 128, "and not 64"
    with pytest.raises(DoesNotFit, match=r"meta: 0.0 GiB are free, and gradients .* of 2 policies .*train LoRAs"):
        limit_microbatches(learners, lambda device: to_come // 4)


def test_microbatches_stay_as_they_are_set_and_on_cpus_and_on_devices_that_cannot_tell(tiny, tmp_path):
    told = learners_of(tiny, tmp_path, max_tokens_per_microbatch=77)
    limit_microbatches(told, lambda device: 1)
    silent = learners_of(tiny, tmp_path)
    limit_microbatches(silent, lambda device: None)
    here = learners_of(tiny, tmp_path)
    for learner in here:
        learner.device = torch.device("cpu")
    limit_microbatches(here, lambda device: 1)
    assert [own.most_tokens for own in (*told, *silent, *here)] == [77, 77, None, None, None, None]


def test_a_chosen_limit_cuts_micro_batches_and_changes_no_gradient(tiny, tmp_path):
    norms, sizes = [], []
    for tokens in (None, 16):
        learner = learner_of(torch.float32, "head", tmp_path)
        learner.most_tokens = tokens
        rows = rows_of(learner)
        sizes.append(len(learner.microbatches(rows)))
        learner.accumulate(rows, torch.arange(len(rows)))
        norms.append(learner.step())
    assert sizes[0] < sizes[1] and norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("size, changes, message", [
    (1e6, {}, None),
    (20_000, {}, r"set training.optim: adamw_bnb_8bit, or agents.NAME.lora, or use zero3.yaml or fsdp2.yaml"),
    (60_000, {"ppo": {"max_tokens_per_microbatch": 400}}, "set a smaller ppo.max_tokens_per_microbatch, or null, or use training.gradient_checkpointing: true"),
    (60_000, {"ppo": {"local_rollout_forward_batch_size": 64}, "training": {"per_device_train_batch_size": 64}}, "set a smaller ppo.local_rollout_forward_batch_size, or use ppo.max_tokens_per_generate"),
])  # fmt: skip
def test_check_knows_the_device_and_says_what_to_change(monkeypatch, size, changes, message):
    ppo = {"local_rollout_forward_batch_size": 4, **changes.get("ppo", {})}
    config = model_of(monkeypatch, 1000, False, ppo=ppo, training=changes.get("training", {}), **ONE)
    assert memory.device_lines(ResolvedRun(config), 20, 1, None) == [], "no accelerator"
    told, *warnings = memory.device_lines(ResolvedRun(config), 20, 1, int(size))
    rows = min(config.ppo.batch_rows, config.questions_per_update())
    assert memory.kv_cache(config, 20, 1) == rows * 20 * 2 * 2 * 8 * 2
    assert "GiB of KV cache" in told and ("chosen from the free memory" in told) is (
        "max_tokens_per_microbatch" not in changes.get("ppo", {})
    )
    assert "or takes up to a quarter of what is free" not in told
    unset = model_of(monkeypatch, 1000, False, training=changes.get("training", {}), **ONE)
    told = memory.device_lines(ResolvedRun(unset), 20, 1, int(size))[0]
    assert "of KV cache or takes up to a quarter of what is free, and" in told
    assert len(warnings) == (message is not None)
    if message is not None:
        assert message in warnings[0] and "the run needs about" in warnings[0]


def test_a_run_that_main_memory_does_not_hold_is_warned_of_with_numbers_and_a_setting(monkeypatch):
    config = model_of(monkeypatch, 10**9)
    assert memory.device_lines(ResolvedRun(config), 20, 1, 2**40) == []
    [line] = memory.device_lines(ResolvedRun(config), 20, 1, 16 * 2**30)
    assert line.startswith("warning: the run needs about ") and "main memory has 16.0: weights 3.7" in line
    assert "set training.optim: adamw_bnb_8bit, or agents.NAME.lora" in line and "more machines" in line
    long = model_of(monkeypatch, 1000)
    [line] = memory.device_lines(ResolvedRun(long), 10**6, 1, 2**30)
    assert line.endswith("set ppo.max_tokens_per_microbatch, or use training.gradient_checkpointing: true")


@pytest.mark.parametrize("on_cpu, where", [(True, "main memory"), (False, "the device")])
def test_weights_that_alone_do_not_fit_are_refused_unless_processes_share_them(monkeypatch, on_cpu, where):
    config = model_of(monkeypatch, 10**10, on_cpu, training={"use_cpu": on_cpu})
    with pytest.raises(ConfigError, match=rf"weights alone do not fit: .* and {where} has 16.0: .*; set "):
        memory.device_lines(ResolvedRun(config), 20, 1, 16 * 2**30)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "warning: the run needs" in memory.device_lines(ResolvedRun(config), 20, 1, 16 * 2**30)[-1]


def test_a_run_for_accelerators_can_be_checked_on_a_laptop(monkeypatch):
    config = model_of(monkeypatch, 10**10)
    [line] = memory.device_lines(ResolvedRun(config), 20, 1, 16 * 2**30)
    assert line.startswith("warning: the run needs about ")


def test_split_placement_has_the_memory_of_a_device_for_each_base(monkeypatch):
    config = model_of(monkeypatch, 10**9, False, training={"placement": "split"})
    [_, line] = memory.device_lines(ResolvedRun(config), 20, 1, 16 * 2**30)
    assert "the devices have 32.0" in line
    assert len(memory.device_lines(ResolvedRun(config), 20, 1, 64 * 2**30)) == 1


def test_check_compares_a_run_on_the_cpu_with_main_memory(monkeypatch):
    monkeypatch.setattr("trl_ext.process.devices.psutil.virtual_memory", lambda: SimpleNamespace(total=2**20))
    values = {
        "output_dir": "unused", "task": {"name": "toy_sum", "largest": 9}, "evaluation": {"questions": 0},
        "protocol": {"name": "debate", "turns": 1}, "ppo": {"response_length": 4},
        "agents": {"ann": {"tiny": {"hidden_size": 16, "layers": 1, "heads": 2}}}, "training": {"use_cpu": True},
    }  # fmt: skip
    assert any("main memory has 0.0" in line for line in check_run(from_dict(values)))
