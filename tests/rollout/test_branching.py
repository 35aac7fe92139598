"""Branching: which utterances dialogues share, and that a fork continues exactly as its trunk would have."""

import itertools

import pytest
from scripted_dialogues import EXAMPLES, TASK, play_branches

from maporl import Debate
from maporl.config.schema import BranchingSection
from maporl.engines.scripted import ScriptedEngine
from maporl.methods.forum import Forum
from maporl.protocols import Chain, PlayGame
from maporl.rollout.branching import play_branched
from maporl.rollout.driver import RolloutDriver
from maporl.rollout.episode import SpeakerSpec
from maporl.tasks import Episodes
from maporl.types import Example
from trl_ext.ppo.options import Decoding


def words(dialogue):
    return [u.text for u in dialogue.utterances]


def test_independent_dialogues_share_nothing():
    got = play_branches(Debate(turns=2), BranchingSection(group=3))
    assert [(d.prompt, d.rollout, d.example.id) for d in got] == [
        (p, r, i) for p, i in ((0, "e"), (1, "f")) for r in range(3)
    ]
    texts = [t for d in got for t in words(d)]
    assert len(set(texts)) == len(texts) == 24
    assert all(u.sample is None and "state" not in u.tags for d in got for u in d.utterances)


def test_a_fork_before_the_first_step_is_a_group_of_whole_dialogues():
    got = play_branches(Debate(turns=1), BranchingSection(how="fork_first", group=3))
    assert [(d.prompt, d.rollout) for d in got] == [(p, r) for p in range(2) for r in range(3)]
    assert len({t for d in got for t in words(d)}) == 12
    assert {u.tags["state"] for d in got[:3] for u in d.utterances} == {"question 0, step 0"}


def test_a_fork_at_a_random_step_shares_what_came_before_it():
    got = play_branches(Chain(turns=4), BranchingSection(how="fork_random", group=3), [*EXAMPLES] * 4)
    depths = set()
    for prompt in range(8):
        group = [d for d in got if d.prompt == prompt]
        assert [d.rollout for d in group] == [0, 1, 2]
        shared = [u.sample for u in group[0].utterances if u.sample is not None]
        depths.add(len(shared))
        for d in group:
            assert [u.sample for u in d.utterances[: len(shared)]] == shared
            assert all(u.sample is None for u in d.utterances[len(shared) :])
            assert words(d)[: len(shared)] == words(group[0])[: len(shared)]
        assert len({words(d)[len(shared)] for d in group}) == 3
        assert len({d.utterances[len(shared)].tags["state"] for d in group}) == 1
        assert [len(d.utterances) for d in group] == [8] * 3
    assert len(depths) > 2


def test_forking_every_step_makes_a_tree():
    got = play_branches(
        Chain(turns=1), BranchingSection(how="fork_every", group=2), EXAMPLES[:1], agents=("ann", "bob", "cy")
    )
    assert [d.rollout for d in got] == list(range(8))
    for depth, distinct in ((0, 2), (1, 4), (2, 8)):
        assert len({words(d)[depth] for d in got}) == distinct
    for a, b in itertools.combinations(got, 2):
        for u, v in zip(a.utterances, b.utterances, strict=True):
            assert (u.text == v.text) == (u.sample is not None and u.sample == v.sample)


def test_simultaneous_answers_may_be_crossed():
    aligned = play_branches(Debate(turns=1), BranchingSection(how="fork_every", group=2), EXAMPLES[:1])
    assert len(aligned) == 2 and len({t for d in aligned for t in words(d)}) == 4
    crossed = play_branches(Debate(turns=1), BranchingSection(how="fork_every", group=2, joint="cross"), EXAMPLES[:1])
    assert len(crossed) == 4
    ann, bob = ({words(d)[speaker] for d in crossed} for speaker in (0, 1))
    assert len(ann) == len(bob) == 2
    assert {tuple(words(d)) for d in crossed} == set(itertools.product(sorted(ann), sorted(bob)))
    by_sample = {(u.sample, u.text) for d in crossed for u in d.utterances}
    assert len(by_sample) == 4
    longer = play_branches(Debate(turns=2), BranchingSection(how="fork_every", group=2, joint="cross"), EXAMPLES[:1])
    assert len(longer) == 16 and len({d.rollout for d in longer}) == 16
    for d in longer:  # the second turn quotes exactly the first turn of its own branch
        assert words(d)[1] in d.utterances[2].messages[-1]["content"]


def test_a_tree_of_candidates_goes_on_with_the_best():
    """There are four candidates at each of three steps, and the judge prefers the third one."""

    def judge(dialogues):
        assert all(len(dialogue.utterances) == 1 for dialogue in dialogues)
        return [float(number % 4 == 2) for number in range(len(dialogues))]

    got = play_branches(
        Chain(turns=3), BranchingSection(how="tree", group=4), EXAMPLES[:1], judge=judge, agents=("ann",)
    )
    assert len(got) == 3 + 3 + 4
    assert sorted(len(d.utterances) for d in got) == [1] * 3 + [2] * 3 + [3] * 4
    main = next(d for d in got if len(d.utterances) == 3 and d.utterances[-1].text == "ann2.10")
    assert words(main) == ["ann0.2", "ann1.6", "ann2.10"]
    for depth in range(3):
        candidates = [d.utterances[depth] for d in got if len(d.utterances) > depth]
        distinct = {u.sample if u.sample is not None else u.text for u in candidates}
        assert len(distinct) == 4
        assert len({u.tags["state"] for u in candidates}) == 1


