"""Loops that train a reward model of joint answers, and policies by updates that it pays (MARLHF)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from scripted_training import played, recipe_values, rows, sampled, scripted_trainer

from maporl import Arithmetic
from maporl.errors import ConfigError, RunError
from maporl.loops.pairs import Comparisons
from maporl.loops.plan import stages_of
from maporl.loops.rows import Comparison
from maporl.loops.run import run_loop
from maporl.loops.section import PPOStage, RewardStage, SFTStage
from maporl.loops.shards import dialogues_of
from maporl.loops.verifiers import train_verifier, verifier_of
from maporl.rewards.base import FunctionSource
from maporl.storage.run_folder import RunFolder
from maporl.types import Dialogue, Example, Utterance, from_json
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from maporl.verifier.cotraining import pair_loss
from maporl.verifier.encoding import chat_of, joint_text
from maporl.verifier.model import last_outputs

TASK = Arithmetic(largest=3)


def joint(prompt, rollout, value, *texts):
    said = [
        Utterance(n, name, name, 0, 0, [], text, prompt_ids=[1], response_ids=[2 + n], rewards={"credit": value})
        for n, (name, text) in enumerate(zip(("ann", "bob"), texts, strict=True))
    ]
    return Dialogue(Example(str(prompt), "1+1=", "2"), said, prompt=prompt, rollout=rollout)


def test_comparisons_are_of_whole_dialogues():
    """Rewards .9 .2 .5 .2: (0,1) and (0,3) by .7, (0,2) by .4."""
    group = [joint(0, k, value, str(k), "2") for k, value in enumerate((0.9, 0.2, 0.5, 0.2))]
    found = Comparisons(per_question=3)(group)
    assert [(row.place, round(row.gap, 6)) for row in found] == [((0, 0, 1), 0.7), ((0, 0, 3), 0.7), ((0, 0, 2), 0.4)]
    assert (found[0].chosen, found[0].rejected) == ("ann: 0\n\nbob: 2", "ann: 1\n\nbob: 2")
    assert Comparisons()([joint(0, k, 1.0, "1", "2") for k in range(3)]) == []


def test_the_published_loss_and_advantages_of_marlhf(tmp_path):
    """Reward model 1.2 against .4: .3711. Its outputs 1.2 .4 .9 .1 as rewards of MAGRPO are .55 -.25 .25 -.55 from
    their mean, and divided by .4272 they are 1.2874 -.5852 .5852 -1.2874 (recipe marlhf)."""
    assert float(pair_loss(torch.tensor([1.2]), torch.tensor([0.4]))) == pytest.approx(0.3711, abs=1e-4)
    values = recipe_values("marlhf", tmp_path, branching={"group": 4}, training={"per_device_train_batch_size": 1})
    del values["loop"], values["reward"]["verifier"]
    trainer = scripted_trainer(values | {"updates": 1}, lambda request: str(request.rng_key[-2]))
    scores = [1.2, 0.4, 0.9, 0.1]
    trainer.player.scorer.sources["label"] = FunctionSource(
        lambda dialogues, task: [[scores[int(u.text)] for u in d.utterances] for d in dialogues]
    )
    batch = played(trainer)
    for agent in ("ann", "bob"):
        own = [row.advantage for row in sorted(rows(batch), key=lambda row: row.utterance.text) if row.policy == agent]
        assert own[:4] == pytest.approx([1.2874, -0.5852, 0.5852, -1.2874], abs=1e-4)


def test_answers_are_compared_with_those_of_a_comparator(tmp_path):
    """Through the recipe's own sampling and builder: joint answers worth 1 0 .5 0 against .5 1 0 .5. The comparator's 1
    comes first, then its two .5, and then its 0."""
    values = recipe_values("marlhf", tmp_path / "run", branching={"group": 8}) | {"evaluation": {"questions": 0}}
    values["task"] = {"name": "toy_sum", "largest": 3}
    values["loop"] |= {"questions": 2}
    right = {"ann": (0, 2, 4, 5), "bob": (0, 5, 7)}

    def script(request):
        return str(int(request.example.answer) + (request.rng_key[-2] not in right[request.ask.agent]))

    (_, builder), _ = stages_of(from_dict(values, "test"))
    found = builder(sampled(values, tmp_path, script))
    by_hand = Comparisons(select="comparator_reward").chosen([0.25, 1.0, 0.75, 0.5, 0.5, 1.0], "q")
    assert by_hand == [(5, 2), (1, 4), (3, 0)], "the comparator's 1, and of its two .5 the larger gap first"
    for prompt in (0, 1):
        own = [(row.place[1:], row.gap) for row in found if row.place[0] == prompt]
        assert own == [((5, 1), 1.0), ((0, 4), 0.5), ((7, 3), 0.5), ((2, 6), 0.5)]
    assert len(found) == 8


def tiny_values(tmp_path, **loop):
    values = recipe_values("marlhf", tmp_path / "run", branching={"group": 8})
    values["task"] = {"name": "toy_sum", "largest": 3}
    values |= {"warm_start": {"steps": 100, "batch_size": 16, "learning_rate": 5e-3}, "evaluation": {"questions": 3}}
    values["loop"] |= loop
    return values


@pytest.mark.slow
def test_a_reward_model_learns_from_joint_answers_and_pays_the_updates(tmp_path):
    """The recipe marlhf with tiny models: two rounds, whose parts are all there to look at."""
    lines = []
    figures = run_loop(from_dict(tiny_values(tmp_path), "test"), False, True, lines.append)
    assert len(figures) == 2 and not any("warning" in line for line in lines)
    parts = [f"run/round-{n}/train-{k}" for n in (1, 2) for k in (1, 2)]
    manifests = [json.loads((tmp_path / part / "manifest.json").read_text()) for part in parts]
    assert all(m["reward_model"]["rows"] > 0 and m["reward_model"]["loss"] > 0 for m in manifests[::2])
    assert all(m["ann"] == {"rows": 0} for m in manifests[::2])
    assert all(m["ann"]["dialogues"] == 16 for m in manifests[1::2])
    section = from_dict(tiny_values(tmp_path), "test").reward.verifier
    for n in (1, 2):
        verifier = verifier_of(section, tmp_path / f"run/round-{n}/train-1")
        lines = (tmp_path / f"run/round-{n}/train-2/run/dialogues.jsonl").read_text().splitlines()
        said = [from_json(line) for line in lines]
        outputs = verifier.outputs([chat_of(TASK.question(d.example), joint_text(d.utterances)) for d in said])
        assert [d.utterances[0].rewards["verifier"] for d in said] == pytest.approx(outputs, abs=1e-5)
        assert verifier.score([chat_of("1+1=", "2")])[0] != verifier.outputs([chat_of("1+1=", "2")])[0]

    def weights(part, name):
        return load_file(tmp_path / "run" / part / name / "model.safetensors")

    def same(one, other, name):
        return all(torch.equal(weights(one, name)[key], weights(other, name)[key]) for key in weights(one, name))

    assert same("initial", "round-1/train-1", "ann") and not same("initial", "round-1/train-2", "ann")
    assert same("round-1/train-1", "round-1/train-2", "others/verifier")
    assert not same("round-1/train-2", "round-2/train-1", "others/verifier")
    (_, builder), _ = stages_of(from_dict(tiny_values(tmp_path), "test"))
    drawn = [json.loads(line) for line in (tmp_path / "run/round-2/train-1/comparisons.jsonl").read_text().splitlines()]
    own = builder(dialogues_of(tmp_path / "run/round-2/sample"))
    assert len(drawn) == manifests[2]["reward_model"]["rows"] == len(own), "as many pairs as the round has"
    assert {row["round"] for row in drawn} == {1, 2}, "and some of them are of the first one"
    assert same("round-2/train-2", "final", "ann") and same("round-2/train-2", "final", "others/verifier")
    metrics = RunFolder(tmp_path / "run/round-1/train-2/run").read_metrics()
    assert len(metrics) == 2 and "reward/verifier" in metrics[0] and "reward/label" not in metrics[0]
    rounds = RunFolder(tmp_path / "run").read_metrics()
    assert {"reward_model/stage_1/loss", "reward_model/stage_1/pair_accuracy", "ann/stage_2/score"} <= rounds[0].keys()


def examples(count=24):
    return [
        Comparison(Example(str(n), f"{n % 4}+1=", ""), f"ann: {n % 3}2", f"ann: {n % 3}3", 1.0, (n, 0, 1))
        for n in range(count)
    ]


def test_the_reward_model_reads_where_it_is_trained(tmp_path):
    """TRL's loss of the first step is that of the verifier's own outputs, also where chats end with the token that
    pads."""
    config = from_dict(tiny_values(tmp_path), "test")
    stage = RewardStage(train="reward", build="comparisons", learning_rate=1e-12, batch_size=24)
    verifier = verifier_of(config.reward.verifier, None)
    verifier.tokenizer.pad_token = verifier.tokenizer.eos_token
    with torch.no_grad():
        verifier.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    pairs = [
        [
            verifier.tokenizer(f"{r.example.question}{text}<eos>", add_special_tokens=False)["input_ids"]
            for text in (r.chosen, r.rejected)
        ]
        for r in examples()
    ]
    expected = pair_loss(*(last_outputs(verifier.model, [pair[side] for pair in pairs]) for side in (0, 1)))
    found = train_verifier(config, stage, verifier, examples(), TASK, tmp_path / "scratch", quiet=True)
    assert found["loss"] == pytest.approx(float(expected), abs=1e-5) and found["rows"] == 24
    assert verifier.tokenizer.pad_token == verifier.tokenizer.eos_token and found["mean_gap"] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verifier": None}, r"loop\.stages\.0: train: reward trains reward\.verifier, and it names no model"),
        ({"verifier": {"model": "m"}}, r"reward\.verifier\.reads is answer; set reads: dialogue"),
        (
            {"verifier": {"model": "m", "pays": "output", "learn_every": 1}},
            "pays: only a verifier in this process that does not learn",
        ),
    ],
)
def test_a_stage_without_a_reward_model_is_refused(change, message, tmp_path):
    values = tiny_values(tmp_path)
    values["reward"] |= change
    with pytest.raises(ConfigError, match=message):
        stages_of(from_dict(values, "test"))


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"train": "ppo", "updates": 1, "build": "gap"}, "build: train: ppo does not read it"),
        ({"train": "sft", "build": "threshold", "updates": 3}, "updates: train: sft does not read it"),
        ({"train": "reward", "build": "comparisons", "roles": ["ann"]}, "roles: train: reward does not read it"),
    ],
)
def test_what_a_stage_does_not_read_is_refused(stage, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        from_dict(tiny_values(tmp_path, stages=[stage]), "test")


def test_keys_that_a_stage_does_not_read_may_have_their_defaults(tmp_path):
    """The files of runs have had all keys of all stages."""
    unread = {"beta": None, "joint": False, "likelihood": 0.0, "updates": None, "mean_over": "turn"}
    stages = [
        {"train": "sft", "build": "threshold", **unread},
        {"train": "ppo", "updates": 2, "build": None, "roles": [], "epochs": 1},
    ]
    one, two = from_dict(tiny_values(tmp_path, stages=stages), "test").loop.stages
    assert (one, two) == (SFTStage(train="sft", build="threshold"), PPOStage(train="ppo", updates=2))


def test_answers_that_are_all_right_or_all_wrong_train_no_reward_model(tmp_path):
    values = tiny_values(tmp_path, rounds=1, questions=2)
    values["warm_start"] = {"steps": 1}
    values["reward"]["sources"] = {"label": 0.0}
    with pytest.raises(RunError, match=r"round 1, stage 1 \(reward on comparisons\): .* no rows were made"):
        run_loop(from_dict(values, "test"), False, True, lambda line: None)


def test_a_check_says_what_a_round_trains(tmp_path):
    lines = check_run(from_dict(tiny_values(tmp_path), "test"))
    assert any("then reward on comparisons, then 2 updates of ppo" in line for line in lines)
    assert not any("PPO reads it, and a loop does not" in line for line in lines)


@pytest.mark.slow
def test_a_loop_that_is_stopped_after_its_reward_model_ends_as_one_that_is_not(tmp_path):
    whole = tiny_values(tmp_path / "whole")
    run_loop(from_dict(whole, "test"), False, True, lambda line: None)
    parts = whole | {"output_dir": str(tmp_path / "parts/run")}
    run_loop(from_dict(parts, "test"), False, True, lambda line: None)
    for later in ("round-2/train-2", "round-2/evaluate", "final"):
        shutil.rmtree(tmp_path / "parts/run" / later)
    run_loop(from_dict(parts, "test"), True, True, lambda line: None)
    for name in ("ann", "bob", "others/verifier"):
        files = [tmp_path / side / "run/final" / name / "model.safetensors" for side in ("whole", "parts")]
        one, other = map(load_file, files)
        assert all(torch.equal(one[key], other[key]) for key in one), name
