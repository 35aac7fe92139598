"""``maporl plan``: two worked examples, and sizes that are those of real models."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.config.schema import AgentSection
from maporl.errors import ConfigError
from maporl.planning.devices import DEVICES, Cluster, read_cluster
from maporl.planning.estimates import (
    Model,
    Work,
    engine_rows,
    learner_bytes,
    rollout_seconds,
    state_bytes,
    step_seconds,
    update_flops,
    update_seconds,
)
from maporl.planning.groups import groups_of, model_of
from maporl.planning.placements import Group, placements
from maporl.planning.report import recommended
from maporl.validation.load import from_dict

QWEN = Model(1_543_714_304, 28, 1536, 8960, 1536, 256, 151_936, True)
"""Qwen2.5-1.5B."""
LARGE = Model(8_190_735_360, 36, 4096, 12_288, 4096, 1024, 151_936, False)
"""Qwen3-8B."""
SHORT = Work(1024, 2, 200, 612, 512, 1024)
LONG = Work(512, 2, 300, 2148, 1024, 2048)
ONE, TWO = Cluster(1, 8, "H200", DEVICES["H200"]), Cluster(2, 8, "H100", DEVICES["H100"])


def by_sharing(found):
    return {one.sharing: one for one in found}


def test_two_models_of_1_5_billion_on_eight_h200():
    assert QWEN.cache == 28_672 and 16 * QWEN.parameters == pytest.approx(24.7e9, rel=0.001)
    assert SHORT.read == pytest.approx(1.88e6, rel=0.001) and SHORT.sampled == 1_048_576
    assert update_flops(QWEN, SHORT) == pytest.approx(3.4e16, rel=0.01)
    seconds = [update_seconds(QWEN, SHORT, ONE.device, ranks)[0] for ranks in (3, 4, 8)]
    assert seconds == pytest.approx([28.9, 21.7, 10.8], abs=0.05)
    assert update_seconds(QWEN, SHORT, ONE.device, 4)[1] == pytest.approx(1.5, abs=0.05)
    assert learner_bytes(QWEN, SHORT, 4) == pytest.approx(23e9, rel=0.02)
    assert learner_bytes(QWEN, SHORT, 3) == pytest.approx(26e9, rel=0.03)
    rows = engine_rows(QWEN, SHORT, ONE.device, state_bytes(QWEN, SHORT, 4))
    assert rows == 256 and step_seconds(QWEN, rows, SHORT.context, ONE.device) == pytest.approx(0.0064, abs=5e-5)
    assert sum(rollout_seconds(QWEN, SHORT, ONE.device, 4, rows)) == pytest.approx(9.9, abs=0.05)
    found = placements([Group(name, QWEN, SHORT) for name in ("ann", "bob")], ONE)
    assert {one.sharing: one.period for one in found} == pytest.approx(
        {"sleep": 31.8, "turns": 32.0, "apart": 31.5}, abs=0.1
    )
    best = recommended(found)
    assert best.sharing == "sleep" and [share.learner for share in best.shares] == [4, 4]
    assert best.bottleneck == "learning (68% of an update)"
    assert [share.learner for share in by_sharing(found)["apart"].shares] == [3, 3]


def test_long_tails_are_what_sampling_ahead_saves():
    work = Work(256, 2, 200, 2148, 2048, 16_384)
    found = by_sharing(placements([Group(name, QWEN, work) for name in ("ann", "bob")], ONE))
    sleep = found["sleep"]
    assert sleep.shares[0].tail == pytest.approx(57, abs=0.5) and sleep.shares[0].tail > 0.6 * sleep.period
    slowest = found["apart"].shares[0].slowest
    assert slowest == pytest.approx(130, abs=1) and found["apart"].period >= slowest / 2


def test_three_models_of_eight_billion_on_sixteen_h100():
    assert LARGE.cache == 147_456 and 16 * LARGE.parameters == pytest.approx(131e9, rel=0.001)
    assert LONG.read == pytest.approx(2.30e6, rel=0.001) and update_flops(LARGE, LONG) == pytest.approx(
        2.2e17, rel=0.01
    )
    seconds = [update_seconds(LARGE, LONG, TWO.device, ranks)[0] for ranks in (4, 5, 8, 16)]
    assert seconds == pytest.approx([138, 110, 69, 34.4], abs=0.5)
    arithmetic, moving = update_seconds(LARGE, LONG, TWO.device, 16, spans=True)
    assert moving == pytest.approx(27.6, abs=0.1) and moving < arithmetic
    slower = replace(TWO.device, network=39e9)  # 312 Gbit/s
    assert update_seconds(LARGE, LONG, slower, 16, spans=True)[1] > arithmetic
    states = {
        0: 0.0,
        4: state_bytes(LARGE, LONG, 4),
        5: state_bytes(LARGE, LONG, 5),
        16: 3 * state_bytes(LARGE, LONG, 16),
    }
    rows = {ranks: engine_rows(LARGE, LONG, TWO.device, own) for ranks, own in states.items()}
    assert rows == {0: 79, 4: 24, 5: 35, 16: 38}
    rollouts = {
        ranks: sum(rollout_seconds(LARGE, LONG, TWO.device, replicas, rows[ranks]))
        for ranks, replicas in ((0, 1), (4, 4), (5, 5), (16, 5))
    }
    assert rollouts == pytest.approx({0: 362, 4: 179, 5: 116, 16: 111}, abs=0.6)
    found = by_sharing(placements([Group(name, LARGE, LONG) for name in "abc"], TWO))
    turns = found["turns"]
    assert turns.period == pytest.approx(218, abs=1) and turns.bottleneck == "sampling (51% of an update)"
    assert turns.shares[0].memory == pytest.approx(56e9, rel=0.01) and turns.shares[0].spans
    assert found["sleep"].period == pytest.approx(229, abs=2) and any(share.spans for share in found["sleep"].shares)
    assert recommended(list(found.values())) is turns, "sampling ahead takes 184 s, which is more than three quarters"
    alone = by_sharing(placements([Group(name, LARGE, LONG) for name in "abc"], replace(TWO, machines=1)))
    assert alone["turns"].refused == "the learner of a needs 83 GB of 80 on each device"
    assert recommended(list(alone.values())) is None


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_equal_policies_take_equal_shares(spread):
    """More work for one policy gives it as many devices or more, whatever the kind of sharing."""
    groups = [Group("a", QWEN, SHORT), Group("b", QWEN, replace(SHORT, conversations=int(1024 * (1 + spread))))]
    for one in placements(groups, ONE):
        a, b = one.shares
        assert b.learner >= a.learner and b.engines >= a.engines
        assert one.period >= max(max(s.update, s.rollout - s.tail) for s in one.shares)


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_parameters_and_cache_are_those_of_the_model(kind, tmp_path):
    config = kind(
        vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=kind is LlamaConfig,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    sizes = model_of(AgentSection(model=str(tmp_path)))
    assert sizes.parameters == sum(p.numel() for p in model.parameters()) and sizes.queries == 64
    cache = DynamicCache()
    model(torch.arange(10)[None], past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert sizes.cache * 10 == held


def values_of(folder, **changes):
    LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    ).save_pretrained(folder / "model")
    return {
        "output_dir": str(folder / "run"),
        "agents": {name: {"model": str(folder / "model")} for name in ("ann", "bob", "eve")},
        "task": {"name": "toy_sum"},
        "protocol": {"name": "debate", "turns": 2},
        "ppo": {"response_length": 64, "kl_coef": 0.05},
    } | changes


def test_groups_have_the_work_that_the_configuration_makes(tmp_path):
    agents = values_of(tmp_path)["agents"]
    agents["ann"] |= {"policy": "both"}
    agents["bob"] |= {"policy": "both"}
    agents["eve"] |= {"trainable": False}
    values = values_of(tmp_path, agents=agents, branching={"group": 4})
    (group,) = groups_of(from_dict(values, "test"), question=20)
    questions = from_dict(values, "test").questions_per_update()
    assert group.name == "both"
    assert group.work == Work(questions * 4 * 2, 2, 20, 2 * 32 + 100, 32, 64, 4, True)
    (group,) = groups_of(from_dict(values, "test"), dialogues=10, answer=9, heard=0)
    assert group.work == Work(20, 2, 200, 0, 9, 64, 4, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": {"r": 4}}, "agents.ann trains an adapter"),
        ({"model": None, "tiny": {}}, "tiny models need no cluster"),
    ],
)
def test_what_is_not_planned_for_is_refused(changes, message, tmp_path):
    values = values_of(tmp_path)
    values["agents"] = {"ann": {**values["agents"]["ann"], **changes}}
    with pytest.raises(ConfigError, match=message):
        groups_of(from_dict(values, "test"))


def test_only_agents_that_play_are_planned_for(tmp_path):
    values = values_of(tmp_path, protocol={"name": "debate", "turns": 2, "agents": ["ann"]})
    (group,) = groups_of(from_dict(values, "test"))
    assert group.name == "ann"


def test_clusters_are_read_and_others_are_refused(tmp_path):
    assert read_cluster("2x8xH100") == TWO and read_cluster("8xH200") == ONE
    file = tmp_path / "devices.yaml"
    file.write_text("MI300X: {flops: 1.3e+15, bandwidth: 5.3e+12, memory: 1.92e+11, link: 4.5e+11, network: 5.0e+10}")
    assert read_cluster("1x8xMI300X", file).device.memory == 192e9
    for text in ("8", "0x8xH100", "x8xH100", "2x8x"):
        with pytest.raises(ConfigError, match="--cluster: expected MACHINESxDEVICESxNAME"):
            read_cluster(text)
    with pytest.raises(ConfigError, match="unknown device 'H1000'; known: A100, H100"):
        read_cluster("8xH1000")
    file.write_text("MI300X: {flops: -1, bandwidth: 1, memory: 1, link: 1, network: 1}")
    with pytest.raises(ConfigError, match="flops: expected a number above 0"):
        read_cluster("8xMI300X", file)
    file.write_text("- 3")
    with pytest.raises(ConfigError, match="expected devices by name"):
        read_cluster("8xMI300X", file)


def test_the_command_prints_a_plan_or_json(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps(values_of(tmp_path)))
    command = ["plan", str(file), "--cluster", "8xH200", "--dialogues", "64"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0 and "(recommended)" in printed.output
    assert "No run on a GPU has confirmed these numbers" in printed.output
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert {group["name"] for group in found["groups"]} == {"ann", "bob", "eve"}
    assert found["recommended"] in {one["sharing"] for one in found["placements"]}
    assert CliRunner().invoke(app, ["plan", str(file), "--cluster", "8"]).exit_code == 2
