"""Outer loops: the published builders' worked numbers, training on the ids that were sampled, and loops that are
killed."""

import json
import math
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch
from fast_cases import some
from folders import SUPPORT
from safetensors.torch import load_file
from scripted_training import recipe_values
from tiny_runs import config_of

from maporl.config.imports import named_imports
from maporl.config.parse import to_yaml
from maporl.errors import ConfigError, RunError
from maporl.loops import stages
from maporl.loops.pairs import Gap, Siblings
from maporl.loops.plan import stages_of
from maporl.loops.replay import drawn, redrawn, shares
from maporl.loops.rows import Pair, Row, described, of_round
from maporl.loops.section import DPOStage, KTOStage, SFTStage
from maporl.loops.shards import stage_rows
from maporl.loops.singles import BestOf, Signs, Threshold, selected
from maporl.loops.stages import completion_logprobs, dpo_rows, kto_rows, sft_rows, train_jointly, train_stage
from maporl.report.charts import charts
from maporl.report.metric_panels import METRICS
from maporl.report.read import read_run
from maporl.rewards.rules import build_rules
from maporl.run import ResolvedRun
from maporl.runs import loop as loops
from maporl.runs.train import train
from maporl.storage.run_folder import RunExists, has_final
from maporl.team.team import Team
from maporl.types import Dialogue, Example, Stop, Utterance, from_json, to_json
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.files.manifest import CheckpointError
from trl_ext.sharding.master_weights import MasterAdamW


