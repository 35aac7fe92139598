"""MARS²'s tree of attempts: where Thompson sampling goes on, what shaping pays, and what an attempt is compared
with."""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
from scripted_dialogues import play_branches
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.config.schema import BranchingSection
from maporl.errors import ConfigError
from maporl.methods import tree_search
from maporl.methods.attempts import Attempts
from maporl.methods.mars2 import TreeMargin
from maporl.methods.tree_search import Node, drawn, parameters, where_to, who_speaks
from maporl.protocols import Chain
from maporl.types import Ask, Dialogue, Example, Utterance, user_says
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run


class Told:
    """An episode as a search sees it: how many steps it has, and whether it is over."""

    def __init__(self, steps, over=False):
        self.sent, self.over = [None] * steps, over


def tree_of(score, *children, over=False, depth=0):
    """A node of a search tree with children, each as ``(score, *children)``."""
    below = [tree_of(*child, depth=depth + 1) for child in children]
    return Node(Told(depth if over or not below else depth + 1, over), depth, score, below)


class Fixed(random.Random):
    """Draws of which the results are known: a gamma of 2, one deviation above the mean, and the arguments of a beta."""

    def gammavariate(self, alpha, beta):
        assert beta == 1.0
        self.alpha = alpha
        return 2.0

    def normalvariate(self, mu=0.0, sigma=1.0):
        return mu + sigma

    def betavariate(self, alpha, beta):
        return (alpha, beta)


def test_the_posteriors_by_hand():
    assert parameters([]) == (0, 1, 1, pytest.approx(0.1))
    # mean 1/2, squares 1/2: (0.1 + 0.5 + 2 * 0.25 / 3) / 3
    assert parameters([1, 0]) == pytest.approx((1 / 3, 3, 3, 0.255556), abs=1e-6)
    assert parameters([0.4, 0.6, 1.0]) == pytest.approx((0.5, 4, 4, 0.155), abs=1e-6)
    rng = Fixed()
    # a variance of 3 * 0.255556 / 2 / 2 = 0.191667, of which the mean has a third
    assert drawn([1, 0], "gaussian", rng) == pytest.approx(1 / 3 + 0.063889**0.5, abs=1e-5) and rng.alpha == 1.5
    assert drawn([1, 0.25], "beta", rng) == (1.75, 1.25) and drawn([], "beta", rng) == (0.5, 0.5)
    with pytest.raises(ConfigError, match=r"beta is for scores from 0 to 1, got 1\.5"):
        drawn([1.5], "beta", rng)


def test_where_a_search_goes_on_by_hand(monkeypatch):
    """In a tree of mars2 the root has the children 0.4 (with the children 1.0 and 0.2) and 0.6."""
    asked = []
    root = tree_of(0, (0.4, (1.0,), (0.2,)), (0.6,))

    def walk(*values):
        asked.clear()
        left = list(values)
        monkeypatch.setattr(tree_search, "drawn", lambda scores, how, rng: (asked.append(scores), left.pop(0))[1])
        node = where_to(root, "gaussian", None)
        assert not left
        return node

    first, second = root.children
    assert walk(0.5, 0.5) is root and asked == [[0.4, 0.6], [1.0, 0.2]]  # a draw goes to the new child
    # on, to the second, which has no children and gets one
    assert walk(0.1, 0.2, 0.3, 0.4) is second and asked[2:] == [[0.4, 1.0, 0.2], [0.6]]
    # on, to the first; there nothing follows its children yet
    assert walk(0.1, 0.2, 0.4, 0.3, 0.9, 0.8) is first and asked[4:] == [[1.0, 0.2], []]
    assert walk(0.1, 0.2, 0.4, 0.3, 0.7, 0.8, 0.2, 0.6) is first.children[1] and asked[6:] == [[1.0], [0.2]]


def test_a_dialogue_that_has_ended_gets_no_new_attempt(monkeypatch):
    root = tree_of(0, (0.4,), (0.6,))
    root.children[0].episode.over = True
    monkeypatch.setattr(tree_search, "drawn", lambda scores, how, rng: 1.0 if scores == [] else 0.5)
    assert where_to(root, "gaussian", None) is root.children[1]
    root.children[1].episode.over = True
    assert where_to(root, "gaussian", None) is root


def test_the_agent_that_has_earned_more_in_the_tree_speaks_more():
    rng = random.Random(0)
    chosen = Counter(who_speaks({"ann": [1.0] * 6, "bob": [0.0] * 6}, "gaussian", rng) for _ in range(400))
    assert chosen["ann"] > 390
    even = Counter(who_speaks({"ann": [], "bob": []}, "gaussian", rng) for _ in range(400))
    assert 160 < even["ann"] < 240
    state = rng.getstate()
    assert who_speaks({"ann": [1.0]}, "gaussian", rng) == "ann" and rng.getstate() == state


# -- what an attempt is paid ------------------------------------------------------------------------------------------


def said(dialogues):
    """Dialogues of names: equal names at the beginning of dialogues are one utterance."""
    return [
        Dialogue(
            Example("q", "?", "0"),
            [Utterance(i, "ann", "ann", i, i, [], name, sample=name) for i, name in enumerate(names)],
            rollout=rollout,
        )
        for rollout, names in enumerate(dialogues)
    ]


