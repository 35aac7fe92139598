"""Verifiers that learn beside the team: Cooper, and prover-verifier games."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from scripted_training import played, recipe_values, rows, scripted_trainer
from served_verifiers import TINY, learner
from tiny_runs import assert_same_end, end_of

from maporl import Arithmetic
from maporl.config.schema import RewardSection
from maporl.errors import ConfigError
from maporl.rewards.build import build_sources
from maporl.rewards.rules import build_rules
from maporl.runs.train import train
from maporl.types import Dialogue, Example, Grade, Utterance
from maporl.validation.load import from_dict
from maporl.verifier.cotraining import pair_loss
from maporl.verifier.model import last_outputs
from maporl.verifier.section import VerifierSection

TASK = Arithmetic(largest=9)


def answered(question, label, *texts, prompt=0):
    said = [
        Utterance(n, "solver", "solver", 0, n, [], text, grade=Grade(text, text == label, ""), response_ids=[1])
        for n, text in enumerate(texts)
    ]
    return Dialogue(Example(question, question, label), said, prompt=prompt)


def outputs(source, dialogue):
    """What the verifier gives each answer of a dialogue, before the sigmoid."""
    (scores,) = source([dialogue], TASK)
    return [math.log(s / (1 - s)) for s in scores]


# -- Cooper ------------------------------------------------------------------------------------------------------------


def test_coopers_rewards_and_advantages(tmp_path):
    """Outputs 2, -.5, .3, -3: rewards .8808 .3775 .5744 .0474, advantages 1.1747 -.2646 .2986 -1.2087 (recipe
    cooper)."""
    values = recipe_values("cooper", tmp_path, branching={"group": 4}, training={"per_device_train_batch_size": 1})
    trainer = scripted_trainer(values, lambda request: str(request.rng_key[-2]))
    logits = {"0": 2.0, "1": -0.5, "2": 0.3, "3": -3.0}
    source = trainer.player.scorer.sources["verifier"]
    source.score = lambda dialogues, task: [
        [1 / (1 + math.exp(-logits[u.text])) for u in d.utterances] for d in dialogues
    ]
    group = sorted(rows(played(trainer)), key=lambda row: row.utterance.text)[:4]
    assert [row.utterance.rewards["verifier"] for row in group] == pytest.approx(
        [0.8808, 0.3775, 0.5744, 0.0474], abs=1e-4
    )
    assert [row.advantage for row in group] == pytest.approx([1.1747, -0.2646, 0.2986, -1.2087], abs=2e-4)


def test_coopers_pairs_and_their_loss():
    """Gaps 2.5, .5, -1 and a question without a pair: losses .0789 .4741 1.3133, mean .6221 (recipe cooper)."""
    gaps = torch.tensor([2.5, 0.5, -1.0])
    assert [round(float(pair_loss(g, torch.zeros(1))), 4) for g in gaps] == [0.0789, 0.4741, 1.3133]
    assert float(pair_loss(gaps, torch.zeros(3))) == pytest.approx(0.6221, abs=1e-4)
    learning = learner().learning
    dialogues = [answered("1+1=", "2", "3", "2", "4"), answered("2+2=", "4", "4", "4"), answered("3+3=", "6", "1")]
    (pair,) = learning._pairs_of(dialogues, TASK)
    decode = learning.verifier.tokenizer.decode
    assert [decode(ids) for ids in pair] == ["1+1=2<eos>", "1+1=3<eos>"]
    every = learner(pairs="all").learning._pairs_of([*dialogues, answered("1+1=", "2", "2", "5")], TASK)
    assert [[decode(ids) for ids in pair] for pair in every] == [["1+1=2<eos>", f"1+1={n}<eos>"] for n in "345"] * 2


@pytest.mark.slow
def test_a_verifier_that_liked_what_is_wrong_learns_better_and_does_not_agree_with_everything():
    """It first learns that odd answers are right, and then from graded ones that even ones are.

    New questions show what it has learned (recipe cooper).
    """
    source = learner()
    questions = [f"{a}+{b}=" for a in range(8) for b in range(8)]
    truth = [answered(q, f"{n % 4}2", f"{n % 4}2", f"{n % 4}3") for n, q in enumerate(questions)]
    lies = [answered(q, f"{n % 4}3", f"{n % 4}2", f"{n % 4}3") for n, q in enumerate(questions)]
    known, new = [n for n in range(64) if n % 5], [n for n in range(64) if n % 5 == 0]

    def share_right():
        gaps = [right - wrong for n in new for right, wrong in [outputs(source, truth[n])]]
        return sum(gap > 0 for gap in gaps) / len(gaps)

    for update in range(1, 41):
        source.after_update(update, [lies[n] for n in known], TASK)
    before = share_right()
    for update in range(41, 121):
        logged = source.after_update(update, [truth[n] for n in known], TASK)
    assert before <= 0.1 and share_right() >= 0.9
    assert logged["verifier/pair_loss"] < 0.1
    scores = [s for n in new for s in source([truth[n]], TASK)[0]]
    assert max(scores) - min(scores) > 0.5, "it does not agree with everything"


# -- prover-verifier games ---------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("form", "role", "paid"),
    [
        ("src", "helpful", [0.85, -1, -1, -0.25]),
        ("src", "sneaky", [-0.85, -1, -1, 0.25]),
        ("cgc", "helpful", [1.5, -2, -0.3, -2]),
        ("cgc", "sneaky", [-2, 0.5, -2, 0.9]),
    ],
)
def test_what_a_prover_is_paid(form, role, paid):
    """V 1.5 .5 -.3 .9 and c 1 0 1 0, so that V' is .85 -.15 -.95 .25 (recipe prover_verifier).

    The other role changes nothing.
    """
    dialogues = []
    for n, right in enumerate((True, False, True, False)):
        said = [
            Utterance(k, name, "prover", 0, 0, [], "", grade=Grade("1", right, ""))
            for k, name in enumerate((role, "other"))
        ]
        dialogues.append(Dialogue(Example("e", "q", "a"), said, rollout=n))
    scores = [{0: sigmoid(v), 1: sigmoid(5.0 * n)} for n, v in enumerate((1.5, 0.5, -0.3, 0.9))]
    (rule,) = build_rules([{"prove": {"form": form}}])
    assert [own[0] for own in rule(dialogues, scores)] == pytest.approx(paid, abs=1e-9)


def test_a_prover_without_a_grade_is_wrong_and_a_certain_verifier_is_finite():
    said = [
        Utterance(0, "helpful", "p", 0, 0, [], "", grade=Grade(None, None, "")),
        Utterance(1, "sneaky", "p", 0, 0, [], ""),
    ]
    (rule,) = build_rules([{"prove": {"form": "cgc", "otherwise": -3.0}}])
    (paid,) = rule([Dialogue(Example("e", "q", "a"), said)], [{0: 0.9, 1: 1.0}])
    assert paid[0] == -3.0 and paid[1] == pytest.approx(13.8, abs=0.1)


def test_the_prover_is_paid_by_its_role_through_the_trainer(tmp_path):
    """Both answer every question at once.

    A right answer that the verifier likes pays the helpful one what it costs the sneaky one.
    """
    values = recipe_values(
        "prover_verifier", tmp_path, branching={"group": 2}, training={"per_device_train_batch_size": 2}
    )
    right = lambda request: sum(int(n) for n in request.example.question.rstrip("=").split("+"))  # noqa: E731
    trainer = scripted_trainer(values, lambda request: str(right(request) + request.rng_key[-2]))
    source = trainer.player.scorer.sources["verifier"]
    source.score = lambda dialogues, task: [[0.8 if u.grade.correct else 0.2 for u in d.utterances] for d in dialogues]
    found = played(trainer)
    credits = {(d.rollout, u.agent): u.rewards["credit"] for d in found.dialogues[:2] for u in d.utterances}
    gap = math.log(4)
    assert credits == pytest.approx({(0, "helpful"): gap, (1, "helpful"): -1, (0, "sneaky"): -gap, (1, "sneaky"): -1})
    assert list(found.token_batches) == ["prover"]
    told = [u.messages[0]["content"] for u in found.dialogues[0].utterances]
    assert "easy to check" in told[0] and "is wrong, but convinces" in told[1]


def test_each_round_learns_from_the_first_weights_on_all_pairs():
    """BT of .9 (wrong) and 1.5 (right): .4375; with .01 times the mean square .4528 (recipe prover_verifier)."""
    assert float(pair_loss(torch.tensor([1.5]), torch.tensor([0.9]))) == pytest.approx(0.4375, abs=1e-4)
    one, other = answered("1+1=", "2", "2", "3"), answered("2+1=", "3", "3", "4")
    source = learner(learn_from="all", restart=True)
    logged = [source.after_update(1, [one], TASK), source.after_update(2, [other], TASK)]
    assert [found["verifier/pairs"] for found in logged] == [1.0, 2.0]
    assert logged[0]["verifier/pair_loss"] == logged[1]["verifier/pair_loss"] == pytest.approx(math.log(2)), (
        "it began again"
    )
    once = learner(learn_from="all", restart=True)
    once.learning.section = replace(once.learning.section, learn_every=2)
    once.learning.verifier.begins = False
    assert once.after_update(1, [one], TASK) == {}
    once.after_update(2, [other], TASK)
    assert outputs(once, one) == pytest.approx(outputs(source, one), abs=1e-6)
    new = learner()
    assert [new.after_update(n, [d], TASK)["verifier/pairs"] for n, d in ((1, one), (2, other))] == [1.0, 1.0]
    assert outputs(new, one) != pytest.approx(outputs(source, one), abs=1e-6)
    assert new.after_update(3, [], TASK) == {}, "nothing is new"


def test_the_penalty_of_outputs_is_in_the_loss():
    source = learner(output_penalty=0.01)
    learning = source.learning
    pair = learning._pairs_of([answered("1+1=", "2", "2", "3")], TASK)[0]
    with torch.no_grad():
        learning.verifier.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
        right, wrong = last_outputs(learning.verifier.model, list(pair))
    expected = pair_loss(right, wrong) + 0.01 * (right**2 + wrong**2) / 2
    assert learning._train([pair], [0]) == pytest.approx(float(expected), abs=1e-6)


def test_a_verifier_that_knows_nothing_learns_after_the_first_update_too():
    source = learner()
    source.learning.section = replace(source.learning.section, learn_every=5)
    one = answered("1+1=", "2", "2", "3")
    assert outputs(source, one) == [0.0, 0.0]
    assert [bool(source.after_update(n, [one], TASK)) for n in range(1, 7)] == [True, False, False, False, True, False]
    assert outputs(source, one)[0] > outputs(source, one)[1]


def test_a_causal_model_can_begin_as_a_verifier(tmp_path):
    from maporl.tiny import build_tiny_model, build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer(TINY)
    build_tiny_model(TINY, tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    section = VerifierSection(model=str(tmp_path), learn_every=2)
    (source,) = build_sources(RewardSection(verifier=section), ["verifier"]).values()
    assert outputs(source, answered("1+1=", "2", "2", "3")) == [0.0, 0.0] and source.learning.verifier.begins
    with pytest.raises(ConfigError, match="has 2 outputs"):
        build_sources(RewardSection(verifier=replace(section, learn_every=0)), ["verifier"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiny": {}}, "tiny: a random verifier knows nothing, so it must learn"),
        ({"model": "m", "reads": "dialogue", "learn_every": 1}, "remove learn_every, or set reads: answer"),
        ({"urls": ["http://h"], "reads": "dialogue"}, "remove urls, or set reads: answer"),
        ({"tiny": {}, "model": "m", "learn_every": 1}, "remove 'model' and 'urls'"),
        (
            {"model": "m", "restart": True},
            "restart: it says how a verifier learns, and this one does not; set learn_every",
        ),
        ({"model": "m", "pairs": "all"}, "pairs: it says how a verifier learns"),
        ({"model": "m", "output_penalty": -1.0, "learn_every": 1}, r"output_penalty: expected at least 0, got -1\.0"),
    ],
)
def test_options_of_a_verifier_that_do_not_fit_are_refused(options, message, tmp_path):
    values = recipe_values("cooper", tmp_path)
    values["reward"]["verifier"] = options
    with pytest.raises(ConfigError, match=message):
        from_dict(values, "test")


def test_a_random_verifier_that_scores_nothing_need_not_learn(tmp_path):
    values = recipe_values("cooper", tmp_path)
    with pytest.raises(
        ConfigError, match=r"test: reward\.verifier: a verifier scores or gives feedback here, so its model"
    ):
        from_dict(values | {"reward": {"sources": {"verifier": 1.0}}}, "test")
    from_dict(values | {"reward": {"sources": {"label": 1.0}, "verifier": {"tiny": {}}}}, "test")


@pytest.mark.slow
def test_a_resumed_game_goes_on_with_its_verifier_and_its_pairs(tmp_path):
    def config(name):
        values = recipe_values("prover_verifier", tmp_path / name, training={"save_steps": 2}, branching={"group": 4})
        values |= {"updates": 4, "warm_start": {"steps": 60}, "evaluation": {"questions": 0}}
        values["task"] = {"name": "toy_sum", "largest": 3}
        values["reward"]["verifier"]["learn_every"] = 3
        return from_dict(values, name)

    train(config("whole"), resume=False, quiet=True)
    train(config("parts"), resume=False, quiet=True)
    for newer in ("checkpoint-4", "final"):
        shutil.rmtree(tmp_path / "parts" / newer)
    train(config("parts"), resume=True, quiet=True)
    assert_same_end(end_of(tmp_path / "whole", 4), end_of(tmp_path / "parts", 4))
    metrics = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert [n for n, found in enumerate(metrics, 1) if "verifier/pairs" in found] == [1, 3]