def malt_tree():
    """Leaves [[1,1],[1,0]], [[0,1],[0,0]] under two generators with two verifiers each, credited by tree_mean
    (malt)."""
    right = (1, 1, 1, 0, 0, 1, 0, 0)
    dialogues = []
    for leaf in range(8):
        names, said = [f"g{leaf // 4}", f"v{leaf // 2}", f"r{leaf}"], []
        for order, role in enumerate(("generator", "verifier", "refiner")):
            u = Utterance(order, role, role, 0, order, [], "", role=role, sample=names[order])
            u.prompt_ids = [1, *(ord(c) for name in names[:order] for c in name)]
            u.response_ids = [leaf // (4, 2, 1)[order] + 5, 2]
            said.append(u)
        dialogues.append(Dialogue(Example("e", "q", "a"), said, rollout=leaf))
    (rule,) = build_rules(["tree_mean"])
    for dialogue, credits in zip(dialogues, rule(dialogues, [{2: float(r)} for r in right]), strict=True):
        for u in dialogue.utterances:
            u.rewards["credit"] = credits[u.id]
    return dialogues


def by_role(rows):
    roles = [row.chosen.role if isinstance(row, Pair) else row.role for row in rows]
    return {role: roles.count(role) for role in roles}


def test_malt_values_are_propagated_and_its_rows_and_pairs_counted():
    tree = malt_tree()
    values = {u.sample: u.rewards["credit"] for d in tree for u in d.utterances}
    assert [values[name] for name in ("g0", "g1", "v0", "v1", "v2", "v3")] == [0.75, 0.25, 1, 0.5, 0.5, 0]
    assert by_role(Threshold()(tree)) == {"generator": 1, "verifier": 1, "refiner": 4}
    pairs = Siblings()(tree, ("verifier", "refiner"))
    assert by_role(pairs) == {"verifier": 1, "refiner": 2}
    assert all(p.chosen.prompt_ids == p.rejected.prompt_ids for p in pairs)
    assert [(p.chosen.value, p.rejected.value) for p in pairs] == [(1, 0.5), (1, 0), (1, 0)]
    assert by_role(Siblings()(tree)) == {"generator": 1, "verifier": 1, "refiner": 2}
    assert by_role(Threshold(0.8)(tree)) == {"verifier": 1, "refiner": 4} and len(Siblings(1.0)(tree)) == 0
    assert Threshold()(tree) == Threshold()(malt_tree())


def test_equal_completions_make_no_pair_and_other_prompts_are_an_error():
    tree = malt_tree()
    for u in (u for d in tree for u in d.utterances if u.sample in ("r2", "r3")):
        u.response_ids = [9, 2]
    assert by_role(Siblings()(tree, ("refiner",))) == {"refiner": 1}
    tree[5].utterances[2].prompt_ids = [3]
    with pytest.raises(RunError, match="shown different tokens"):
        Siblings()(tree)


def test_what_may_not_be_trained_and_what_has_no_ids_makes_no_row():
    tree = malt_tree()
    for d in tree:
        d.utterances[0].trainable, d.utterances[1].response_ids = False, []
    assert by_role(Threshold()(tree)) == {"refiner": 4}


REWARDS = [0.95, 0.91, 0.83, 0.80, 0.78, 0.66, 0.62, 0.55, 0.48, 0.41]


def test_a_selection_takes_the_share_first_and_the_threshold_after_it():
    """Best-of-10 rewards, share .7 or .8 without the best tenth, threshold .6 (recipe optima)."""
    assert [REWARDS[i] for i in selected(REWARDS, 0.7, at_least=0.6)] == REWARDS[:7]
    assert [REWARDS[i] for i in selected(REWARDS, 0.8, 0.1, 0.6)] == [0.91, 0.83, 0.80, 0.78, 0.66, 0.62]


def test_best_of_takes_the_best_dialogue_of_each_question():
    def said(prompt, rollout, value):
        ids = {"prompt_ids": [1], "response_ids": [prompt, rollout]}
        u = Utterance(0, "a", "a", 0, 0, [], "", rewards={"credit": value}, **ids)
        return Dialogue(Example(str(prompt), "q", "a"), [u], prompt=prompt, rollout=rollout)

    played = [said(p, r, value - 0.3 * (r != 1)) for p, value in enumerate(REWARDS) for r in range(3)]
    rows = BestOf(keep=0.8, skip=0.1, at_least=0.6)(played)
    assert [row.place for row in rows] == [(p, 1, 0) for p in range(1, 7)]


def test_a_manifest_describes_rows_and_pairs():
    good = Row("a", "a", "a", "q", [1], [5, 2], 1.0, (0, 0, 0))
    bad = replace(good, completion_ids=[5, 6, 7, 8], value=0.25, cut=True)
    about = described([Pair(good, bad), Pair(good, replace(bad, value=0.5))])
    assert about["rows"] == 2 and about["mean_gap"] == 0.625 and len(about["sha256"]) == 64
    assert about["chosen_mean_tokens"] == 2 and about["rejected_mean_tokens"] == 4
    assert about["chosen_share_cut_off"] == 0 and about["rejected_share_cut_off"] == 1
    assert described([good, bad])["mean_tokens"] == 3 and described([good, bad])["share_cut_off"] == 0.5
    assert described([])["rows"] == 0


# -- training by TRL ---------------------------------------------------------------------------------------------------

STAGES = [
    {"train": "sft", "build": "threshold", "learning_rate": 1e-3},
    {"train": "dpo", "build": "siblings", "learning_rate": 1e-3, "beta": 0.2},
]
LORA = {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}


def looped(folder, trained=None, rounds=1, questions=12, **sections):
    sections = {
        "branching": {"how": "fork_every", "group": 2},
        "task": {"name": "toy_sum", "largest": 3},
        "reward": {"rules": ["tree_mean"]},
        "warm_start": {"steps": 150, "learning_rate": 1e-2},
        "evaluation": {"questions": 8},
        "loop": {"rounds": rounds, "questions": questions, "stages": STAGES if trained is None else trained},
        **sections,
    }
    return config_of(folder, sections=sections)


def team_of(tmp_path, **sections):
    torch.manual_seed(0)
    return looped(tmp_path / "run", **sections), Team.from_config(looped(tmp_path / "run", **sections))


def rows_of(policy, count=6):
    """Pairs whose ids no text encodes to: digits in pieces that the template would not write, one of them cut off."""
    said = [[5 + n % 3, 7, 2] if n % 2 else [6, 5 + n % 3, 8] for n in range(2 * count)]
    rows = [
        Row(policy, policy, policy, str(n), [1, 9, 9, 4], ids, float(n % 2), (n, 0, 0), n % 2 == 0)
        for n, ids in enumerate(said)
    ]
    return [Pair(rows[n + 1], replace(rows[n], prompt_ids=rows[n + 1].prompt_ids)) for n in range(0, 2 * count, 2)]


@pytest.mark.parametrize("kind", some(["sft", "dpo"], 0))
def test_the_ids_that_reach_the_model_are_those_that_were_sampled(kind, tmp_path):
    """The chat template would not write the prompt [1, 9, 9, 4], and half of the completions have no EOS."""
    config, team = team_of(tmp_path)
    policy, seen = team.policies["ann"], []
    # no assistant message, so that nothing encoded by it could hold what was sampled
    policy.tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"

    def watched(layer, given):
        if policy.model.training:
            seen.extend(tuple(i for i in row if i != policy.tokenizer.pad_token_id) for row in given[0].tolist())

    policy.model.get_input_embeddings().register_forward_pre_hook(watched)
    pairs = rows_of("ann")
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    stage = {"sft": SFTStage, "dpo": DPOStage}[kind](train=kind, build="x", learning_rate=1e-3, batch_size=4)
    train_stage(config, stage, policy, pairs if kind == "dpo" else rows, tmp_path / "scratch", quiet=True)
    assert sorted(seen) == sorted((*row.prompt_ids, *row.completion_ids) for row in rows)


def test_columns_hold_the_ids_and_only_completions_bear_loss():
    (pair, *_) = rows_of("ann", 1)
    assert sft_rows([pair.chosen]) == [{"input_ids": [1, 9, 9, 4, 6, 7, 2], "completion_mask": [0, 0, 0, 0, 1, 1, 1]}]
    assert dpo_rows([pair], [-1.0], [-2.0]) == [
        {"prompt_ids": [1, 9, 9, 4], "chosen_ids": [6, 7, 2], "rejected_ids": [6, 5, 8], "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}
    ]  # fmt: skip


@pytest.mark.parametrize("agents", some([{}, LORA], 1))
def test_dpo_starts_at_log_2_against_the_weights_of_the_stage_and_prefers_what_was_chosen(agents, tmp_path):
    """With the reference's columns the first loss is log 2, for full weights and for adapters that share a base."""
    config, team = team_of(tmp_path, agents={"ann": agents, "bob": agents})
    pairs, policy = rows_of("ann"), team.policies["ann"]
    still = DPOStage(train="dpo", build="x", learning_rate=1e-12, batch_size=12, beta=0.2)
    assert train_stage(config, still, policy, pairs, tmp_path, True)["loss"] == pytest.approx(math.log(2), abs=1e-5)
    other = {name: p.detach().clone() for name, p in team.policies["bob"].model.named_parameters() if "bob" in name}
    done = train_stage(config, replace(still, learning_rate=1e-2, epochs=5.0), policy, pairs, tmp_path, True)
    gap = done["chosen_after"] - done["rejected_after"]
    assert gap > done["chosen_before"] - done["rejected_before"] and done["loss"] < math.log(2)
    for name, before in other.items():
        assert dict(team.policies["bob"].model.named_parameters())[name].equal(before)


@pytest.mark.parametrize("names", [pytest.param(("default", "ref"), marks=pytest.mark.slow), ("ref", "default")])
def test_each_stage_trains_one_of_two_adapters_of_a_base_whatever_they_are_called(names, tmp_path):
    """TRL's trainers look for an adapter called default, and copy it to one called ref."""
    config, own = team_of(tmp_path, agents={"ann": {}, "bob": {}})
    base = own.policies["ann"]
    policy = Team.on_one_base(base.model, base.tokenizer, names).policies[names[0]]
    pairs = rows_of(policy.name)
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    signed = [replace(row, good=bool(n % 2)) for n, row in enumerate(rows)]
    kinds = {"sft": (SFTStage, rows), "dpo": (DPOStage, pairs), "kto": (KTOStage, signed)}
    for how, (kind, data) in kinds.items():
        stage = kind(train=how, build="x", learning_rate=1e-2, batch_size=4)
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        train_stage(config, stage, policy, data, tmp_path, True)
        moved = {name for name, p in policy.model.named_parameters() if not before[name].equal(p)}
        assert moved == {name for name in before if f".{policy.name}." in name}, how
        assert list(policy.model.peft_config) == [*names]


@pytest.mark.parametrize(
    ("beta", "chosen", "rejected", "expected"), [(0.2, 0.3, -0.4, 0.6256), (0.1, 0.5, -0.5, 0.6444)]
)
def test_the_published_dpo_losses_of_malt_and_agent_rlvr(beta, chosen, rejected, expected, tmp_path, monkeypatch):
    """Of two log-ratios to the reference, whose columns are what says so."""
    config, team = team_of(tmp_path)
    shifts = iter([-chosen, -rejected, 0.0, 0.0])
    monkeypatch.setattr(
        stages, "completion_logprobs", lambda *given: [x + next(shifts) for x in completion_logprobs(*given)]
    )
    stage = DPOStage(train="dpo", build="x", learning_rate=1e-12, beta=beta)
    loss = train_stage(config, stage, team.policies["ann"], rows_of("ann", 1), tmp_path, True)["loss"]
    assert loss == pytest.approx(expected, abs=1e-4)


# -- joint answers (MADPO) ---------------------------------------------------------------------------------------------


def joint_answers(rewards=(0.9, 0.2, 0.5, 0.2), prompt=0):
    """Dialogues in which ann and bob answer once. Both earn the reward."""
    return [
        Dialogue(
            Example(str(prompt), "q", "a"),
            [
                Utterance(n, agent, agent, 0, n, [], "", prompt_ids=[n], response_ids=[5 + k, 2], rewards={"credit": r})
                for n, agent in enumerate(("ann", "bob"))
            ],
            prompt=prompt,
            rollout=k,
        )
        for k, r in enumerate(rewards)
    ]


def test_madpo_pairs_joint_answers_by_their_gap():
    """Rewards .9 .2 .5 .2: pairs by gap .7 (0,1), .7 (0,3), .4 (0,2), .3 (2,1), .3 (2,3) (recipes madpo, marlhf)."""
    pairs = Gap(per_question=3)(joint_answers())
    assert [(p.policy, p.chosen.place[1], p.rejected.place[1]) for p in pairs] == [
        (agent, *pair) for pair in ((0, 1), (0, 3), (0, 2)) for agent in ("ann", "bob")
    ]
    everything = Gap(per_question=None)(joint_answers(), ("ann",))
    assert [(p.chosen.place[1], p.rejected.place[1]) for p in everything] == [(0, 1), (0, 3), (0, 2), (2, 1), (2, 3)]
    assert [round(p.chosen.value - p.rejected.value, 6) for p in everything] == [0.7, 0.7, 0.4, 0.3, 0.3]
    chance = Gap(select="random", per_question=None)(joint_answers(), ("ann",))
    assert chance != everything and sorted(map(str, chance)) == sorted(map(str, everything))
    assert chance == Gap(select="random", per_question=None)(joint_answers(), ("ann",))
    both = Gap(per_question=1)([*joint_answers(), *joint_answers((0.1, 0.4), prompt=1)], ("bob",))
    assert [p.together for p in both] == [(1, 0, 0, 1), (1, 1, 1, 0)]
    assert Gap()(joint_answers((1.0, 1.0, 1.0))) == []


def test_gap_compares_single_answers_and_drops_equal_ones():
    twice = joint_answers((1.0, 0.0))
    twice[0].utterances.append(replace(twice[0].utterances[0], id=2, order=2))
    with pytest.raises(RunError, match="ann spoke more than once in a dialogue"):
        Gap()(twice)
    equal = joint_answers((1.0, 0.0))
    equal[1].utterances[0].response_ids = [5, 2]
    assert [p.policy for p in Gap()(equal)] == ["bob"]


def with_delta(policy, delta, prompt, good, bad):
    """Let the log-ratio of two tokens after ``prompt`` be ``delta``, by the policy's head. Return the hidden state."""
    head, seen = policy.model.get_output_embeddings(), []
    hook = head.register_forward_pre_hook(lambda module, given: seen.append(given[0][0, -1].detach()))
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt])).logits[0, -1]
        head.weight[good] += seen[0] / seen[0].dot(seen[0]) * (delta - logits[good] + logits[bad])
    hook.remove()
    return seen[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "loss", "factor"), [pytest.param(-0.3, 0.6685, 0.0488, marks=pytest.mark.slow), (2.0, 0.5629, 0.0430)]
)
def test_madpo_adds_what_the_other_agent_prefers(others, loss, factor, tmp_path):
    """Own delta .8: others -.3 -> loss .6685, factor .0488; others +2 -> .5629, .0430. No reference, beta .1."""
    untied = {"tiny": {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1}}
    config, team = team_of(tmp_path, agent_defaults=untied)
    ann, bob = team.policies["ann"], team.policies["bob"]
    prompt, good, bad = [1, 9, 9, 4], 6, 7
    hidden = with_delta(ann, 0.8, prompt, good, bad)
    with_delta(bob, others, prompt, good, bad)
    rows = {
        name: [Row(name, name, name, "q", prompt, [token], value, (0, k, 0)) for k, (token, value) in enumerate(((good, 1.0), (bad, 0.0)))]
        for name in ("ann", "bob")
    }  # fmt: skip
    pairs = {name: [Pair(*own)] for name, own in rows.items()}
    gradient = []
    ann.model.get_output_embeddings().weight.register_hook(gradient.append)
    stage = DPOStage(train="dpo", build="gap", learning_rate=1e-12, reference="none", joint=True, beta=0.1)
    done = train_jointly(config, stage, team.policies, pairs, tmp_path, True)
    assert done["ann"]["loss"] == pytest.approx(loss, abs=1e-4)
    assert done["ann"]["chosen_before"] - done["ann"]["rejected_before"] == pytest.approx(0.8, abs=1e-4)
    along = float(gradient[0][good] @ hidden / hidden.dot(hidden))  # the derivative of the loss by the logit of `good`
    assert along == pytest.approx(-factor, abs=1e-4)
    alone = train_stage(config, replace(stage, joint=False), ann, pairs["ann"], tmp_path, True)
    assert alone["loss"] == pytest.approx(-math.log(1 / (1 + math.exp(-0.08))), abs=1e-4)
    against = train_jointly(config, replace(stage, reference="stage"), team.policies, pairs, tmp_path, True)
    assert against["ann"]["loss"] == pytest.approx(math.log(2), abs=1e-5), "deltas count from the reference"