def credits_of(dialogues, scores, **options):
    own = [{u.id: scores[u.text] for u in d.utterances} for d in dialogues]
    shaped = TreeMargin(**options)(dialogues, own)
    found = {}
    for dialogue, credits in zip(dialogues, shaped, strict=True):
        for u in dialogue.utterances:
            assert found.setdefault(u.text, credits[u.id]) == credits[u.id]
    return found


def test_shaping_by_hand():
    """Children of the question with 0.4 and 0.6, and children of the first with 1.0 and 0.2."""
    tree, scores = said([("a", "c"), ("a", "d"), ("b",)]), {"a": 0.4, "b": 0.6, "c": 1.0, "d": 0.2}
    # a: 0.4 + 0.5 (0.4 - 0.6); c: b = (0.3 + 0.2) / 2, so 1 + 0.5 * 0.75; d: b = (0.3 + 1.0) / 2
    assert credits_of(tree, scores) == pytest.approx({"a": 0.3, "b": 0.7, "c": 1.375, "d": -0.025})
    assert credits_of(tree, scores, alpha=0.0) == scores
    assert credits_of(tree, scores, siblings=1.0) == pytest.approx({"a": 0.3, "b": 0.7, "c": 1.4, "d": -0.2})
    # an only child is compared with its parent, and an only child of the question with nothing
    assert credits_of(said([("a", "c")]), scores) == pytest.approx({"a": 0.4, "c": 1.3})


# -- through the trainer ----------------------------------------------------------------------------------------------


def mars2(tmp_path, script, group=8, questions=1, seed=0, posterior="gaussian"):
    sections = {"task": {"largest": 4}, "protocol": {"rounds": 8}, "ppo": {"response_length": 40}}
    branching = {"group": group, "posterior": posterior}
    values = recipe_values("mars2", tmp_path, questions, branching=branching, **sections)
    return played(scripted_trainer(values | {"seed": seed}, script))


def test_mars2_shapes_and_compares_a_tree_by_hand(tmp_path, monkeypatch):
    """Ann answers wrongly and bob rightly; then, after the wrong answer, bob right and ann wrong."""
    places = iter([lambda root: root, lambda root: root, *[lambda root: root.children[0]] * 2])
    speakers = iter(["ann", "bob", "bob", "ann"])
    known = []

    def next_speaker(own, how, rng):
        known.append({agent: [*scores] for agent, scores in own.items()})
        return next(speakers)

    monkeypatch.setattr(tree_search, "where_to", lambda root, how, rng: next(places)(root))
    monkeypatch.setattr(tree_search, "who_speaks", next_speaker)
    batch = mars2(tmp_path, lambda r: r.example.answer if r.ask.agent == "bob" else "99", group=4)
    assert known[-1] == {"ann": [0.0], "bob": [1.0, 1.0]}
    found = {(row.utterance.agent, len(row.utterance.parents)): row for row in rows(batch)}
    # -0.5 = 0 + (0 - 1)/2, 1.5 = 1 + (1 - 0)/2, 1.625 = 1 + (1 - (-0.5 + 0)/2)/2, -0.125 = 0 + (0 - (-0.5 + 1)/2)/2
    assert {key: row.utterance.rewards["credit"] for key, row in found.items()} == {
        ("ann", 0): -0.5, ("bob", 0): 1.5, ("bob", 1): 1.625, ("ann", 1): -0.125,
    }  # fmt: skip
    # minus the mean 0.625 of the tree, by its unbiased deviation 1.0945, over both agents and their policies
    assert {key: row.advantage for key, row in found.items()} == pytest.approx(
        {("ann", 0): -1.02787, ("bob", 0): 0.79946, ("bob", 1): 0.91367, ("ann", 1): -0.68525}, abs=1e-4
    )
    assert {row.policy for row in rows(batch)} == {"ann", "bob"}
    question = batch.dialogues[0].example.question
    (again,) = {found[key].utterance.messages[-1]["content"] for key in (("bob", 1), ("ann", 1))}
    assert again == f"{question}\n\nAn earlier answer:\n99\n\nIt is wrong. Answer again, better."
    assert all(len(row.utterance.messages) == 1 for row in rows(batch))  # nobody remembers anything else
    assert len(batch.dialogues) == 3 and sorted(len(d.utterances) for d in batch.dialogues) == [1, 2, 2]


