"""What the recipes of teams that search really train on, through the trainer's own steps.

Every test reads the recipe's own file. The numbers were worked out by hand from the papers' formulas.
"""

import pytest
from recipe_runs import rollout_of
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.advantages import AdvantageConfig, TurnBatch, estimate
from maporl.errors import ConfigError
from maporl.methods.m_grpo import Align
from maporl.validation.load import from_dict

pytest.importorskip("bm25s", reason="needs the extra search")


def batch_of(name, tmp_path, group, script):
    return played(scripted_trainer(recipe_values(name, tmp_path, questions=1, branching={"group": group}), script))


def of(batch, agent):
    return [row for row in rows(batch) if row.utterance.agent == agent]


def test_dr_mas_compares_the_calls_of_each_agent_and_charges_for_unreadable_actions(tmp_path):
    """The first rollout is right. In the second the query, the verdict after it and the answer are unreadable."""

    def script(request):
        good, role = rollout_of(request) == 0, request.ask.role
        if role == "router":
            return "<verify>no</verify>" if not request.turn else "<verify>yes</verify>" if good else "?"
        if role == "searcher":
            return "<search>bd</search>" if good else "bd"
        return request.example.answer if good else "?"

    batch = batch_of("dr_mas_search", tmp_path, 2, script)
    credits = [[(u.agent, round(u.rewards["credit"], 6)) for u in d.utterances] for d in batch.dialogues]
    assert credits == [
        [("verifier", 1.0), ("searcher", 1.0), ("verifier", 1.0), ("answerer", 1.0)],
        [("verifier", 0.0), ("searcher", -0.01), ("verifier", -0.01), ("answerer", -0.01)],
    ]
    found = {agent: [row.advantage for row in of(batch, agent)] for agent in ("verifier", "searcher", "answerer")}
    assert found["verifier"] == pytest.approx([0.8660, 0.8660, -0.8574, -0.8746], abs=1e-4)
    assert found["searcher"] == found["answerer"] == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert [c.name for d in batch.dialogues for u in d.utterances for c in u.calls] == ["search", "search"]


def test_dr_mas_forces_no_answer_and_a_single_call_keeps_its_reward(tmp_path):
    """In the first rollout the router is never content. In the second it is so at once, and the answer is right."""

    def script(request):
        if request.ask.role == "router":
            return f"<verify>{'no' if rollout_of(request) == 0 else 'yes'}</verify>"
        return "<search>bd</search>" if request.ask.role == "searcher" else request.example.answer

    batch = batch_of("dr_mas_search", tmp_path, 2, script)
    first, second = batch.dialogues
    assert [u.agent[0] for u in first.utterances] == ["v", "s"] * 3 + ["v"] and first.outcome == "unanswered"
    assert [u.agent[0] for u in second.utterances] == ["v", "a"] and second.outcome == 0
    assert [{u.rewards["credit"] for u in d.utterances} for d in batch.dialogues] == [{0.0}, {1.0}]
    # mean .2 and unbiased standard deviation .4472 of five verdicts; three queries that earned alike; one answer alone
    found = {a: [round(row.advantage, 4) for row in of(batch, a)] for a in ("verifier", "searcher", "answerer")}
    assert found == {"verifier": [-0.4472] * 4 + [1.7889], "searcher": [0.0] * 3, "answerer": [1.0]}


def test_matpo_gives_all_segments_of_a_rollout_the_advantage_of_the_planner(tmp_path):
    """The first rollout asks and searches and is right. The second answers at once and is wrong."""

    def script(request):
        if request.ask.role == "worker":
            return f"Answer: {request.example.answer}" if request.ask.continues else "<search>bd</search>"
        if rollout_of(request) == 1:
            return request.example.meta["start"]
        return request.example.answer if request.ask.continues is not None else "<ask_searcher>bd></ask_searcher>"

    batch = batch_of("matpo_search", tmp_path, 2, script)
    assert [{round(u.rewards["credit"], 6) for u in d.utterances} for d in batch.dialogues] == [{1.0}, {0.05}]
    (tokens,) = batch.token_batches.values()
    assert tokens.rollouts == 2
    found = rows(batch)
    assert [row.utterance.agent for row in found] == ["planner", "searcher", "searcher", "planner", "planner"]
    assert [row.advantage for row in found] == pytest.approx([0.7071] * 4 + [-0.7071], abs=1e-4)
    lengths = [len(row.utterance.response_ids) for row in found]
    assert lengths == [33, 20, 11, 3, 3]
    # the sum over a turn's rows of weight times token mean is the token mean of the turn
    assert [row.weight for row in found] == pytest.approx([33 / 36, 20 / 31, 11 / 31, 3 / 36, 1])


