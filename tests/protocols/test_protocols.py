"""Protocols besides debate, played by scripts: who speaks when, sees what, and what is credited."""

from dataclasses import dataclass

import pytest
from scripted_dialogues import credited, play

from maporl import GSM8K
from maporl.errors import ConfigError
from maporl.protocols import CallReturn, Chain, Collaboration, PlayGame, Protocol, Refine
from maporl.tasks import Episodes
from maporl.types import Ask, user_says
from maporl.validation.load import from_dict


def test_a_chain_shows_all_that_was_said_since_one_last_spoke():
    chain = Chain(turns=2, later="{others}|{question}", quote="{name}={text}", separator=",")
    dialogue, prompts = play(chain, {"ann": ["1", "4"], "bob": ["2", "5"], "cy": ["3", "4"]}, ("ann", "bob", "cy"))
    assert [h for _, h in prompts] == [
        "2+2=", "ann=1|2+2=", "ann=1,bob=2|2+2=", "bob=2,cy=3|2+2=", "cy=3,ann=4|2+2=", "ann=4,bob=5|2+2=",
    ]  # fmt: skip
    assert [u.parents for u in dialogue.utterances] == [(), (0,), (0, 1), (1, 2), (2, 3), (3, 4)]
    assert credited(dialogue, ({"last": {"to": "itself"}},)) == [0, 0, 0, 0, 0, 1]


def test_a_chain_may_show_the_predecessor_or_a_graph_and_only_the_last_may_answer():
    order = {"order": ("cy", "ann", "bob"), "later": "{others}", "quote": "{text}", "separator": ","}
    script = {"ann": ["a"], "bob": ["4"], "cy": ["c"]}
    agents = ("ann", "bob", "cy")
    assert play(Chain(**order, visibility="predecessor"), script, agents)[1] == [
        ("cy", "2+2="),
        ("ann", "c"),
        ("bob", "a"),
    ]
    graph = Chain(**order, visibility="graph", sees={"bob": ("cy",)}, answering="last")
    dialogue, prompts = play(graph, script, agents)
    assert prompts == [("cy", "2+2="), ("ann", "2+2="), ("bob", "c")]
    assert [u.answers for u in dialogue.utterances] == [False, False, True]
    assert credited(dialogue, ("back_propagate",)) == [1.0, None, 1.0]  # nobody was shown what ann said
    assert not dialogue.utterances[1].trainable


def test_a_collaborator_hints_and_is_paid_what_the_actor_earns():
    texts = {"hint": "hint? {question}", "with_hint": "{question} hint: {words}"}
    dialogue, prompts = play(Collaboration(**texts), {"ann": ["add them"], "bob": ["4"]})
    assert prompts == [("ann", "hint? 2+2="), ("bob", "2+2= hint: add them")]
    assert credited(dialogue, ("last",)) == [1.0, 1.0]
    assert credited(dialogue, ()) == [1.0, 1.0]
    assert dialogue.turns() == 1


def test_a_collaborator_criticises_between_two_answers():
    texts = {"critique": "{draft}?", "revise": "{words}!"}
    protocol = Collaboration(mode="critic", collaborator="bob", **texts)
    dialogue, prompts = play(protocol, {"ann": ["5", "4"], "bob": ["too much"]})
    assert prompts == [("ann", "2+2="), ("bob", "5?"), ("ann", "too much!")]
    assert [u.answers for u in dialogue.utterances] == [True, False, True]
    assert credited(dialogue, ("last",)) == [1.0, 1.0, 1.0]
    assert protocol.turns == dialogue.turns() == 2


@pytest.mark.parametrize(
    ("verdicts", "spoken", "outcome"),
    [
        (["<verify>approve</verify>"], "sv", "approved"),
        (["wrong <verify>reject</verify>", "<verify> Approve </verify>"], "svsv", "approved"),
        (["I do not know", "no verdict"], "svsvs", None),
    ],
)
def test_refining_ends_with_an_approval_and_silence_is_none(verdicts, spoken, outcome):
    dialogue, prompts = play(
        Refine(rounds=2, verify="{draft}?", mend="{words}!"), {"ann": ["5", "3", "4"], "bob": verdicts}
    )
    assert "".join({"ann": "s", "bob": "v"}[a] for a, _ in prompts) == spoken
    assert dialogue.outcome == outcome
    assert {u.role for u in dialogue.utterances if u.agent == "ann"} == {"solver"}
    forms = [u.rewards["verdict_form"] for u in dialogue.utterances if u.agent == "bob"]
    assert forms == [float("<verify>" in verdict) for verdict in verdicts]


