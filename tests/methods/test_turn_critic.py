"""Loops that train a critic of turns which knows the answer, and rank what could be said by it (SWEET-RL)."""

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from scripted_training import recipe_values, sampled

from maporl.errors import ConfigError, RunError
from maporl.loops.plan import stages_of
from maporl.loops.ranked import RankHalves, TrajectoryPairs
from maporl.loops.rows import Pair, Row, TrajectoryPair
from maporl.loops.run import run_loop
from maporl.loops.run_stage import team_with
from maporl.loops.section import TurnCriticStage
from maporl.loops.stages import DPOLearner, completion_logprobs
from maporl.loops.turn_critic import (
    TurnCriticTrainer,
    read_by_critic,
    train_turn_critic,
    turn_advantages,
)
from maporl.storage.run_folder import RunFolder
from maporl.team.team import Team
from maporl.types import Dialogue, Example, Utterance
from maporl.validation.load import from_dict

CANDIDATE = Row("coder", "coder", "coder", "q", [5, 6], [7], 0.0, (0, 0, 0))


def tiny_config(tmp_path, **loop):
    values = recipe_values("sweet_rl", tmp_path / "run", loop=loop)
    values["task"] = {"name": "toy_sum", "largest": 3}
    return values


def coder_of(tmp_path):
    torch.manual_seed(0)
    return Team.from_config(from_dict(tiny_config(tmp_path), "test")).policies["coder"]


# -- the published numbers ---------------------------------------------------------------------------------------------


def test_the_published_advantages_and_losses_of_sweet_rl(tmp_path):
    """Log-ratios a (.2 .2 -.1), b (0 .1 -.1), c (-.2 -.2 -.2), d (.3 .3) rank d a | b c. Of a and (-.1 0 -.3 -.2), the
    loss of the recipe's own stage is .6492, of sums, plus .01 times the mean of -log p (recipe sweet_rl). Of means it
    would be .6807."""
    values = {"a": 0.1, "b": 0.0, "c": -0.2, "d": 0.3}
    group = [replace(CANDIDATE, completion_ids=[ord(name)], value=value) for name, value in values.items()]
    names = {
        (chr(p.chosen.completion_ids[0]), chr(p.rejected.completion_ids[0]))
        for p in RankHalves(candidates=4, pairs=60).paired(group)
    }
    assert names == {("d", "b"), ("d", "c"), ("a", "b"), ("a", "c")}

    policy, config = coder_of(tmp_path), from_dict(tiny_config(tmp_path), "test")
    chosen, rejected = replace(CANDIDATE, completion_ids=[7, 8, 9]), replace(CANDIDATE, completion_ids=[7, 7, 8, 9])
    recipe = replace(config.loop.stages[1], learning_rate=1e-12, batch_size=1)
    for stage, expected in ((recipe, 0.6492), (replace(recipe, norm=True), 0.6807)):
        learner = DPOLearner(config, stage, policy, [Pair(chosen, rejected)])
        (one,), (other,) = learner.before
        learner.reference = ([one - 0.3], [other + 0.6])
        learner.train(1, tmp_path / "scratch", True)
        assert learner.losses[0] == pytest.approx(expected - 0.01 * one / 3, abs=1e-4)