@pytest.mark.slow
def test_joint_passes_share_one_schedule_and_see_what_the_others_have_learned(tmp_path, monkeypatch):
    """With two passes, the second one's loss counts what bob learned in the first. The rate falls over both."""
    config, team = team_of(tmp_path)
    pairs = {name: rows_of(name, 4) for name in ("ann", "bob")}
    pairs = {name: [Pair(p.chosen, replace(p.rejected, place=(p.chosen.place[0], 1, 0))) for p in own] for name, own in pairs.items()}  # fmt: skip
    stage = DPOStage(train="dpo", build="gap", learning_rate=1e-2, reference="none", joint=True, epochs=2, batch_size=2)
    rates, step = [], MasterAdamW.step

    def watched(optimizer, *given, **more):
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *given, **more)

    monkeypatch.setattr(MasterAdamW, "step", watched)
    train_jointly(config, stage, team.policies, pairs, tmp_path, True)
    assert rates == pytest.approx([1e-2 * (1 - k / 4) for k in (0, 1)] * 2 + [1e-2 * (1 - k / 4) for k in (2, 3)] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["round", "initial"])
def test_the_reference_of_a_stage_may_be_the_weights_of_the_round_or_of_the_loop(reference, tmp_path):
    """After SFT, DPO against earlier weights does not begin at log 2; against those of the stage it does."""

    def losses(kind):
        stages = [STAGES[0], STAGES[1] | {"learning_rate": 1e-12, "reference": kind}]
        config = looped(tmp_path / f"{kind}", stages, rounds=2, questions=13, evaluation={"questions": 0})
        figures = loops.run_loop(config, False, True, lambda line: None)
        return [list(figure["stages"][1].values())[1].get("loss") for figure in figures]

    same, other = losses("stage"), losses(reference)
    assert same == pytest.approx([math.log(2)] * 2, abs=1e-4) and min(abs(o - math.log(2)) for o in other) > 1e-4
    if reference == "initial":
        assert abs(other[1] - losses("round")[1]) > 1e-4


