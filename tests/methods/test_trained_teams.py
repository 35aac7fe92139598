"""Teams that are trained as a whole: what WideSeek-R1 and PARL train on, through the trainer's own steps."""

import json
import random

import pytest
from invariant_runs import by_name, guess
from recipe_runs import rollout_of
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.advantages import AdvantageConfig, TurnBatch
from maporl.advantages.estimator import estimate_all
from maporl.errors import ConfigError
from maporl.protocols import CallReturn
from maporl.rewards.credit import credit_by_rules
from maporl.types import Dialogue, Example, Utterance
from maporl.validation.load import from_dict, load


def weights_of(config, batch):
    return estimate_all(batch, config).weights.tolist()


# -- WideSeek-R1 -------------------------------------------------------------------------------------------------------


def rollouts_of_two():
    """The lead says 4 and 6 tokens and a searcher 10 and 20; alone it says 5 and 5."""
    return TurnBatch(
        reward=[0.85] * 4 + [1.15] * 2, prompt=[0] * 6, rollout=[0] * 4 + [1] * 2, turn=[0, 0, 0, 0, 0, 0],
        order=[0, 1, 2, 3, 0, 1], agent=["lead", "searcher", "searcher", "lead", "lead", "lead"],
        tokens=[4, 10, 20, 6, 5, 5], caller=[None, 0, 0, None, None, None],
    )  # fmt: skip


def test_wideseek_weighs_agents_and_then_tokens(tmp_path):
    config = load("wideseek_r1").advantage
    weights = weights_of(config, rollouts_of_two())
    assert weights == pytest.approx([0.05, 1 / 60, 1 / 60, 0.05, 0.1, 0.1])
    assert [w * n for w, n in zip(weights, [4, 10, 20, 6, 5, 5], strict=True)] == pytest.approx(
        [0.2, 1 / 6, 1 / 3, 0.3, 0.5, 0.5]
    )
    four = TurnBatch(
        [0.85, 1.15, 0.0, 0.6], prompt=[0] * 4, rollout=[0, 1, 2, 3], agent=["lead"] * 4, turn=[0] * 4, order=[0] * 4,
        tokens=[1] * 4, caller=[None] * 4,
    )  # fmt: skip
    assert estimate_all(four, config).advantages.tolist() == pytest.approx([0.4097, 1.0242, -1.3314, -0.1024], abs=1e-4)


def test_each_searcher_that_wideseek_asks_at_once_is_an_agent(tmp_path):
    """The first rollout asks two searchers at once, one of which searches too, and is right. The second asks nobody."""
    pytest.importorskip("bm25s", reason="needs the extra search")

    def script(request):
        if request.ask.role == "worker":
            return "<search>bd</search>" if request.turn == 0 and request.ask.continues is None else "kr"
        if rollout_of(request) == 1:
            return "kr" if request.example.answer != "kr" else "bd"
        asks = "<ask_searcher>bd></ask_searcher><ask_searcher>kr></ask_searcher>"
        return request.example.answer if request.ask.continues is not None else asks

    values = recipe_values("wideseek_r1", tmp_path, 1, branching={"group": 2})
    batch = played(scripted_trainer(values, script))
    speakers = [sorted(u.agent for u in d.utterances) for d in batch.dialogues]
    assert speakers == [["lead", "lead", "searcher", "searcher", "searcher"], ["lead"]]
    found = rows(batch)
    shares = {}
    for row in found:
        u = row.utterance
        key = (row.dialogue.rollout, u.agent, u.turn if u.caller is not None else None)
        shares[key] = shares.get(key, 0.0) + row.weight * len(u.response_ids)
    assert shares == pytest.approx(
        {(0, "lead", None): 1 / 3, (0, "searcher", 0): 1 / 3, (0, "searcher", 1): 1 / 3, (1, "lead", None): 1.0}
    )
    first = {round(row.advantage, 4) for row in found if row.advantage > 0}
    assert len(first) == 1, "all turns of all agents of a rollout have one advantage"