def test_the_critic_of_turns_is_trained_by_the_published_loss(tmp_path):
    """Turn advantages .1 .2 -.05 against -.1 0 -.3 of 1, 2 and 3 tokens: the means over all of them differ by .225, and
    the loss is .6820 with beta .1 (recipe sweet_rl). The paper's sums of turns differ by .65, which is .6612."""
    policy, config = coder_of(tmp_path), from_dict(tiny_config(tmp_path), "test")
    sides = {"chosen": (0.1, 0.2, -0.05), "rejected": (-0.1, 0.0, -0.3)}
    turns = {}
    for side, advantages in sides.items():
        turns[side] = []
        for number, advantage in enumerate(advantages):
            row = replace(CANDIDATE, prompt_ids=[5, 6, *[7] * number], completion_ids=[8] * (number + 1))
            (known,) = completion_logprobs(policy, [row])
            turns[side].append(((row.prompt_ids, row.completion_ids), known - advantage * (number + 1)))
    stage = config.loop.stages[0]
    assert (stage.mean_over, stage.beta) == ("dialogue", 0.1)
    for mean_over, gap, expected in ((stage.mean_over, 0.225, 0.6820), ("turn", 0.65, 0.6612)):
        trainer = object.__new__(TurnCriticTrainer)
        trainer.beta, trainer.mean_over = stage.beta, mean_over
        loss, gaps = trainer.compute_loss(policy.model, {"pairs": [turns]}, return_outputs=True)
        assert float(gaps[0].detach()) == pytest.approx(gap, abs=1e-4)
        assert float(loss.detach()) == pytest.approx(expected, abs=1e-4) and loss.requires_grad


def test_critic_and_reference_begin_equal(tmp_path):
    """Every advantage is then 0, so the first loss is log 2."""
    policy, config = coder_of(tmp_path), from_dict(tiny_config(tmp_path), "test")
    other = replace(CANDIDATE, completion_ids=[8, 9])
    pairs = [TrajectoryPair(Example("q", "1+1=", "2"), [CANDIDATE, other], [other], 1.0)]
    stage = TurnCriticStage(train="turn_critic", build="trajectory_pairs", learning_rate=1e-12)
    found = train_turn_critic(config, stage, policy, pairs, tmp_path, True)
    assert found["loss"] == pytest.approx(0.6931, abs=1e-4) and found["pairs"] == 1


# -- builders ----------------------------------------------------------------------------------------------------------


def chat(rollout, value, turns=2):
    said = [
        Utterance(n, name, name, n // 2, n, [], "", prompt_ids=[1, n], response_ids=[rollout + 2, n],
                  rewards={"credit": value}, trainable=name == "coder")
        for n, name in enumerate(["coder", "user"] * turns)
    ]  # fmt: skip
    return Dialogue(Example("q", "1+1=", "2"), said, rollout=rollout)


def test_trajectory_pairs_hold_all_that_a_policy_said():
    played = [chat(0, 1.0), chat(1, 0.0), chat(2, 0.0, turns=3)]
    pairs = TrajectoryPairs(per_question=None)(played)
    assert {(p.together, p.gap) for p in pairs} == {((1, 0, 0, 1), 1.0), ((1, 0, 0, 2), 1.0)}
    longest = next(p for p in pairs if p.together[-1] == 2)
    assert [row.place for row in longest.chosen] == [(0, 0, 0), (0, 0, 2)]
    assert [row.place for row in longest.rejected] == [(0, 2, 0), (0, 2, 2), (0, 2, 4)] and longest.policy == "coder"
    assert len(TrajectoryPairs(per_question=1)(played)) == 1 and TrajectoryPairs()([chat(0, 1.0), chat(1, 1.0)]) == []


PUBLISHED = [
    ((1, 0, 0), [(0, 1), (0, 2)]),
    ((0, 1, 0.5), [(1, 0), (1, 2)]),
    ((0, 1, 1), [(1, 0)]),
    ((1, 1, 1), []),
    ((0.5, 0.25, 0), []),
    ((0, 0, 1, 1, 0.5, 0), [(2, 0), (2, 1), (2, 4), (2, 5)]),
]
"""Worths of a question's dialogues, and the pairs for SWEET-RL's critic."""


def test_the_first_right_dialogue_is_paired_with_each_worse_one(tmp_path):
    """By the builder of the recipe sweet_rl: at most two pairs of three dialogues, and none where none is fully
    right."""
    (_, builder), _ = stages_of(from_dict(tiny_config(tmp_path), "test"))
    for worths, expected in PUBLISHED:
        played = [chat(k, value) for k, value in enumerate(worths)]
        pairs = [(p.chosen[0].place[1], p.rejected[0].place[1]) for p in replace(builder, per_question=None)(played)]
        assert pairs == expected
        if len(worths) == 3:
            assert builder(played[::-1]) == builder(played) and len(builder(played)) == len(expected)