@pytest.mark.parametrize("how", ["fork_first", "fork_every", "tree", "best_of"])
def test_names_of_samples_and_states_are_places_and_not_the_order_of_playing(how):
    """Two questions played together, and each by itself, have the same names."""
    section = BranchingSection(how=how, group=2, drafts=2)

    def names(examples, first):
        specs = {name: SpeakerSpec("scripted", (name,)) for name in ("ann", "bob")}
        engines = {"scripted": ScriptedEngine(lambda request: "2")}
        driver = RolloutDriver(
            TASK, Chain(turns=2), specs, engines, Decoding(1.0), numbers=range(first, first + len(examples))
        )
        played = play_branched(driver, examples, section, lambda dialogues: [0.0] * len(dialogues))
        return [(d.prompt, d.rollout, u.id, u.sample, u.tags.get("state")) for d in played for u in d.utterances]

    together = names(EXAMPLES, 0)
    assert together == names(EXAMPLES[:1], 0) + names(EXAMPLES[1:], 1)
    shared = [sample for _, _, _, sample, _ in together if sample is not None]
    assert all(sample.count(".") == 1 for sample in shared) and (how == "fork_first" or shared)


@pytest.mark.parametrize(
    "options",
    [
        {"how": "fork_random", "group": 3},
        {"how": "tree", "group": 3, "pick": "sample"},
        {"how": "stages", "group": 3, "keep": 2},
        {"how": "stages", "group": 3, "keep": 1, "choose": "balanced"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_what_is_drawn_about_a_question_does_not_depend_on_other_questions_and_processes(options):
    """24 questions in one process, in two and in four: the same words in the same places, and questions draw
    differently."""
    section = BranchingSection(**options)
    examples = [Example(f"q{n}", f"{n}+1=", str(n + 1)) for n in range(24)]
    specs = {name: SpeakerSpec("scripted", (name,)) for name in ("ann", "bob")}

    def played(processes):
        share = len(examples) // processes
        for first in range(0, len(examples), share):
            engine = ScriptedEngine(lambda request: "{1}.{2}".format(*request.rng_key[-3:]))  # rollout and utterance
            driver = RolloutDriver(
                TASK, Chain(turns=2), specs, {"scripted": engine}, Decoding(1.0), rng_key=(7, 1),
                numbers=range(first, first + share),
            )  # fmt: skip
            yield from play_branched(driver, examples[first : first + share], section, lambda ds: [0.0] * len(ds))

    def told(processes):
        return [(d.prompt, d.rollout, words(d), [u.tags.get("state") for u in d.utterances]) for d in played(processes)]

    alone = told(1)
    assert alone == told(2) == told(4)
    shapes = {n: str([(rollout, said) for prompt, rollout, said, _ in alone if prompt == n]) for n in range(24)}
    assert len(set(shapes.values())) > 1


def test_the_best_of_several_drafts_is_gone_on_with_and_nobody_learns_from_it():
    got = play_branches(
        Chain(turns=1), BranchingSection(how="best_of", drafts=3, group=2), EXAMPLES,
        judge=lambda dialogues: [float(i % 3 == 1) for i in range(len(dialogues))],
    )  # fmt: skip
    assert [(d.prompt, d.rollout) for d in got] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [words(d)[0] for d in got] == ["ann0.1"] * 2 + ["ann0.4"] * 2
    assert not any(d.utterances[0].trainable for d in got)
    assert len({words(d)[1] for d in got}) == 4


@pytest.mark.parametrize("common", [True, False])
def test_a_common_seed_gives_all_dialogues_of_a_question_the_same_draws(common):
    section = BranchingSection(group=6, common_seed=common)
    forums = play_branches(Forum(rounds=3), section, EXAMPLES[:1], agents=("ann", "bob", "cy"))
    assert (len({tuple(u.agent for u in d.utterances) for d in forums}) == 1) == common
    games = play_branches(PlayGame("plan_path"), section, [Episodes()[0]], Episodes())
    assert (len({d.utterances[0].messages[-1]["content"] for d in games}) == 1) == common


def test_a_fork_of_a_game_replays_it_and_is_paid_for_its_own_moves():
    """Kuhn poker forks at every step, and each branch's own last move decides who gets the pot."""
    moves = itertools.cycle("pb")
    engine = ScriptedEngine(lambda request: next(moves))
    specs = {name: SpeakerSpec("scripted", (name,)) for name in ("ann", "bob")}
    driver = RolloutDriver(Episodes(), PlayGame("kuhn_poker"), specs, {"scripted": engine}, Decoding(1.0))
    section = BranchingSection(how="fork_every", group=2)
    got = play_branched(driver, [Episodes()[0]], section, lambda dialogues: [0.0] * len(dialogues))
    assert sorted("".join(words(d)) for d in got) == ["bb", "bp", "pbb", "pbp", "pp"]
    for d in got:
        pot = {"bb": 2, "bp": 1, "pbb": 2, "pbp": 1, "pp": 1}["".join(words(d))]
        assert abs(d.outcome["ann"]) == pot and d.outcome["ann"] == -d.outcome["bob"]
        for agent in ("ann", "bob"):
            assert sum(u.rewards["env"] for u in d.utterances if u.agent == agent) == d.outcome[agent]