def grown(dialogues):
    """For each question the parent, the agent and the text of each utterance of its tree."""
    found = defaultdict(set)
    for d in dialogues:
        before = None
        for u in d.utterances:
            name = u.sample or f"{d.rollout}.{u.id}"
            found[d.prompt].add((before, name, u.agent, u.text))
            before = name
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_search_makes_as_many_attempts_as_it_is_told_and_each_is_trained_on_once(tmp_path, seed):
    rng = random.Random(seed)
    guessed = lambda r: r.example.answer if rng.random() < 0.4 else str(50 + rng.randrange(9))  # noqa: E731
    batch = mars2(tmp_path, guessed, 7, 3, seed)
    trees = grown(batch.dialogues)
    assert {prompt: len(tree) for prompt, tree in trees.items()} == {0: 7, 1: 7, 2: 7}
    assert len(rows(batch)) == 21 and len({id(row.utterance) for row in rows(batch)}) == 21
    for tree in trees.values():
        assert len({name for _, name, _, _ in tree}) == 7  # one parent each
    for d in batch.dialogues:
        for u, v in zip(d.utterances, d.utterances[1:], strict=False):
            words = {1.0: "right", 0.0: "wrong"}[u.rewards["label"]]
            assert f"\n{u.text}\n\nIt is {words}." in v.messages[-1]["content"] and v.parents == (u.id,)
    earned = defaultdict(set)
    for row in rows(batch):
        earned[row.utterance.tags["state"], row.utterance.rewards["label"]].add(round(row.advantage, 4))
    groups = Counter(row.utterance.tags["state"] for row in rows(batch))
    assert all(len(values) == 1 for (state, _), values in earned.items() if groups[state] > 1)


def test_searches_differ_from_question_to_question_and_from_posterior_to_posterior(tmp_path):
    def trees(posterior):
        batch = mars2(tmp_path, lambda r: r.example.answer, 8, 4, posterior=posterior)
        return [{(before, name, agent) for before, name, agent, _ in tree} for tree in grown(batch.dialogues).values()]

    gaussian, beta = trees("gaussian"), trees("beta")
    assert any(tree != gaussian[0] for tree in gaussian[1:]) and gaussian != beta and gaussian == trees("gaussian")


def test_a_search_in_another_protocol_keeps_its_speakers_and_stops_at_its_end():
    def judge(dialogues):
        for d in dialogues:
            for u in d.utterances:
                u.rewards["score"] = 1.0
        return [0.0] * len(dialogues)

    got = play_branches(Chain(turns=1), BranchingSection(how="tree_search", group=9), judge=judge)
    for prompt in (0, 1):
        own = [d for d in got if d.prompt == prompt]
        assert {tuple(u.agent for u in d.utterances) for d in own} <= {("ann",), ("ann", "bob")}
        assert len({u.sample or f"{d.rollout}.{u.id}" for d in own for u in d.utterances}) == 9


@dataclass(frozen=True)
class Careless(Chain):
    """Says that anybody may speak, and asks agents in their conversations."""

    any_agent = True


def test_such_a_protocol_is_refused_before_models_load(tmp_path):
    """Also where nothing else is rehearsed in branches, because rows without others to be compared with are allowed."""
    values = recipe_values("mars2", tmp_path, advantage={"singleton": "zero"})
    check_run(from_dict(values, "test"))
    values["protocol"] = {"name": "test_tree_search:Careless"}
    with pytest.raises(ConfigError, match="it must ask one agent at a time, with fresh=True; it asks"):
        check_run(from_dict(values, "test"))


@dataclass(frozen=True)
class Astray(Attempts):
    """Asks for a second opinion of an agent that is not there, once an answer is right."""

    def play(self, example, agents):
        (draft,) = yield [Ask(agents[0], user_says(example.question), fresh=True)]
        if draft.text == example.answer:
            yield [Ask("zoe", user_says(draft.text), parents=(draft.id,), fresh=True)]


def test_an_agent_that_is_asked_and_does_not_play_is_named_before_models_load(tmp_path):
    values = recipe_values("mars2", tmp_path)
    values["protocol"] = {"name": "test_tree_search:Astray"}
    with pytest.raises(ConfigError, match="zoe"):
        check_run(from_dict(values, "test"))


def test_without_a_search_agents_attempt_in_turn_and_an_evaluation_has_one_attempt():
    got = play_branches(Attempts(rounds=3), BranchingSection(), agents=("ann", "bob"))
    assert [[u.agent for u in d.utterances] for d in got] == [["ann", "bob", "ann"]] * 2
    assert Attempts(rounds=3).in_evaluation() == Attempts(rounds=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": {"again": "{draft}"}}, "again: it must contain {verdict}"),
        ({"protocol": {"rounds": 0}}, "rounds: expected at least 1"),
        ({"branching": {"group": 1}}, "tree_search needs at least 2"),
        ({"branching": {"posterior": "uniform"}}, "branching.posterior"),
        ({"branching": {"how": "fork_every", "posterior": "beta"}}, "posterior: 'beta' is for how: tree_search, got"),
        (
            {"branching": {"posterior": "beta"}, "reward": {"sources": {"label": 1.0, "format": -0.1}}},
            "beta is for scores from 0 to 1, and an answer that is wrong, in the expected form scores -0.1 by",
        ),
        ({"reward": {"rules": ["last"]}}, "tree_search continues one candidate|what follows an answer"),
    ],
)
def test_a_search_that_cannot_be_run_is_refused(tmp_path, changes, words):
    values = recipe_values("mars2", tmp_path)
    for section, own in changes.items():
        values[section] = values[section] | own
    with pytest.raises(ValueError, match=words):
        from_dict(values, "test")