def test_questions_of_a_round_are_numbered_on_however_many_are_played_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(loops, "CHUNK", 5)
    config = looped(tmp_path / "run", [STAGES[0]], questions=13, evaluation={"questions": 0}, warm_start={"steps": 0})
    loop, folder = loops.Loop(ResolvedRun(config), [], True, print), tmp_path / "sample"
    folder.mkdir()
    loop._write_initial(tmp_path / "initial")
    loop._sample(folder, 1, tmp_path / "initial")
    lines = (folder / "dialogues.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["prompt"] for line in lines}) == list(range(13))


# -- good and bad without pairs (KTO), and earlier rounds --------------------------------------------------------------


def signed(good=1, bad=1):
    pairs = rows_of("ann", max(good, bad))
    liked, others = [pair.chosen for pair in pairs[:good]], [pair.rejected for pair in pairs[:bad]]
    return [replace(row, good=True) for row in liked] + [replace(row, good=False) for row in others]


def test_signs_call_every_answer_good_or_bad():
    rows = Signs()(malt_tree(), ("verifier", "refiner"))
    assert by_role([row for row in rows if row.good]) == {"verifier": 1, "refiner": 4}
    assert len(rows) == 4 + 8 and sum(r.good for r in Signs(0.4)(malt_tree(), ("verifier",))) == 3
    assert described(rows)["good"] == 5 and "good" not in described(Threshold()(malt_tree()))


def test_kto_compares_each_prompt_with_the_completion_before_it_and_balances_both_kinds():
    rows = signed(2, 1)
    columns = kto_rows(rows, [-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0])
    assert [c["completion_ids"] for c in columns] == [r.completion_ids for r in rows]
    assert [c["KL_completion_ids"] for c in columns] == [rows[n - 1].completion_ids for n in range(3)]
    told = [(c["label"], c["ref_logps"], c["ref_KL_logps"]) for c in columns]
    assert told == [(True, -1, -4), (True, -2, -5), (False, -3, -6)]
    assert stages.good_weight(signed(3, 9)) == 3
    assert sorted(map(str, stages.shuffled(rows, 1))) == sorted(map(str, rows))
    assert stages.shuffled(signed(9, 9), 1) != stages.shuffled(signed(9, 9), 2)


@pytest.mark.parametrize("reference", ["stage", "none"])
def test_the_published_kto_loss(reference, tmp_path, monkeypatch):
    """Beta .1, z0 .1: log-ratio .5 of a good answer .4900; log-ratio -.6 of a bad one .4825. Without a reference it
    counts 0."""
    config, team = team_of(tmp_path)
    shift = {True: -0.5, False: 0.6, None: -0.1}
    known = {str(row.completion_ids): row for row in signed()}

    def reference_of(policy, rows):
        own = [known[str(row.completion_ids)] for row in rows]
        matched = [
            (row.prompt_ids, row.place) == (one.prompt_ids, one.place) for row, one in zip(rows, own, strict=True)
        ]
        kinds = [row.good if same else None for row, same in zip(rows, matched, strict=True)]
        return [x + shift[kind] for x, kind in zip(completion_logprobs(policy, rows), kinds, strict=True)]

    monkeypatch.setattr(stages, "completion_logprobs", reference_of)
    stage = KTOStage(train="kto", build="signs", learning_rate=1e-12, beta=0.1, reference=reference)
    loss = train_stage(config, stage, team.policies["ann"], signed(), tmp_path, True)["loss"]
    assert (loss == pytest.approx((0.4900 + 0.4825) / 2, abs=1e-4)) is (reference == "stage")


def test_replay_weighs_rounds_by_their_age():
    """Three rounds, rate .5, oldest first: .1429 .2857 .5714 (MADPO's replay)."""
    found = shares({"decay": 0.5}, 3)
    assert [x / sum(found) for x in reversed(found)] == pytest.approx([0.1429, 0.2857, 0.5714], abs=1e-4)
    assert shares("current", 3) == [1] and shares("all", 3) == [1, 1, 1]
    assert shares({"nearest": 2}, 3) == [1, 1] and shares({"nearest": 5}, 3) == [1, 1, 1]
    pairs = Gap(per_question=None)([*joint_answers(), *joint_answers(prompt=1)])
    half = drawn(pairs, 0.5, "x")
    assert len(half) == 10 and half == [p for p in pairs if p in half] and half == drawn(pairs, 0.5, "x")
    assert {p.together for p in half if p.policy == "ann"} == {p.together for p in half if p.policy == "bob"}


@pytest.mark.slow
def test_earlier_rounds_are_drawn_from_by_their_age(tmp_path):
    """The recipe marlhf in its fourth round: as many pairs as that round made, of which the rounds give .3388 .2710
    .2168 .1734, the newest first, although the second has ten times as many."""
    for number in range(1, 5):
        questions = 1000 if number == 2 else 100
        said = [d for prompt in range(questions) for d in joint_answers((1.0, 0.0), prompt)]
        (tmp_path / f"round-{number}/sample").mkdir(parents=True)
        lines = "".join(to_json(d) + "\n" for d in said)
        (tmp_path / f"round-{number}/sample/dialogues.jsonl").write_text(lines, encoding="utf-8")
    stage = stages_of(from_dict(recipe_values("marlhf", tmp_path / "run"), "test"))[0]
    rows = stage_rows(tmp_path, stage, 4, 0, seed=0)
    assert len(rows) == len({(row.round, row.place) for row in rows}) == 100
    counts = [sum(row.round == number for row in rows) / 100 for number in (4, 3, 2, 1)]
    assert counts == pytest.approx([0.3388, 0.2710, 0.2168, 0.1734], abs=0.1)
    assert stage_rows(tmp_path, stage, 4, 0, seed=0) == rows != stage_rows(tmp_path, stage, 4, 0, seed=1)
    assert {row.round for row in stage_rows(tmp_path, stage, 1, 0, seed=0)} == {1}


def test_random_rounds_are_drawn_from_without_repetition_until_all_are_taken():
    rng = random.Random(0)
    for _ in range(100):
        sizes = [rng.choice((0, 1, 3, 20)) for _ in range(rng.randint(1, 4))]
        said = [[d for p in range(size) for d in joint_answers((1.0, 0.0), p)] for size in sizes]
        rounds = [of_round(Gap()(own), len(sizes) - age) for age, own in enumerate(said)]
        found = redrawn(rounds, shares({"decay": 0.8}, len(sizes)), str(rng.random()))
        newest = next((size for size in sizes if size), 0)
        drawn_keys = Counter(pair.together for pair in found if pair.policy == "ann")
        assert sum(drawn_keys.values()) == newest
        assert drawn_keys == Counter(pair.together for pair in found if pair.policy == "bob"), "agents stay together"
        for number in {key[0] for key in drawn_keys}:
            times = [drawn_keys[key] for key in drawn_keys if key[0] == number]
            assert max(times) == 1 or (len(times) == sizes[len(sizes) - number] and max(times) - min(times) <= 1)


@pytest.mark.slow
def test_rounds_replay_what_earlier_rounds_sampled_and_kto_needs_both_kinds(tmp_path):
    section = {"train": "kto", "build": {"signs": {"above": 0.9}}, "learning_rate": 1e-3, "replay": "all"}
    config = looped(tmp_path / "run", [section], rounds=2, evaluation={"questions": 0})
    one, two = (figures["stages"][0]["ann"] for figures in loops.run_loop(config, False, True, lambda line: None))
    rows, sampled = (records_of(tmp_path / f"run/round-{number}/train-1/ann.rows.jsonl") for number in (2, 1))
    first = [row for row in rows if row["round"] == 1]
    assert (one["rows"], two["rows"]) == (len(first), len(rows)) and 0 < len(first) < len(rows)
    assert first == sampled and 0 < one["good"] < one["rows"]
    bad = looped(tmp_path / "bad", [section | {"build": {"signs": {"above": -1}}}], evaluation={"questions": 0})
    message = r"round 1, stage 1 \(kto on signs\): (\d+) of \1 answers of policy 'ann' are good"
    with pytest.raises(RunError, match=message):
        loops.run_loop(bad, False, True, lambda line: None)


@pytest.mark.slow
def test_a_round_that_made_the_team_worse_is_not_kept(tmp_path):
    """SFT on all answers, at a rate that destroys the weights. The next round begins where the first one did."""
    worse = {"train": "sft", "build": {"threshold": {"above": -1}}, "learning_rate": 0.3}
    told = []
    config = looped(
        tmp_path / "run", [worse], 2, task={"name": "toy_sum", "largest": 9}, seed=1,
        warm_start={"steps": 250, "learning_rate": 1e-2}, evaluation={"questions": 20},
    )  # fmt: skip
    config = replace(config, loop=replace(config.loop, accept="not_worse"))
    with pytest.raises(ConfigError, match=r"loop\.accept: not_worse compares held-out scores"):
        check_run(replace(config, evaluation=replace(config.evaluation, questions=0)))
    figures = loops.run_loop(config, False, True, told.append)
    assert [f["accepted"] for f in figures] == [0, 0]
    assert told.count("warning: round 1: the held-out score fell, so its weights are not kept") == 1
    final, initial, first = (weights(tmp_path / "run" / part) for part in ("final", "initial", "round-1/train-1"))
    assert final == initial != first
    assert (tmp_path / "run/evaluation_after.json").read_text() == (tmp_path / "run/evaluation_before.json").read_text()


# -- the loop ----------------------------------------------------------------------------------------------------------


def records_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def weights(folder):
    found = {str(p.relative_to(folder)): load_file(p) for p in sorted(folder.rglob("*.safetensors"))}
    return {name: {key: value.tolist() for key, value in tensors.items()} for name, tensors in found.items()}


def records(folder):
    files = ["rounds.json", *(str(p.relative_to(folder)) for p in sorted(folder.rglob("*.rows.jsonl")))]
    return {name: (folder / name).read_text() for name in files}


@pytest.mark.slow
def test_a_loop_samples_trains_evaluates_and_leaves_every_part_to_look_at(tmp_path):
    told = []
    figures = loops.run_loop(looped(tmp_path / "run", rounds=2), False, True, told.append)
    run = tmp_path / "run"
    assert [f["round"] for f in figures] == [1, 2] and figures[1]["evaluation"]
    dialogues = [from_json(line) for line in (run / "round-1/sample/dialogues.jsonl").read_text().splitlines()]
    assert len(dialogues) == 12 * 4 and len({d.prompt for d in dialogues}) == 12
    sampled = {(tuple(u.prompt_ids), tuple(u.response_ids), u.stop) for d in dialogues for u in d.utterances}
    for file in sorted(run.glob("round-1/train-1/*.rows.jsonl")):
        for row in records_of(file):
            stop = {s for p, r, s in sampled if (list(p), list(r)) == (row["prompt_ids"], row["completion_ids"])}
            assert stop and row["cut"] == (stop == {Stop.LENGTH}) and row["value"] > 0.5
    before, one, two = (weights(run / name) for name in ("round-1/train-1", "round-1/train-2", "round-2/train-2"))
    assert before != one != two and weights(run / "final") == two
    assert {p.name for p in run.iterdir()} >= {"initial", "evaluation_after.json", "rounds.json"}
    with pytest.raises(RunExists):
        loops.run_loop(looped(run, rounds=2), False, True, told.append)
    with pytest.raises(CheckpointError, match=r"another configuration .* in which loop.rounds may be more"):
        loops.run_loop(looped(run, rounds=1), True, True, told.append)
    again = len(told)
    assert loops.run_loop(looped(run, rounds=2), True, True, told.append) == figures and len(told) == again


@pytest.mark.slow
def test_a_loop_that_is_given_more_rounds_is_the_loop_that_had_them_from_its_beginning(tmp_path):
    few = {"warm_start": {"steps": 3}, "evaluation": {"questions": 4}}
    every = STAGES[0] | {"build": {"threshold": {"above": -1}}}  # of every answer, however little was taught
    for rounds, folder, resume in [(2, "whole", False), (1, "longer", False), (2, "longer", True)]:
        loops.run_loop(looped(tmp_path / folder, [every], rounds, **few), resume, True, lambda line: None)
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    assert weights(longer / "final") == weights(whole / "final") != weights(longer / "final.abandoned")
    assert records(longer) == records(whole)
    assert "rounds: 2" in (longer / "config.yaml").read_text()


@pytest.mark.slow
def test_a_loop_that_is_killed_in_any_part_ends_as_one_that_is_not(tmp_path):
    loops.run_loop(looped(tmp_path / "whole"), False, True, lambda line: None)
    run = tmp_path / "killed"
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(looped(run)))
    parts = ["initial", "round-1/sample", "round-1/train-1", "round-1/train-2", "round-1/evaluate", "final"]
    for number, part in enumerate(parts):
        partial = (run / part).parent / f".partial-{Path(part).name}"
        more = ["--resume"] if number else []
        done = processes.run([SUPPORT / "killed_at.py", "rename", partial, "train", file, "-q", *more])
        assert done.returncode == -9, done.stderr
        assert not (run / part).exists() and all((run / earlier).is_dir() for earlier in parts[:number])
    done = processes.run(["-m", "maporl", "train", str(file), "-q", "--resume"])
    assert done.returncode == 0, done.stderr
    assert weights(run / "final") == weights(tmp_path / "whole/final")
    assert records(run) == records(tmp_path / "whole")