def test_states_are_those_of_the_first_tenth_of_the_dialogues(tmp_path):
    """The recipe sweet_rl, ten questions with three dialogues of two turns: the first dialogues of the first three
    questions, with all their states."""
    _, (_, builder) = stages_of(from_dict(tiny_config(tmp_path), "test"))
    played = [replace(chat(k, 0.0), prompt=prompt) for prompt in range(10) for k in range(3)]
    found = [row.place for row in builder(played, ("coder",))]
    assert found == [(prompt, 0, said) for prompt in range(3) for said in (0, 2)]
    assert builder(random.Random(0).sample(played, 30), ("coder",)) == builder(played, ("coder",))
    half = {row.place[:2] for row in replace(builder, share=0.5)(played)}
    assert half == {*((prompt, 0) for prompt in range(10)), *((prompt, 1) for prompt in range(5))}
    assert len(RankHalves()(played)) == 60 and len(RankHalves(share=0.1)([chat(0, 0.0)])) == 2, "at least one dialogue"


def test_equal_candidates_make_no_pair():
    group = [replace(CANDIDATE, value=float(n)) for n in range(4)]
    assert RankHalves().paired(group) == []
    odd = [replace(CANDIDATE, value=float(n), completion_ids=[n]) for n in range(3)]
    assert {(p.chosen.value, p.rejected.value) for p in RankHalves().paired(odd)} == {(2.0, 0.0)}


# -- what the critic reads ---------------------------------------------------------------------------------------------


def test_the_critic_reads_the_answer_and_the_policy_does_not(tmp_path):
    tokenizer = coder_of(tmp_path).tokenizer
    assert tokenizer.bos_token_id is None
    tokenizer.bos_token = "<unk>"
    row = replace(CANDIDATE, prompt_ids=[tokenizer.bos_token_id, 9, 10])
    example = Example("q", "1+1=", "2")
    prompt, said = read_by_critic(tokenizer, row, example, "It is {answer}.")
    assert said == row.completion_ids and prompt[0] == tokenizer.bos_token_id and prompt[-2:] == [9, 10]
    assert tokenizer.decode(prompt[1:-2]) == "It is 2."
    assert read_by_critic(tokenizer, row, example, "") == (row.prompt_ids, row.completion_ids)
    without_bos = read_by_critic(tokenizer, CANDIDATE, example, "2")[0]
    assert tokenizer.decode(without_bos[:1]) == "2" and without_bos[1:] == CANDIDATE.prompt_ids
    with pytest.raises(RunError, match="a critic of turns reads the right answer, and this question has none"):
        read_by_critic(tokenizer, row, Example("q", "1+1=", None), "It is {answer}.")