def test_a_third_agent_may_refine():
    refine = Refine(solver="ann", verifier="bob", refiner="cy", rounds=1)
    _, prompts = play(refine, {"ann": ["5"], "bob": ["no"], "cy": ["4"]}, ("ann", "bob", "cy"))
    assert [a for a, _ in prompts] == ["ann", "bob", "cy"]


def test_a_planner_calls_workers_as_often_as_it_likes_and_they_inherit():
    script = {"ann": ["<call>what is 2?</call>", "<call> and + ? </call>", "4"], "bob": ["two"], "cy": ["plus"]}
    protocol = CallReturn(plan="{question}", returned="said {reply}")
    dialogue, prompts = play(protocol, script, ("ann", "bob", "cy"))
    assert prompts == [
        ("ann", "2+2="),
        ("bob", "what is 2?"),
        ("ann", "said two"),
        ("cy", "and + ?"),
        ("ann", "said plus"),
    ]
    assert dialogue.outcome == 2 and [u.answers for u in dialogue.utterances] == [False, False, False, False, True]
    assert [u.caller for u in dialogue.utterances] == [None, 0, None, 2, None]
    assert credited(dialogue, ("last", "inherit")) == [1.0] * 5


def test_a_planner_that_never_stops_calling_is_told_to_answer():
    protocol = CallReturn(calls=1, plan="{question}", enough="last: {reply}")
    dialogue, prompts = play(protocol, {"ann": ["<call>x</call>", "<call>y</call>"], "bob": ["two"]})
    assert prompts[-1] == ("ann", "last: two") and dialogue.utterances[-1].answers


def test_a_game_pays_the_last_move_of_each_and_grades_all():
    moves = {"ann": ["1", "2", "3"], "bob": ["4", "5"]}
    game = PlayGame("tictactoe", prompt="{observation} ({moves})")
    dialogue, prompts = play(game, moves, task=Episodes(), example=Episodes()[0])
    assert prompts[0][1] == "X ___/___/___ (1, 2, 3, 4, 5, 6, 7, 8, 9)"
    assert [u.rewards["env"] for u in dialogue.utterances] == [0, 0, 0, -1, 1]
    assert dialogue.outcome == {"ann": 1.0, "bob": -1.0}
    assert [u.grade.correct for u in dialogue.utterances] == [True, False, True, False, True]
    assert {u.tags["game"] for u in dialogue.utterances} == {"tictactoe"}
    assert credited(dialogue, ("zero_sum",), {"env": 1.0}, Episodes()) == [2, -2, 2, -2, 2]


def test_an_illegal_move_ends_a_game_at_its_authors_cost():
    dialogue, _ = play(PlayGame("tictactoe"), {"ann": ["1"], "bob": ["1"]}, task=Episodes(), example=Episodes()[0])
    assert dialogue.outcome == "illegal"
    assert [u.rewards["env"] for u in dialogue.utterances] == [0.5, -1.5]
    assert [u.grade.correct for u in dialogue.utterances] == [None, False]


def test_players_of_a_simultaneous_game_move_at_once():
    dialogue, _ = play(PlayGame("prisoners_dilemma", {"rounds": 2}), {"ann": ["A", "B"], "bob": ["B", "B"]}, task=Episodes(), example=Episodes()[0])  # fmt: skip
    assert [u.order for u in dialogue.utterances] == [0, 0, 1, 1]
    assert [u.rewards["env"] for u in dialogue.utterances] == [0.0, 1.0, 0.2, 0.2]