def one_in_no_form(tmp_path, advantage, ppo):
    """A trainer of the recipe on one question. Of four rollouts, which ask two searchers each, one answers rightly in
    the form, one half rightly in the form, one rightly in no form, and one wrongly in the form."""
    pytest.importorskip("bm25s", reason="needs the extra search")
    ppo = {"response_length": 80, **ppo}
    values = recipe_values("wideseek_r1", tmp_path, 1, branching={"group": 4}, advantage=advantage, ppo=ppo)
    source = tmp_path / "questions.jsonl"
    values["task"] = {"name": "hotpotqa", "source": str(source), "eval_source": str(source)}
    paragraphs = [{"title": "Emma", "text": "By Jane Austen."}]
    source.write_text(json.dumps({"id": "one", "question": "Who?", "answer": "Jane Austen", "paragraphs": paragraphs}))
    ends = ["Answer: Jane Austen", "Answer: Austen", "It was Jane Austen", "Answer: Emma"]

    def script(request):
        if request.ask.role == "worker":
            return "By Jane Austen"
        asks = "<ask_searcher>who</ask_searcher><ask_searcher>when</ask_searcher>"
        return ends[rollout_of(request)] if request.ask.continues is not None else asks

    return scripted_trainer(values, script)


def trained_on(batch):
    """The rows of each rollout."""
    return [[row for row in rows(batch) if row.dialogue is d] for d in batch.dialogues]


@pytest.mark.parametrize("number", range(3))
def test_a_failure_is_told_by_its_score_and_not_by_its_kl(tmp_path, number):
    """The KL of each token, random from -1 to 1, counts 10 in the reward: still the third rollout alone has failed."""
    ppo = {"kl_coef": 10.0, "kl_in": "reward", "kl_estimator": "k1"}
    trainer = one_in_no_form(tmp_path, {"scale": "none"}, ppo)
    guess(trainer, lambda sample: (number, by_name(sample)))
    batch = played(trainer)
    assert [len(own) for own in trained_on(batch)] == [4, 4, 1, 4]
    assert any(abs(row.advantage) > 5 for row in rows(batch)), "the KL counts in what is compared"


def test_without_its_form_an_answer_earns_nothing_and_only_it_is_trained_on(tmp_path):
    """``wideseek_r1`` pays 1.1, 0.1 + F1, 0 and 0.1."""
    batch = played(one_in_no_form(tmp_path, {}, {}))
    paid = [{round(u.rewards["credit"], 4) for u in d.utterances} for d in batch.dialogues]
    assert paid == [{1.1}, {0.7667}, {0.0}, {0.1}]
    found = trained_on(batch)
    assert [sorted(row.utterance.agent for row in own) for own in found] == [["lead", "lead", "searcher", "searcher"]] * 2 + [
        ["lead"], ["lead", "lead", "searcher", "searcher"],
    ]  # fmt: skip
    assert found[2][0].utterance.text == "It was Jane Austen"
    assert [sum(row.weight * len(row.utterance.response_ids) for row in own) for own in found] == pytest.approx(
        [1.0] * 4
    )
    # mean 0.4917 and unbiased deviation 0.5294: the rollout without the form counts in both
    assert [own[0].advantage for own in found] == pytest.approx([1.1491, 0.5194, -0.9287, -0.7398], abs=2e-4)
    assert all(len({round(row.advantage, 6) for row in own}) == 1 for own in found)


def test_what_ends_a_failure_is_the_last_that_nobody_called():
    """Random rollouts in random order of rows: of one that earned nothing one row stays, and of the others all do."""
    rng = random.Random(0)
    config = AdvantageConfig("utterance", "mean", "std", ("prompt",), ("end_of_failures",), unit="rollout")
    for _ in range(30):
        table = []
        for rollout in range(4):
            reward = rng.choice((0.0, 0.1 + 0.2 - 0.3, 0.5))
            for order in range(rng.randint(1, 5)):
                called = order > 0 and rng.random() < 0.5
                table.append((reward, rollout, order, called))
        rng.shuffle(table)
        reward, rollout, order, called = map(list, zip(*table, strict=True))
        batch = TurnBatch(
            reward, prompt=[0] * len(table), rollout=rollout, order=order, caller=[-1 if c else None for c in called]
        )
        weights = estimate_all(batch, config).weights.tolist()
        for number in range(4):
            own = {order[i]: i for i in range(len(table)) if rollout[i] == number}
            last = max(place for place, i in own.items() if not called[i])
            stays = [place for place, i in own.items() if weights[i] > 0]
            assert sorted(stays) == (sorted(own) if reward[own[0]] == 0.5 else [last])