def test_a_stage_without_rows_ends_the_loop_with_its_counts(tmp_path):
    stage = {"train": "sft", "build": {"threshold": {"above": 2.0}}}
    config = looped(tmp_path / "run", [stage], evaluation={"questions": 0}, warm_start={"steps": 3})
    message = r"round 1, stage 1 .*48 dialogues, utterances: ann: 72 with values from .*no rows"
    with pytest.raises(RunError, match=message):
        loops.run_loop(config, False, True, lambda line: None)
    round_1 = tmp_path / "run/round-1"
    assert (round_1 / "sample/dialogues.jsonl").exists() and not (round_1 / "train-1").exists()


@pytest.mark.slow
def test_joint_stages_and_replayed_rounds_are_resumed_too(tmp_path):
    """A round that is made again, in a new process's state, ends with the same weights and rows."""
    stage = {"train": "dpo", "build": {"gap": {"per_question": 2}}, "learning_rate": 1e-3, "epochs": 2, "joint": True, "replay": {"decay": 0.5}}  # fmt: skip
    config = looped(
        tmp_path / "run", [stage], 2, evaluation={"questions": 0}, branching={"group": 4},
        protocol={"name": "debate", "turns": 1}, reward={"rules": ["own"]},
    )  # fmt: skip
    loops.run_loop(config, False, True, lambda line: None)
    whole = weights(tmp_path / "run/final"), records(tmp_path / "run")
    for part in ("final", "round-2/train-1", "round-2/evaluate"):
        shutil.rmtree(tmp_path / "run" / part)
    torch.manual_seed(7)
    loops.run_loop(config, True, True, lambda line: None)
    assert (weights(tmp_path / "run/final"), records(tmp_path / "run")) == whole
    rows = records_of(tmp_path / "run/round-2/train-1/ann.rows.jsonl")
    assert {row["chosen"]["round"] for row in rows} == {1, 2}