def test_m_grpo_compares_the_main_agent_over_rollouts_and_the_searcher_over_its_turns(tmp_path):
    """Rewards 1 .1 .1 1 and 1, 3, 2, 2 calls, as in the recipe m_grpo. In the second rollout the searcher searches."""
    calls = [1, 3, 2, 2]

    def script(request):
        rollout, made = rollout_of(request), request.utterance
        if request.ask.role == "worker":
            return "<search>bd</search>" if rollout == 1 and request.ask.continues is None else "kr"
        done = made // 3 if rollout == 1 else made // 2  # a call, a search, a reply; or a call and a reply
        if done < calls[rollout]:
            return "<ask_searcher>bd></ask_searcher>"
        return request.example.answer if rollout in (0, 3) else request.example.meta["start"]

    batch = batch_of("m_grpo_search", tmp_path, 4, script)
    credits = [{round(u.rewards["credit"], 6) for u in d.utterances} for d in batch.dialogues]
    assert credits == [{1.0}, {0.1}, {0.1}, {1.0}]
    planner, searcher = of(batch, "planner"), of(batch, "searcher")
    assert [round(row.advantage, 4) for row in planner] == [0.8660] * 2 + [-0.8660] * 7 + [0.8660] * 3
    assert [round(row.advantage, 4) for row in searcher] == [0.9842] + [-0.9842] * 8 + [0.9842] * 2
    samples = [*batch.samples["planner"], *batch.samples["searcher"]]
    weights = {}
    for sample, row in zip(samples, [*planner, *searcher], strict=True):
        key = (sample.utterance.agent, sample.columns.values["rollout"], sample.utterance.turn)
        weights[key] = weights.get(key, 0.0) + row.weight
    assert [w for (agent, _, _), w in weights.items() if agent == "planner"] == pytest.approx([1.0] * 4)
    of_searcher = [w for (agent, _, _), w in weights.items() if agent == "searcher"]
    assert of_searcher == pytest.approx([8] + [8 / 3] * 3 + [4] * 4)
    tokens = batch.token_batches["searcher"]
    assert tokens.trajectory.tolist() == [0, 1, 1, 3, 3, 5, 5, 7, 8, 9, 10], "a turn with its search has one ratio"


class TestAlignedTurns:
    COLUMNS = {
        "prompt": [0] * 5, "rollout": [0, 0, 0, 0, 1], "agent": ["a"] * 5, "turn": [0, 0, 1, 2, 0], "order": [0, 1, 2, 3, 0],
        "caller": [9, 9, 9, 9, 9],
    }  # fmt: skip

    def test_the_rows_of_a_turn_count_as_one(self):
        batch = TurnBatch([1.0] * 5, **{**self.COLUMNS, "caller": [0] * 5})
        assert Align(to=3).weigh(batch).tolist() == [1.0, 1.0, 1.0, 1.0, 3.0]
        dropped = Align(how="drop", to=1).weigh(batch).tolist()
        assert dropped[0] == dropped[1] and sum(dropped[1:4]) == 1.0

    def test_a_turn_counts_as_often_as_its_rows_do(self):
        """Returns 1, 1 and 0 of three turns, which count 1, 1 and 2 times: the mean is .5, and not 2/3."""
        batch = TurnBatch(
            [1.0, 1.0, 1.0, 0.0], prompt=[0] * 4, rollout=[0, 0, 0, 1], agent=["a"] * 4, turn=[0, 0, 1, 0], order=[0, 1, 2, 0],
            caller=[3] * 4,
        )  # fmt: skip
        post = ({"align": {"to": 2}},)
        config = AdvantageConfig("utterance", "mean", "none", ("prompt",), post, unit="turn")
        assert estimate(batch, config).tolist() == pytest.approx([0.5, 0.5, 0.5, -0.5])

    @pytest.mark.parametrize("to", [1, 3])
    def test_in_a_debate_nobody_is_called_and_a_dialogue_counts_once(self, to, tmp_path):
        """Each agent has two turns in a dialogue."""
        values = recipe_values("marti_margin", tmp_path)
        values["advantage"] |= {"post": [{"align": {"to": to}}]}
        found = rows(played(scripted_trainer(values, lambda request: f"Answer: {rollout_of(request) + request.turn}")))
        assert len(found) > 4 and {row.utterance.turn for row in found} == {0, 1}
        assert {row.weight for row in found} == {0.5}


@pytest.mark.parametrize(
    ("ppo", "message"),
    [
        ({"aggregation": "sequence_sum"}, "ppo.aggregation: sequence_sum looks at each completion .* set ppo.aggregation: token_mean or sequence_mean"),
        ({"ratio": "sequence"}, "ppo.ratio: sequence looks at each completion .* set ppo.ratio: token or trajectory"),
    ],
)  # fmt: skip
def test_what_would_change_with_the_number_of_calls_is_refused(ppo, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        from_dict(recipe_values("m_grpo_search", tmp_path, ppo=ppo))
