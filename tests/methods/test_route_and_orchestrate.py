"""The protocols route and orchestrate, played by hand and trained: what they ask, what they do, and what they are
sent."""

import pytest
from scripted_dialogues import TEAM, Game
from scripted_training import recipe_values

from maporl import Orchestrate, Route
from maporl.errors import refuse
from maporl.rollout import made_up
from maporl.run import ResolvedRun
from maporl.types import Act, Result
from maporl.validation import rehearsal
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from maporl.validation.rehearsal import Rehearsal

BARE = {
    "route": "{question}|{passages}",
    "search": "{question}|{passages}|{verdict}",
    "answer": "{question}|{passages}",
}


class TestRoute:
    def test_two_searches_and_an_answer(self):
        game = Game(
            Route(**BARE, found="{step} {query}: {text}", nothing="-"),
            TEAM,
            ["<verify>no</verify>", "I want <search> Emma author </search>", "No.", "Jane Austen born", "<Verify> YES </verify>", "Answer: Jane Austen"],
            [Result("[1] Emma: a novel."), Result("no such tool", error="unknown")],
        )  # fmt: skip
        assert [(ask.agent, ask.role, ask.parents, ask.answers, ask.fresh) for ask in game.asks] == [
            ("ann", "router", (), False, True),
            ("bob", "searcher", (0,), False, True),
            ("ann", "router", (1,), False, True),
            ("bob", "searcher", (1, 2), False, True),
            ("ann", "router", (1, 3), False, True),
            ("cy", "answerer", (1, 3, 4), True, True),
        ]
        first, both = "1 Emma author: [1] Emma: a novel.", "2 Jane Austen born: no such tool"
        known = ["-", "-", first, first, f"{first}\n\n{both}", f"{first}\n\n{both}"]
        told = ["", "|<verify>no</verify>", "", "|No.", "", ""]
        assert game.texts() == [f"Who wrote Emma?|{passages}{said}" for passages, said in zip(known, told, strict=True)]
        assert game.acts == [
            Act("bob", "search", {"query": "Emma author"}, of=1),
            Act("bob", "search", {"query": "Jane Austen born"}, of=3),
        ]
        assert game.outcome == 2
        forms = [said.rewards.get("route_form") for said in game.utterances]
        assert forms == [1.0, 1.0, 0.0, 0.0, 1.0, None]

    def test_the_tool_that_it_calls_is_declared(self):
        assert Route().uses_tools == {"search"} and Route(tool="find").uses_tools == {"find"}
        assert Route(place="library").uses_tools == frozenset()

    def test_the_answerer_may_be_shown_the_verdict(self):
        texts = BARE | {"answer": "{question}{passages}{verdict}"}
        game = Game(Route(**texts, steps=1), TEAM, ["Enough. <verify>yes</verify>", "x"])
        assert game.texts()[1].endswith("Enough. <verify>yes</verify>")

    def test_the_answerer_answers_after_the_last_search(self):
        game = Game(Route(steps=1, **BARE), TEAM, ["?", "q", "x"], [Result("found")])
        assert [ask.role for ask in game.asks] == ["router", "searcher", "answerer"] and game.outcome == 1
        assert game.asks[-1].parents == (1,)

    def test_nobody_has_to_answer(self):
        route, said = Route(steps=2, at_end="stop", **BARE), ["<verify>no</verify>", "q", "?"]
        game = Game(route, TEAM, said, [Result("found")])
        assert [ask.role for ask in game.asks] == ["router", "searcher", "router"] and game.outcome == "unanswered"
        game = Game(route, TEAM, [*said[:2], "<verify>yes</verify>", "x"], [Result("f")])
        assert [ask.role for ask in game.asks][2:] == ["router", "answerer"] and game.outcome == 1

    @pytest.mark.parametrize(("said", "earned"), [("<verify>maybe</verify>", 1.0), ("<verify>yes", 0.0)])
    def test_a_form_of_its_own(self, said, earned):
        game = Game(Route(steps=1, form="<verify>.*</verify>", **BARE), TEAM, [said, "q", "x"], [Result("f")])
        assert game.utterances[0].rewards == {"route_form": earned}

    def test_yes_and_no_at_once_is_no(self):
        game = Game(Route(steps=1, **BARE), TEAM, ["<verify>yes</verify><verify>no</verify>", "q", "x"], [Result("f")])
        assert game.utterances[0].rewards == {"route_form": 0.0} and len(game.acts) == 1

    def test_nothing_is_looked_up_if_enough_is_known(self):
        game = Game(Route(), TEAM, ["<verify>yes</verify>", "x"])
        assert game.outcome == 0 and game.acts == [] and game.asks[1].parents == (0,)
        assert game.texts()[1] == "Who wrote Emma?\n\nNothing was looked up yet.\n\nAnswer the question."

    def test_options_choose_the_agents_and_the_tool(self):
        called = {"tool": "find", "place": "library", "argument": "words", "query": "(?s)q=(.*)"}
        route = Route(router="cy", answerer="ann", enough="YES", more="NO", **called)
        game = Game(route, TEAM, ["NO", "q= x", "YES", "y"], [Result("f")])
        assert [ask.agent for ask in game.asks] == ["cy", "bob", "cy", "ann"] and route.mentioned() == {"cy", "ann"}
        assert game.acts == [Act("bob", "find", {"words": "x"}, of=1, place="library")]

    def test_braces_in_what_was_found_are_text(self):
        said = ["<verify>no</verify>", "{x}", "<verify>yes</verify>", "y"]
        game = Game(Route(**BARE), TEAM, said, [Result("{question}")])
        assert "Step 1, found for {x}:\n{question}" in game.texts()[-1]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": 0}, "steps: expected a whole number of at least 1, got 0"),
            ({"router": "ann", "searcher": "ann"}, r"expected three agents, got \['ann', 'ann'\]"),
            ({"search": "{question}{passages}"}, r"search: it must contain \{verdict\}"),
            ({"route": "{question}{passages}{verdict}"}, "route: it may use"),
            ({"found": "{query}"}, r"found: it must contain \{text\}"),
            ({"query": "x"}, "query: expected one group"),
            ({"enough": "("}, "enough: .* is not a regular expression"),
            ({"form": "("}, "form: .* is not a regular expression"),
            ({"at_end": "never"}, "at_end"),
            ({}, "route needs three agents"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            Route(**options).check_players(("ann", "bob"))


TEXTS = {
    "plan": "{question}|{memory}|{agents}",
    "work": "{question}|{memory}|{task}",
    "check": "{question}|{memory}",
    "answer": "{question}|{memory}",
    "done": "{step} {agent} {task}: {text}",
    "nothing": "-",
    "unknown": "nobody",
}


class TestOrchestrate:
    def test_a_planner_a_verifier_and_a_generator_share_a_memory(self):
        game = Game(
            Orchestrate(**TEXTS, verifier="vic", generator="gus", end=None),
            ("ann", "bob", "cy", "vic", "gus"),
            ["I take <next>eve: x</next> <next> bob : find {it} </next>", "It is 3.", "no", "<next>end</next>", "no", "<next>cy</next>", "4", "<verify>STOP</verify>", "4!"],
        )  # fmt: skip
        assert [(ask.agent, ask.role, ask.parents, ask.caller, ask.answers, ask.fresh) for ask in game.asks] == [
            ("ann", "orchestrator", (), None, False, True),
            ("bob", "worker", (0,), 0, False, True),
            ("vic", "verifier", (0, 1), None, False, True),
            ("ann", "orchestrator", (0, 1, 2), None, False, True),
            ("vic", "verifier", (0, 1, 3), None, False, True),
            ("ann", "orchestrator", (0, 1, 3, 4), None, False, True),
            ("cy", "worker", (0, 1, 3, 5), 5, False, True),
            ("vic", "verifier", (0, 1, 3, 5, 6), None, False, True),
            ("gus", "generator", (0, 1, 3, 5, 6, 7), None, True, True),
        ]
        one, two, three = "1 bob find {it}: It is 3.", "2 end : nobody", "3 cy : 4"
        memories = ["-", "-", one, one, f"{one}\n\n{two}", f"{one}\n\n{two}", f"{one}\n\n{two}"]
        memories += [f"{one}\n\n{two}\n\n{three}"] * 2
        tails = ["|bob, cy", "|find {it}", "", "|bob, cy", "", "|bob, cy", "|", "", ""]
        assert game.texts() == [f"Who wrote Emma?|{m}{tail}" for m, tail in zip(memories, tails, strict=True)]
        costs = [round(u.rewards["step_cost"], 4) for u in game.utterances if u.agent == "ann"]
        assert costs == [0.3219, 0.585, 0.8074], "log2 of 5/4, 6/4 and 7/4"
        assert game.outcome == 3 and all(u.settles == () for u in game.utterances)

    def test_the_orchestrator_ends_and_the_last_reply_is_the_answer(self):
        game = Game(Orchestrate(**TEXTS), TEAM, ["<next>end</next>", "<next>cy: go</next>", "4", "<next>end</next>"])
        told = [(ask.agent, ask.answers) for ask in game.asks]
        assert told == [("ann", False), ("ann", False), ("cy", True), ("ann", False)], "nobody had acted at first"
        assert game.outcome == 2 and game.utterances[3].settles == (2,)
        assert round(game.utterances[3].rewards["step_cost"], 4) == 0.8074

    def test_somebody_answers_if_nobody_was_named(self):
        game = Game(Orchestrate(**TEXTS, steps=2), TEAM, ["?", "<next>dan</next>", "4"])
        assert [(ask.agent, ask.answers, ask.parents) for ask in game.asks][2:] == [("bob", True, (0, 1))]
        assert game.texts()[2] == "Who wrote Emma?|1  : nobody\n\n2 dan : nobody|" and game.outcome == 2

    def test_what_ends_a_dialogue_without_a_generator_has_the_credit_of_the_answer(self):
        protocol = Orchestrate(**TEXTS, verifier="vic")
        stop = Game(protocol, ("ann", "bob", "vic"), ["<next>bob</next>", "4", "<verify>stop</verify>"])
        assert stop.utterances[2].settles == (1,) and stop.outcome == 1
        unknown = Game(Orchestrate(**TEXTS, steps=2), TEAM, ["<next>bob</next>", "4", "?"])
        assert unknown.utterances[2].settles == (1,) and unknown.outcome == 2

    def test_a_pattern_may_find_a_name_alone(self):
        protocol = Orchestrate(orchestrator="cy", pattern="(ann|bob)", work="{question}", steps=1)
        game = Game(protocol, TEAM, ["ann or bob", "4"])
        assert [ask.agent for ask in game.asks] == ["cy", "bob"] and protocol.mentioned() == {"cy"}
        assert protocol.turns == 1 and Orchestrate(generator="ann").turns == 1 and Orchestrate(steps=5).turns == 5

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": 0}, "steps: expected a whole number of at least 1, got 0"),
            ({"verifier": "ann", "generator": "ann"}, r"expected different agents, got \['ann', 'ann'\]"),
            ({"pattern": "x"}, "pattern: expected a group around the name"),
            ({"plan": "{question}"}, r"plan: it must contain \{memory\}"),
            ({"work": "{question}"}, r"work: it must contain \{task\}"),
            ({"check": "{memory}"}, r"check: it must contain \{question\}"),
            ({"answer": "{question}"}, r"answer: it must contain \{memory\}"),
            ({"done": "{agent}"}, r"done: it must contain \{text\}"),
            ({"stop": "("}, "stop: .* is not a regular expression"),
            ({"end": " "}, "end: expected a word that the orchestrator can say, such as end, or null, got ' '"),
            ({"end": "the end"}, "end: of 'the end' the pattern reads 'the' as the name, so that it would never end"),
            ({"generator": "bob"}, r"an agent that can be named, got \['ann', 'bob'\]"),
            ({"end": "bob"}, "end: 'bob' is an agent too"),
        ],
    )
    def test_wrong_options_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            Orchestrate(**options).check_players(("ann", "bob"))


def test_the_check_of_a_long_orchestration_plays_its_first_steps(tmp_path, monkeypatch):
    """Six steps of two, and then a planner that never ends: the check says how much of it was played."""
    monkeypatch.setattr(made_up, "MOST_STEPS", 12)
    for steps, cut in ((3, False), (1000, True)):
        values = recipe_values("flow_grpo", tmp_path, protocol={"steps": steps}) | {"warm_start": {"steps": 0}}
        lines = check_run(from_dict(values, "test"))
        assert any("steps, the most that are rehearsed" in line for line in lines) == cut


def test_a_role_that_is_misspelt_is_named(tmp_path):
    values = recipe_values("dr_mas", tmp_path)
    for role, lines in (("verifer", 1), ("another", 0)):
        values["reward"]["rules"][1]["mix"]["roles"] = ["verifier", role]
        found = refuse(rehearsal.findings(Rehearsal(ResolvedRun(from_dict(values, "test")))))
        assert len(found) == lines
        assert all(
            "mix pays the role 'verifer', which nobody had in three rehearsals; did you mean 'verifier'" in line
            for line in found
        )