@pytest.mark.slow
@pytest.mark.parametrize(("privileged", "knows"), [("{answer}", True), ("", False)])
def test_a_critic_that_knows_the_answer_finds_the_turn_that_helped(privileged, knows, tmp_path):
    """The recipe sweet_rl: an agent speaks twice, and a dialogue is good if its second word is the answer, which the
    prompt does not give.

    After 12 passes over 200 pairs, a critic that reads the answer ranks it first of four words on new questions. One
    that does not, cannot.
    """
    config, rng = from_dict(tiny_config(tmp_path), "test"), random.Random(0)
    critic, reference = coder_of(tmp_path), coder_of(tmp_path)
    words = critic.tokenizer("1234", add_special_tokens=False)["input_ids"]

    def trajectory(last):
        first = replace(CANDIDATE, completion_ids=[rng.choice(words)])
        return [first, replace(first, prompt_ids=[5, 6, *first.completion_ids, 6], completion_ids=[last])]

    pairs = []
    for _ in range(200):
        answer = rng.randrange(4)
        other = rng.choice([n for n in range(4) if n != answer])
        example = Example("q", "?", str(answer + 1))
        pairs.append(TrajectoryPair(example, trajectory(words[answer]), trajectory(words[other]), 1.0))
    stage = TurnCriticStage(
        train="turn_critic", build="trajectory_pairs", privileged=privileged, learning_rate=1e-2, epochs=12, beta=1.0
    )
    found = train_turn_critic(config, stage, critic, pairs, tmp_path, True)
    first = 0
    for number in range(40):
        example, state = Example("new", "?", str(number % 4 + 1)), trajectory(words[0])[1]
        said = [replace(state, completion_ids=[word]) for word in words]
        reads = [read_by_critic(critic.tokenizer, row, example, privileged) for row in said]
        values = turn_advantages(critic, reference, reads)
        first += values.index(max(values)) == number % 4
    assert (first >= 36) if knows else (first <= 20)
    assert (found["pair_accuracy"] > 0.9) if knows else (found["pair_accuracy"] < 0.75)


# -- the loop ----------------------------------------------------------------------------------------------------------


def loop_values(tmp_path, **loop):
    values = tiny_config(tmp_path, **loop)
    return values | {
        "warm_start": {"steps": 60, "batch_size": 16, "learning_rate": 5e-3},
        "evaluation": {"questions": 3},
    }


@pytest.mark.slow
def test_a_loop_trains_a_critic_of_turns_and_ranks_by_it(tmp_path):
    """The recipe sweet_rl with tiny models: every part is there, and the values are those of the saved critic."""
    config = from_dict(loop_values(tmp_path), "test")
    run_loop(config, False, True, lambda line: None)
    round_1 = tmp_path / "run/round-1"

    def weights(part):
        return load_file(tmp_path / "run" / part / "model.safetensors")

    def same(one, other):
        return all(torch.equal(weights(one)[key], weights(other)[key]) for key in weights(one))

    assert same("initial/coder", "round-1/train-1/coder") and same("initial/user", "final/user")
    assert not same("initial/coder", "round-1/train-1/others/turn_critic/coder")
    assert not same("initial/coder", "round-1/train-2/coder") and same("round-1/train-2/coder", "final/coder")
    manifest = json.loads((round_1 / "train-1/manifest.json").read_text())["coder"]
    assert manifest["pairs"] > 0 and manifest["rows"] == 0 and 0 <= manifest["pair_accuracy"] <= 1
    metrics = RunFolder(tmp_path / "run").read_metrics()[0]
    assert {"coder/stage_1/pairs", "coder/stage_1/pair_accuracy", "coder/stage_2/rows"} <= metrics.keys()

    said = [Row(**json.loads(line)) for line in (round_1 / "train-2/candidates.jsonl").read_text().splitlines()]
    places = dict.fromkeys(tuple(row.place) for row in said)
    assert len(said) == 16 * len(places) and all(row.agent == "coder" for row in said)
    critics, first = (team_with(config, tmp_path / "run/initial") for _ in range(2))
    critic = critics.policies["coder"]
    critic.load(round_1 / "train-1/others/turn_critic/coder")
    dialogues = [json.loads(line) for line in (round_1 / "sample/dialogues.jsonl").read_text().splitlines()]
    answers = {(d["prompt"], d["rollout"]): Example(**d["example"]) for d in dialogues}
    text = config.loop.stages[0].privileged
    reads = [read_by_critic(critic.tokenizer, row, answers[tuple(row.place[:2])], text) for row in said[:32]]
    plain = [(row.prompt_ids, row.completion_ids) for row in said[:32]]
    assert [row.value for row in said[:32]] == pytest.approx(
        turn_advantages(critic, first.policies["coder"], reads, plain), abs=1e-6
    )
    assert len(places) == 3 * 4, "a tenth of 12 questions with 3 dialogues, in each of which the coder speaks 4 times"
    pairs = [json.loads(line) for line in (round_1 / "train-2/coder.rows.jsonl").read_text().splitlines()]
    assert pairs and all(pair["chosen"]["value"] >= pair["rejected"]["value"] for pair in pairs)