def test_where_callers_are_not_recorded_nobody_was_called():
    """In rollout 0, which earned nothing, one of two agents stays; in rollout 1 both have half, whatever number of
    turns they have."""
    columns = {
        "prompt": [0] * 6, "rollout": [0] * 3 + [1] * 3, "agent": ["a", "b", "a"] * 2, "turn": [0, 0, 1] * 2,
        "order": [0, 1, 2] * 2,
    }  # fmt: skip
    shares = {"equal_shares": {"of": "turns", "agents": "share", "calls": "apart"}}
    config = AdvantageConfig("utterance", "mean", "std", ("prompt",), ("end_of_failures", shares), unit="rollout")
    found = [
        estimate_all(TurnBatch([0.0] * 3 + [1.0] * 3, **columns, **more, tokens=[1] * 6), config).weights.tolist()
        for more in ({}, {"caller": [None] * 6})
    ]
    assert found == [[0.0, 0.0, 1.0, 0.25, 0.5, 0.25]] * 2


# -- PARL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("update", "expected"), [(1, 1.32), (51, 1.16), (101, 1.0), (200, 1.0)])
def test_parl_pays_less_and_less_for_starting_and_finishing(update, expected):
    """Three of five agents were started and all of them finished, and the result is right: 1 + (.2 .6 + .2 1)
    fading."""
    reward = load("parl").reward
    said = [Utterance(0, "lead", "lead", 0, 0, [], "", role="planner", rewards={"score": 0.0})]
    said += [
        Utterance(n, "searcher", "searcher", n - 1, 1, [], "", caller=0, rewards={"reply_form": 1.0}) for n in (1, 2, 3)
    ]
    said.append(Utterance(4, "lead", "lead", 0, 2, [], "", role="planner", rewards={"score": 1.0, "started": 0.6}))
    dialogue = Dialogue(Example("e", "q", "a"), said)
    credit_by_rules([dialogue], reward, update)
    assert said[-1].rewards["credit"] == said[0].rewards["credit"] == pytest.approx(expected)


def parl(tmp_path):
    """Rollout 0 asks two searchers at once, 1 asks one, whose reply lacks the form; both are right.

    2 asks nobody and is wrong.
    """
    pytest.importorskip("bm25s", reason="needs the extra search")

    def script(request):
        rollout = rollout_of(request)
        if request.ask.role == "worker":
            return "kr" if rollout else "Answer: kr"
        if rollout == 2:
            return request.example.meta["start"]
        asks = "<ask_searcher>bd></ask_searcher>" * (2 - rollout)
        return request.example.answer if request.ask.continues is not None else asks

    values = recipe_values("parl", tmp_path, branching={"group": 3}, training={"per_device_train_batch_size": 1})
    return scripted_trainer(values, script)


def test_parl_pays_the_orchestrator_alone(tmp_path):
    """Asking two at once takes three steps, as asking one does: 1 - .06 + .1 + .2, 1 - .06 + .05, and -.02."""
    trainer = parl(tmp_path)
    batch = played(trainer)
    assert [round(d.utterances[-1].rewards["credit"], 6) for d in batch.dialogues] == [1.24, 0.99, -0.02]
    found = rows(batch)
    assert {row.utterance.agent for row in found} == {"lead"}, "the searchers are frozen"
    assert [round(row.advantage, 4) for row in found] == [0.7545] * 2 + [0.3797] * 2 + [-1.1342]


def test_parl_fades_with_the_updates_of_the_trainer(tmp_path):
    trainer = parl(tmp_path)
    batch = trainer.collected()
    batch.number = 101
    scored = trainer.score(batch)
    assert [round(d.utterances[-1].rewards["credit"], 6) for d in scored.dialogues] == [0.94, 0.94, -0.02]


@pytest.mark.parametrize(("calls", "texts", "expected"), [(4, 0, 0.0), (4, 2, 0.5), (2, 2, 1.0), (1, 2, 1.0)])
def test_a_planner_that_asks_in_words_is_paid_for_its_calls_too(calls, texts, expected):
    protocol = CallReturn(calls=calls)
    play = protocol.play(Example("e", "q", "a"), ("lead", "searcher"))
    asks, said = next(play), []
    try:
        while True:
            calling = asks[0].role == "planner" and sum(u.agent == "lead" for u in said) < texts
            text = "<call>x</call>" if calling else "y"
            said.append(Utterance(len(said), asks[0].agent, "p", 0, len(said), [], text, role=asks[0].role))
            asks = play.send([said[-1]])
    except StopIteration:
        assert said[-1].rewards["started"] == expected


def test_a_fade_of_no_updates_is_refused(tmp_path):
    values = recipe_values("parl", tmp_path)
    values["reward"]["rules"][0]["mix"]["fade"] = 0
    with pytest.raises(ConfigError, match="fade: expected at least 1, got 0"):
        from_dict(values)