@pytest.mark.slow
def test_a_policy_that_no_stage_trains_is_named_and_keeps_its_weights(tmp_path):
    told = []
    config = looped(tmp_path / "run", [STAGES[0] | {"roles": ["bob"]}], evaluation={"questions": 0})
    loops.run_loop(config, False, True, told.append)
    assert [line for line in told if line.startswith("warning:")] == [
        "warning: round 1: no stage trains policy 'ann'; freeze its agents, or see the roles"
    ]
    first, last = weights(tmp_path / "run/initial"), weights(tmp_path / "run/final")
    assert {n for n in last if last[n] != first[n]} == {"bob/model.safetensors"}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"train": "sft"}, "build: this key is required"),
        ({"train": "sft", "build": "siblings"}, "makes pairs, and train: sft takes single rows; use one of .'threshold', 'best_of'."),
        ({"train": "kto", "build": "threshold"}, "makes single rows, and train: kto takes signed rows; use one of .'signs'"),
        ({"train": "dpo", "build": "sibling"}, "loop.stages.0.build: .*siblings"),
        ({"train": "dpo", "build": {"siblings": {"over": 1}}}, "loop.stages.0.build.siblings"),
        ({"train": "sft", "build": "threshold", "beta": 0.2}, "beta: train: sft does not read it"),
        ({"train": "dpo", "build": "gap", "joint": True, "epochs": 1.5}, r"epochs: joint training makes whole passes, got 1\.5"),
        ({"train": "dpo", "build": "gap", "replay": {"nearest": 1.5}}, "replay.nearest: expected a whole number of rounds, got 1.5"),
        ({"train": "dpo", "build": "gap", "replay": {"decay": 1.0}}, "replay.decay: expected a rate between 0 and 1"),
        ({"train": "dpo", "build": "gap", "replay": {"nearest": 1, "decay": 0.5}}, "replay: expected current, all"),
        ({"train": "dpo", "build": "gap", "replay_size": "current"}, "replay_size: the present round alone is replayed"),
        ({"train": "kto", "build": "signs", "batch_size": 1}, "batch_size: train: kto compares the rows of a batch"),
        ({"train": "ppo"}, r"loop\.stages\.0\.updates: this key is required"),
        ({"build": "gap"}, r"loop\.stages\.0\.train: this key is required"),
        ({"train": ["sft"]}, r"loop\.stages\.0\.train: expected 'sft', .* or 'turn_critic', got \['sft'\]"),
        ({"train": "dpo", "build": "gap", "epoch": 2}, r"unknown key 'loop\.stages\.0\.epoch'; did you mean 'epochs'\? known: .*likelihood"),
        ({"train": "dpo", "build": "gap", "epochs": 0}, r"loop\.stages\.0\.epochs: expected more than 0, got 0"),
        ("sft", r"loop\.stages\.0: expected a mapping of keys to values, got 'sft'"),
    ],
)  # fmt: skip
def test_stages_that_cannot_run_are_refused_before_anything_is_loaded(stage, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        loops.run_loop(looped(tmp_path / "run", [stage]), False)
    assert not (tmp_path / "run").exists()


def test_a_builder_of_ones_own_is_a_named_import(tmp_path):
    """A stranger's team names none, and other processes find its folder."""
    code = "from maporl.loops.builder import Builder\n\nclass First(Builder):\n    pass\n"
    (tmp_path / "own_builders.py").write_text(code)
    stages = [{"train": "sft", "build": "own_builders:First"}, {"train": "sft", "build": {"own_builders:First": {}}}]
    config = looped(tmp_path / "run", stages, pythonpath=[str(tmp_path)])
    assert [key.partition(":")[0] for key in named_imports(config)] == ["loop.stages.0.build", "loop.stages.1.build"]


def test_a_check_of_a_loop_says_what_a_round_plays_and_trains(tmp_path):
    lines = check_run(looped(tmp_path / "run", questions=200))
    (line,) = (line for line in lines if line.startswith("loop:"))
    assert line.startswith("loop: 1 round of 13 questions, 4 dialogues for each (52 in a round")
    assert "then sft on threshold, then dpo on siblings, into" in line
    assert not any(line.startswith("run:") for line in lines)
    assert "warning: loop.questions=200, but the training split has 13; a round asks each once" in lines
    unread = {"updates": "set loop.rounds", "training.learning_rate": "set learning_rate of each stage"}
    assert [line for line in lines if "PPO reads it" in line] == [
        f"warning: {name}: PPO reads it, and a loop does not; {instead}" for name, instead in unread.items()
    ]


@pytest.mark.slow
def test_a_loop_says_in_its_metrics_and_its_page_what_each_round_did(tmp_path):
    """The figures of a round are those of its manifests, under declared names."""
    before, after = train(looped(tmp_path / "run", STAGES[:1], rounds=2), resume=False, quiet=True)
    assert before.questions == after.questions > 0
    metrics = records_of(tmp_path / "run/metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2] and [m["episode"] for m in metrics] == [12, 24]
    manifest = json.loads((tmp_path / "run/round-2/train-1/manifest.json").read_text())
    for policy in ("ann", "bob"):
        assert metrics[1][f"{policy}/stage_1/rows"] == manifest[policy]["rows"]
        assert metrics[1][f"{policy}/stage_1/loss"] == manifest[policy]["loss"]
    assert metrics[1]["eval_accuracy/turn_2"] == after.final().value
    said = [from_json(line) for line in (tmp_path / "run/round-1/sample/dialogues.jsonl").read_text().splitlines()]
    own = [(d, u) for d in said for u in d.utterances if u.agent == "ann"]
    lengths = {(d.prompt, u.sample or (d.rollout, u.id)): len(u.response_ids) for d, u in own}
    assert metrics[0]["ann/completions/mean_length"] == pytest.approx(sum(lengths.values()) / len(lengths))
    assert not [name for m in metrics for name in m if not any(row.pattern.fullmatch(name) for row in METRICS)]
    assert {"Rows of a stage", "Loss of a stage"} <= {c["title"] for c in charts(read_run(tmp_path / "run"))}


@pytest.mark.slow
def test_a_round_is_recorded_once_even_if_a_kill_came_between_its_two_files(tmp_path):
    loops.run_loop(looped(tmp_path / "run", STAGES[:1], rounds=2), False, True, lambda line: None)
    metrics, dialogues = (tmp_path / "run" / name for name in ("metrics.jsonl", "dialogues.jsonl"))
    whole = metrics.read_text(), dialogues.read_text()
    metrics.write_text(whole[0].splitlines(keepends=True)[0])
    loops.run_loop(looped(tmp_path / "run", STAGES[:1], rounds=2), True, True, lambda line: None)
    assert (metrics.read_text(), dialogues.read_text()) == whole
    dialogues.write_text("".join(whole[1].splitlines(keepends=True)[1:]))  # and what is lost is written again
    shutil.rmtree(tmp_path / "run/final")
    (tmp_path / "run/final").mkdir()
    told = []
    loops.run_loop(looped(tmp_path / "run", STAGES[:1], rounds=2), True, True, told.append)
    assert (metrics.read_text(), dialogues.read_text()) == whole and has_final(tmp_path / "run")
    assert any("held no weights; it is now" in line for line in told)