BASE = {"output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": {"tiny": {}}, "bob": {"tiny": {}}}}
EPISODES = {"task": {"name": "episodes"}, "reward": {"sources": {"env": 1}, "rules": ["own"]}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": {"name": "chain", "order": ["ann", "cy"]}}, "agent: unknown 'cy'; known: ann, bob"),
        ({"protocol": {"name": "chain", "visibility": "graph"}}, r"sees: .*goes with visibility: graph"),
        ({"protocol": {"name": "collaboration", "agents": ["ann"]}}, r"needs two agents, got \['ann'\]"),
        ({"protocol": {"name": "collaboration", "with_hint": "{question}"}}, r"with_hint: it must contain \{words\}"),
        ({"protocol": {"name": "refine", "approval": "("}}, r"approval: '\(' is not a regular expression"),
        ({"protocol": {"name": "call_return", "pattern": "x"}}, r"pattern: expected one group"),
        ({"protocol": {"name": "game", "game": "chess"}, **EPISODES}, r"game: unknown 'chess'"),
        ({"protocol": {"name": "game", "options": {"size": 3}}, **EPISODES}, r"options: unknown key 'size'"),
        ({"protocol": {"name": "game", "agents": ["ann"]}, **EPISODES}, r"tictactoe has 2 players but agents are \['ann'\]"),
        ({"protocol": {"name": "game"}, "task": {"name": "episodes"}, "reward": {"sources": {"labl": 1}}}, r"unknown 'labl'; did you mean 'label'"),
        ({"reward": {"rules": ["inherit"]}}, r"inherit .* protocol 'debate' records no callers"),
        ({"reward": {"rules": ["own"], "bonus": {"alpha": [1, 1, 1, 1]}}}, r"bonus goes with horizon"),
        ({"advantage": {"returns": "utterance", "baseline": "mean", "key": ["prompt", "game"]}, "branching": {"group": 2}}, r"advantage\.key: names the column 'game'"),
        ({"advantage": {"returns": "utterance", "baseline": "mean", "key": ["prompt"], "post": ["broadcast_to_callees"]}}, r"broadcast_to_callees names the column 'caller'"),
        ({"advantage": {"returns": "utterance", "baseline": "ema", "scale": "none", "key": ["prompt"]}}, "and no 'prompt' comes again"),
        ({"advantage": {"returns": "token_gae", "baseline": "mean"}}, r"token_gae goes with baseline critic or none"),
        ({"advantage": {"returns": "chain_gae", "baseline": "none"}}, r"needs a critic's values"),
        ({"advantage": {"returns": "turn_gae"}, "training": {"critic": "none"}}, r"agent 'ann' has none"),
        ({"advantage": {"post": ["drop_zeros"]}}, r"need one number per utterance"),
        ({"advantage": {"returns": "utterance", "baseline": "mean", "key": ["prompt", "agent"], "post": ["drop_zeroes"]}}, r"advantage\.post: unknown 'drop_zeroes'; did you mean 'drop_zeros'"),
        ({"branching": {"how": "tree", "group": 4}, "protocol": {"name": "collaboration"}}, r"steps that nothing scores yet"),
        ({"branching": {"how": "fork_every"}}, r"fork_every needs at least 2"),
        ({"branching": {"joint": "cross", "group": 2}}, "cross combines answers of forked steps"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused_before_anything_loads(change, message):
    with pytest.raises(ConfigError, match=message):
        from_dict({**BASE, **change})


def test_the_check_warns_of_prompts_that_a_tiny_model_cannot_read(tmp_path):
    from maporl.validation.preflight import check_run

    def lines(prompt):
        agents = {name: {"tiny": {"alphabet": "JQK pb"}} for name in ("ann", "bob")}
        protocol = {"name": "game", "game": "kuhn_poker", "prompt": prompt}
        config = from_dict({**BASE, **EPISODES, "output_dir": str(tmp_path), "agents": agents, "protocol": protocol, "ppo": {"response_length": 2}})  # fmt: skip
        return [line for line in check_run(config) if line.startswith("warning")]

    assert lines("{observation}") == []
    (warning,) = lines("x{observation}y")
    assert "agents.ann.tiny.alphabet: its prompts have characters that it lacks, 'xy'" in warning


@dataclass(frozen=True)
class Planned(Protocol):
    """A planner reads the bare question, and a solver the question with the task's instruction."""

    def play(self, example, agents):
        (plan,) = yield [Ask(agents[0], user_says(example.bare_question), answers=False)]
        yield [Ask(agents[1], user_says(f"{plan.text}|{example.question}"), parents=(plan.id,))]


def test_a_protocol_has_the_question_with_the_instruction_and_without_it(tmp_path):
    file = tmp_path / "sums.jsonl"
    file.write_text('{"question": "How many?", "answer": "#### 4"}\n')
    task = GSM8K(source=str(file), instruction="{question} Answer: <number>")
    dialogue, prompts = play(Planned(), {"ann": ["count"], "bob": ["Answer: 4"]}, task=task, example=task[0])
    assert prompts == [("ann", "How many?"), ("bob", "count|How many? Answer: <number>")]
    assert dialogue.example == task[0] and task[0].bare_question == "How many?"