@pytest.mark.slow
def test_a_loop_that_is_stopped_after_its_critic_ends_as_one_that_is_not(tmp_path):
    whole = loop_values(tmp_path / "whole", rounds=2)
    run_loop(from_dict(whole, "test"), False, True, lambda line: None)
    parts = whole | {"output_dir": str(tmp_path / "parts/run")}
    run_loop(from_dict(parts, "test"), False, True, lambda line: None)
    for later in ("round-2/train-2", "round-2/evaluate", "final"):
        shutil.rmtree(tmp_path / "parts/run" / later)
    run_loop(from_dict(parts, "test"), True, True, lambda line: None)
    one, other = (load_file(tmp_path / side / "run/final/coder/model.safetensors") for side in ("whole", "parts"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_user_who_knows_the_answer_is_asked_several_times(tmp_path):
    """Through the loop's own sampling of sweet_rl: the coder speaks four times, and its last words decide what all of
    them are worth."""
    values = tiny_config(tmp_path, questions=1) | {"branching": {"group": 2}, "evaluation": {"questions": 0}}

    def script(request):
        if request.ask.agent == "user":
            return f"u{request.turn}"
        right = int(request.example.answer)
        return str(right + (request.rng_key[-2] if request.turn == 3 else 1))

    good, bad = sampled(values, tmp_path, script)
    for dialogue, worth in ((good, 1.0), (bad, 0.0)):
        assert [u.agent for u in dialogue.utterances] == ["coder", "user"] * 3 + ["coder"]
        assert {u.rewards["credit"] for u in dialogue.utterances if u.agent == "coder"} == {worth}
        for number, u in enumerate(dialogue.utterances[1::2]):
            asked, draft = u.messages[-1]["content"], dialogue.utterances[2 * number].text
            assert f"this program:\n{dialogue.example.answer}" in asked and draft in asked
            assert f"u{number}" in dialogue.utterances[2 * number + 2].messages[-1]["content"]
    (_, builder), _ = stages_of(from_dict(values, "test"))
    pairs = builder([good, bad], ("coder",))
    assert [(p.gap, len(p.chosen), len(p.rejected), p.chosen[0].place) for p in pairs] == [(1.0, 4, 4, (0, 0, 0))]


CRITIC = {"train": "turn_critic", "build": "trajectory_pairs"}
RANK = {"train": "dpo", "build": "rank_halves"}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([RANK], r"loop\.stages\.0\.build: rank_halves ranks by a critic of turns, and no stage before it trains one"),
        ([CRITIC], r"loop\.stages\.0: train: turn_critic changes no policy, and no later stage ranks by the critic"),
        ([CRITIC, RANK | {"replay": "all"}], r"loop\.stages\.1\.replay: rank_halves samples candidates for the present round"),
        ([CRITIC | {"privileged": "{question}"}, RANK], r"privileged: it may use \['answer'\] in braces, but has {question}"),
        ([CRITIC, RANK | {"norm": True, "joint": True}], "norm: joint adds the log-ratios of whole answers"),
        ([CRITIC, RANK | {"build": {"rank_halves": {"candidates": 1}}}], "candidates"),
        ([CRITIC, RANK], "rank_halves compares answers without their calls, and agent 'coder' has tools"),
    ],
)  # fmt: skip
def test_stages_that_cannot_rank_are_refused(stages, message, tmp_path):
    values = tiny_config(tmp_path, stages=stages)
    if "tools" in message:
        values |= {
            "tools": {"calc": {"use": "calculator"}},
            "agents": values["agents"] | {"coder": {"tools": ["calc"]}},
        }
    with pytest.raises(ConfigError, match=message):
        stages_of(from_dict(values, "test"))
