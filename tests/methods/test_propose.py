"""Protocol propose: one agent writes questions, others answer and judge them; what everybody is paid, through the
trainer's steps."""

import json
import random
import re
from functools import partial

import pytest
from fast_cases import some
from folders import ROOT
from invariant_runs import Processes, one_update, random_words, update_of, values_of
from scripted_training import recipe_values, rows, scripted_trainer

from maporl.config.safe_yaml import parse_yaml
from maporl.errors import ConfigError, refuse
from maporl.methods.propose import Propose, _worth, let_majority_grade
from maporl.methods.r_zero import Repeats, cluster_shares
from maporl.protocols.base import seats
from maporl.rewards.base import as_source
from maporl.run import ResolvedRun
from maporl.runs.train import train
from maporl.tasks import build_task
from maporl.types import Dialogue, Example, Grade, Utterance, from_json, to_json
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run
from maporl.validation.rehearsal import Rehearsal, findings
from trl_ext.ppo.options import GREEDY


def by_role(texts):
    """A script that answers with the next of the ``texts`` of the speaker's role, again and again."""
    said = dict.fromkeys(texts, 0)

    def script(request):
        role = request.ask.role
        said[role] += 1
        return texts[role][(said[role] - 1) % len(texts[role])]

    return script


def batch_of(name, tmp_path, texts, questions=1, **sections):
    """The scored batch of a trainer whose agents say ``texts``, and the trainer."""
    sections["training"] = {"gradient_accumulation_steps": 1}
    values = recipe_values(name, tmp_path, questions, ppo={"response_length": 8}, **sections)
    trainer = scripted_trainer(values, texts if callable(texts) else by_role(texts))
    return trainer, trainer.score(trainer.collected())


def dialogue_of(name, tmp_path, texts, **sections):
    """The dialogue of one question, with its credits."""
    return batch_of(name, tmp_path, texts, **sections)[1].dialogues[0]


# -- Search Self-Play -------------------------------------------------------------------------------------------------


def test_search_self_play_pays_both_sides_as_published(tmp_path):
    """Tries right, wrong, wrong, right, wrong: 1.0954 -.7303 -.7303 1.0954 -.7303, and the proposer keeps its .6."""

    def script(request):
        told = request.ask.messages[-1]["content"]  # "5?" for the proposer, and "5+0=" for the solver
        if request.ask.role == "proposer":
            return f"{told[:-1]}+0"
        return told.partition("+")[0] if request.turn in (0, 3) else "99"

    trainer, batch = batch_of("search_self_play", tmp_path, script)
    proposal, *tries = batch.dialogues[0].utterances
    assert proposal.rewards["difficulty"] == pytest.approx(0.6) and proposal.rewards["band"] == pytest.approx(0.96)
    assert [u.rewards["label"] for u in tries] == [1, 0, 0, 1, 0]
    assert [(u.fresh, u.caller, u.parents) for u in tries] == [(True, 0, (0,))] * 5
    trained = {row.utterance.id: row.advantage for row in rows(trainer.advantage(batch))}
    assert trained[0] == pytest.approx(0.6)
    assert [trained[u.id] for u in tries] == pytest.approx([1.0954, -0.7303, -0.7303, 1.0954, -0.7303], abs=1e-4)


@pytest.mark.parametrize("said", ["0+99", "+", ""], ids=["wrong", "unreadable", "empty"])
def test_a_question_that_does_not_pass_is_not_asked(tmp_path, said):
    dialogue = dialogue_of("search_self_play", tmp_path, {"proposer": [said], "solver": ["1"]})
    (proposal,) = dialogue.utterances
    assert proposal.rewards["difficulty"] == proposal.rewards["band"] == proposal.rewards["credit"] == 0
    assert dialogue.outcome == ("unread" if not said else "refused") and proposal.tags["accepted"] is False
    assert len(proposal.calls) == (1 if said else 0), "the check is a call of the calculator, which is recorded"


def test_made_questions_are_graded_by_their_own_answer(tmp_path):
    """The reward functions, too, are shown the made question and its answer."""
    texts = {"proposer": ["0+1"], "solver": ["1"]}
    dialogue = dialogue_of("search_self_play", tmp_path, texts, protocol={"check": None})
    proposal, *tries = dialogue.utterances
    assert proposal.tags == {"question": "0+1", "accepted": True}
    for u in tries:
        asked = dialogue.asked(u)
        assert (asked.question, asked.answer) == ("0+1", dialogue.example.answer)
        assert u.grade.correct is (dialogue.example.answer == "1")
        assert u.messages == [{"role": "user", "content": "0+1="}]
    assert from_json(to_json(dialogue)) == dialogue, "the record keeps the made question"


def test_evaluations_ask_the_questions_of_the_task(tmp_path):
    """Nobody proposes there, so that no made question reaches the held-out part."""
    values = recipe_values("search_self_play", tmp_path)
    trainer = scripted_trainer(values, by_role({"proposer": ["0+1"], "solver": ["1"]}))
    held_out = build_task(values["task"], "eval", 0)
    dialogues = trainer.player.play_evaluation(held_out, 2, GREEDY, 0)
    assert [[u.agent for u in d.utterances] for d in dialogues] == [["solver"]] * 2
    assert [d.utterances[0].messages[0]["content"] for d in dialogues] == [f"{e.question}=" for e in list(held_out)[:2]]
    assert [d.utterances[0].grade.correct for d in dialogues] == [e.answer == "1" for e in list(held_out)[:2]]


# -- Multi-Agent Evolve -----------------------------------------------------------------------------------------------


def test_multi_agent_evolve_pays_the_proposer_as_published(tmp_path):
    """Marks 10 8 3 1 10 and quality mark 9: (.8889 + .4 + 1)/3 = .7630."""
    texts = {"proposer": ["1+1"], "solver": ["2"], "judge": ["9", "10", "8", "3", "1", "10"]}
    dialogue = dialogue_of("multi_agent_evolve", tmp_path, texts)
    proposal, rate, *others = dialogue.utterances
    tries, marks = others[:5], others[5:]
    assert proposal.rewards["proposal"] == pytest.approx(0.7630, abs=1e-4)
    assert [u.rewards["mark"] for u in tries] == pytest.approx([1, 0.7778, 0.2222, 0, 1], abs=1e-4)
    assert [u.rewards["credit"] for u in tries] == pytest.approx([1, 0.8889, 0.6111, 0.5, 1], abs=1e-4)
    assert [u.rewards["credit"] for u in [rate, *marks]] == [0.5] * 6
    assert [u.parents for u in marks] == [(u.id,) for u in tries]
    assert all(u.grade is None for u in tries), "nobody knows the right answer"


@pytest.mark.parametrize(
    "quality, paid, form",
    [
        ("6", 0.5185, 1.0),
        ("7", 0.5556, 1.0),
        ("3.5", None, 0.0),
    ],
)
def test_a_poor_question_is_thrown_away(tmp_path, quality, paid, form):
    """Quality mark 6 (.5556 < .7): .5185, not asked. A mark that cannot be read says nothing about the proposer."""
    texts = {"proposer": ["1+1"], "solver": ["2"], "judge": [quality]}
    dialogue = dialogue_of("multi_agent_evolve", tmp_path, texts)
    proposal, rate = dialogue.utterances
    assert proposal.rewards.get("proposal") == (None if paid is None else pytest.approx(paid, abs=1e-4))
    assert proposal.trainable == (paid is not None) and rate.rewards["form"] == form


def test_without_a_question_the_proposer_earns_nothing(tmp_path):
    texts = {"proposer": ["1"], "solver": ["2"], "judge": ["9"]}
    dialogue = dialogue_of("multi_agent_evolve", tmp_path, texts, protocol={"tag": "q"})
    assert [u.rewards["credit"] for u in dialogue.utterances] == [0.0] and dialogue.outcome == "unread"


def test_a_try_whose_mark_cannot_be_read_is_not_trained_on(tmp_path):
    texts = {"proposer": ["1+1"], "solver": ["2"], "judge": ["9", "9", *["10", "?", "10", "10", "10"] * 2]}
    trainer, batch = batch_of("multi_agent_evolve", tmp_path, texts, questions=2)
    proposal, _, *others = batch.dialogues[0].utterances
    assert ["mark" in u.rewards for u in others[:5]] == [True, False, True, True, True]
    assert proposal.rewards["proposal"] == pytest.approx((8 / 9 + 0 + 1) / 3)
    assert not any(row.utterance is others[1] for row in rows(trainer.advantage(batch)))


def test_multi_agent_evolve_whitens_over_the_tokens_of_each_role(tmp_path):
    """Solver rewards 1 .5 .9 .4 of 2, 6, 2, 6 tokens and proposers .8 .5 of 4 and 4 (unbiased std over tokens)."""
    texts = {"proposer": ["1+1"], "solver": ["2"], "judge": ["9"]}
    trainer, batch = batch_of("multi_agent_evolve", tmp_path, texts, questions=2, protocol={"tries": 2})
    wanted = {"solver": [(1, 2), (0.5, 6), (0.9, 2), (0.4, 6)], "proposer": [(0.8, 4), (0.5, 4)]}
    for role, numbers in wanted.items():
        said = [u for d in batch.dialogues for u in d.utterances if u.role == role]
        for u, (credit, length) in zip(said, numbers, strict=True):
            u.rewards["credit"] = credit
            u.response_ids = (u.response_ids * 10)[:length]
    found = rows(trainer.advantage(batch))
    own = {role: [row.advantage for row in found if row.utterance.role == role] for role in wanted}
    assert own["solver"] == pytest.approx([1.8519, -0.3268, 1.4162, -0.7626], abs=1e-3)
    assert own["proposer"] == pytest.approx([0.9354, -0.9354], abs=1e-3)


@pytest.mark.parametrize(
    "said, mark",
    [
        ("8", 8),
        ("I say 10.", 10),
        ("8/10", 8),
        ("8 out of 10!", 8),
        ("2 errors, so 4", 4),
        ("8.0", 8),
        ("9/10 (2 reasons)", 9),
        ("-3", None),
        ("3.5", None),
        ("0", None),
        ("11", None),
        ("8/9", None),
        ("", None),
    ],
)
def test_marks_are_read(said, mark):
    verdict = Utterance(0, "j", "j", 0, 0, [], said)
    assert _worth(verdict) == (None if mark is None else pytest.approx((mark - 1) / 9))
    assert verdict.rewards["form"] == (mark is not None)


# -- the proposer's own answer ----------------------------------------------------------------------------------------

SPICE = ["<q>1+1</q><a>2</a>", "so <a>3</a> to <q>1+2</q>", "<q>2+2</q><a>4</a>", "<q>1+3</q>"]
"""Three questions of which the reasoner answers 4, 1 and all 8 of eight rightly, and one without an answer."""


def spice_batch(tmp_path, **sections):
    proposed = iter(SPICE)
    right = {0: 4, 1: 1, 2: 8}

    def script(request):
        rollout = int(request.label.rpartition(".")[2])
        if request.ask.role == "proposer":
            return next(proposed)
        return "234"[rollout] if request.turn < right[rollout] else "9"

    return batch_of("spice", tmp_path, script, branching={"group": 4}, **sections)


def test_spice_pays_the_challenger_for_variance(tmp_path):
    """p 1/2 1/8 1 and no answer: 1, .37203, .04394, -.1 with the mean .32899. Answers: their reward minus p, not
    divided."""
    trainer, batch = spice_batch(tmp_path)
    said = [d.utterances[0] for d in batch.dialogues]
    assert [u.rewards["credit"] for u in said] == pytest.approx([1, 0.37203, 0.04394, -0.1], abs=1e-5)
    assert [d.outcome for d in batch.dialogues] == ["asked", "asked", "asked", "unread"]
    assert {len(d.utterances) for d in batch.dialogues[:3]} == {9} and len(batch.dialogues[3].utterances) == 1
    found = {id(row.utterance): row.advantage for row in rows(trainer.advantage(batch))}
    assert [found[id(u)] for u in said] == pytest.approx([0.67101, 0.04304, -0.28506, -0.42899], abs=1e-5)
    tries = [[found[id(u)] for u in d.utterances[1:]] for d in batch.dialogues[:3]]
    assert tries[0] == pytest.approx([0.5] * 4 + [-0.5] * 4) and tries[2] == [0] * 8
    assert tries[1] == pytest.approx([0.875] + [-0.125] * 7)


def test_spice_weighs_both_roles_alike(tmp_path):
    """Four proposals to a document share 1, and so do the 24 answers to the three of them that are valid."""
    trainer, batch = spice_batch(tmp_path)
    weights = {"proposer": [], "solver": []}
    for row in rows(trainer.advantage(batch)):
        weights[row.utterance.role].append(row.weight)
    assert weights["proposer"] == pytest.approx([1 / 4] * 4) and weights["solver"] == pytest.approx([1 / 24] * 24)


def test_only_the_proposer_reads_the_document(tmp_path):
    shown = {"proposer": [], "solver": []}

    def script(request):
        shown[request.ask.role].append(request.ask.messages[-1]["content"])
        return "<q>bd></q><a>kr</a>" if request.ask.role == "proposer" else "kr"

    values = recipe_values("spice", tmp_path, training={"per_device_train_batch_size": 1}, branching={"group": 2})
    values["agent_defaults"]["tiny"]["alphabet"] += "\nbdgkmprt"
    values["task"] = {"name": "tiny_hops", "people": 3}
    values["protocol"]["propose"] = "{document}!<q><a>"
    batch = (trainer := scripted_trainer(values, script)).score(trainer.collected())
    facts = [f"{one['title']}\n{one['text']}" for one in batch.dialogues[0].example.meta["paragraphs"]]
    assert shown == {"proposer": ["\n\n".join(facts) + "!<q><a>"] * 2, "solver": ["bd>="] * 16}
    assert {u.rewards["label"] for d in batch.dialogues for u in d.utterances[1:]} == {1.0}


def test_a_stated_answer_that_cannot_be_compared_makes_no_question(tmp_path):
    """By HotpotQA's grader an article has no words. The tries teach nothing, and the proposer is paid as without a
    question."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "Who?", "answer": "Ida", "paragraphs": [{"title": "I", "text": "Ida."}]}))
    values = recipe_values("spice", tmp_path, training={"per_device_train_batch_size": 1}, branching={"group": 2})
    values["task"] = {"name": "hotpotqa", "source": str(file), "eval_source": str(file)}
    values["agent_defaults"]["tiny"]["alphabet"] += "AWIdhnswer:\n.o"
    said = iter(["<q>Who?</q><a>a</a>", "<q>Who?</q><a>Ida</a>"])
    trainer = scripted_trainer(values, lambda r: next(said) if r.ask.role == "proposer" else "Answer: Ida")
    batch = trainer.score(trainer.collected())
    first, second = batch.dialogues
    assert (first.outcome, first.utterances[0].tags["accepted"], second.outcome) == ("unread", False, "asked")
    assert [d.utterances[0].rewards["credit"] for d in batch.dialogues] == pytest.approx([-0.1, 0.04394], abs=1e-5)
    trained = [row.utterance.role for row in rows(trainer.advantage(batch)) if row.dialogue is first]
    assert trained == ["proposer"]


# -- reward sources ----------------------------------------------------------------------------------------------------

WORTH = {"1": 0.8, "2": 0.4, "3": 0.1, "4": 0.3}
"""What a reward model says of two answers to a first query, and two to a second."""
POINTS = {"1": 7, "2": 0, "3": 7, "4": 7}


def self_play(tmp_path, queries=("1+1", "2+2"), **sections):
    """The recipe with two queries and two answers to each, and the rows that it trains on."""
    proposed = iter(queries)

    def script(request):
        if request.example.id.startswith("judged"):
            reply = re.search("A reply:\\n(.*)", request.ask.messages[-1]["content"])
            return f"Score: {POINTS[reply[1]]}"
        answers = ("12", "34")[min(1, int(request.label.rpartition(".")[2]))]
        return next(proposed) if request.ask.role == "proposer" else answers[request.turn]

    sections = {"protocol": {"tries": 2}, "branching": {"group": 2}} | sections
    values = recipe_values("language_self_play", tmp_path, **sections)
    values = json.loads(json.dumps(values).replace("verifier", "brevity"))  # as the tiny version names it
    values["training"] |= {"per_device_train_batch_size": 1}
    trainer = scripted_trainer(values, script)
    trainer.player.scorer.sources["brevity"] = as_source(
        lambda dialogues, task: [[WORTH.get(u.text) if u.answers else None for u in d.utterances] for d in dialogues]
    )
    batch = trainer.score(trainer.collected())
    return batch, {id(row.utterance): row for row in rows(trainer.advantage(batch))}


def test_language_self_play_is_a_game_with_a_common_quality(tmp_path):
    """Answers .8+7 .4+0 and .1+7 .3+7: +-3.7 and -+.1. Queries -.6+3.5 = 2.9 and -.2+7 = 6.8: -1.95 and 1.95."""
    batch, found = self_play(tmp_path)
    said = [d.utterances for d in batch.dialogues]
    assert [[u.rewards["credit"] for u in d] for d in said] == [
        pytest.approx([2.9, 7.8, 0.4]),
        pytest.approx([6.8, 7.1, 7.3]),
    ]
    advantages = [[found[id(u)].advantage for u in d] for d in said]
    assert advantages == [pytest.approx([-1.95, 3.7, -3.7]), pytest.approx([1.95, -0.1, 0.1], abs=1e-6)]
    assert [[found[id(u)].weight for u in d] for d in said] == [[1.0, 0.5, 0.5]] * 2, "both losses count alike"


def test_language_self_play_zero_sums_to_zero(tmp_path):
    """Without the judge: queries -.6 and -.2, whose advantages are -.2 and .2."""
    weights = {"callees/brevity": -1.0}
    reward = {"rules": ["own", {"mix": {"weights": weights}}]}
    batch, found = self_play(tmp_path, reward=reward | {"sources": {"verifier": 1.0}})
    for dialogue in batch.dialogues:
        query, *answers = dialogue.utterances
        assert query.rewards["credit"] + sum(u.rewards["credit"] for u in answers) / 2 == pytest.approx(0)
    assert [found[id(d.utterances[0])].advantage for d in batch.dialogues] == pytest.approx([-0.2, 0.2])


def test_an_empty_query_teaches_nothing(tmp_path):
    batch, found = self_play(tmp_path, queries=("1+1", "2+2", " "), branching={"group": 3})
    assert [d.outcome for d in batch.dialogues] == ["asked", "asked", "unread"]
    assert id(batch.dialogues[2].utterances[0]) not in found
    assert [found[id(d.utterances[0])].advantage for d in batch.dialogues[:2]] == pytest.approx([-1.95, 1.95])


# -- the majority's answer --------------------------------------------------------------------------------------------


def tries_of(*answers):
    return [Utterance(i, "s", "s", i, 1, [], "", grade=Grade(a, False, "")) for i, a in enumerate(answers)]


def test_the_majority_vouches_for_an_answer():
    """Nine answers 7 7 7 12 7 7 3 7 12: the label is 7, and its share 2/3."""
    tries = tries_of("7", "7", "7", "12", "7", "7", "3", "7", "12")
    assert sum(let_majority_grade(tries)) / 9 == pytest.approx(0.667, abs=1e-3)
    assert [u.grade.correct for u in tries] == [True, True, True, False, True, True, False, True, False]
    assert let_majority_grade(tries_of("3", "4", None)) == [1, 0, 0], "the first of equally frequent ones"
    assert let_majority_grade(tries_of(None, None)) == [0, 0], "what cannot be read does not vote"


@pytest.mark.parametrize(
    "answers, uncertainty, trained",
    [("7 7 8 8 8", 0.4, True), ("7 7 7 7 8", 0.2, False), ("7 7 7 7 7", 0.0, False), ("1 2 3 4 5", 0.2, False)],
)
def test_tries_outside_of_the_shares_are_not_trained_on(tmp_path, answers, uncertainty, trained):
    protocol = {"vouch": "majority", "check": None, "least_share": 0.3, "most_share": 0.7}
    reward = {"sources": {"label": 1.0, "uncertainty": 1.0}}
    texts = {"proposer": ["1+1"], "solver": answers.split()}
    dialogue = dialogue_of("search_self_play", tmp_path, texts, protocol=protocol, reward=reward)
    proposal, *tries = dialogue.utterances
    assert proposal.rewards["uncertainty"] == pytest.approx(uncertainty)
    assert [u.trainable for u in tries] == [trained] * 5


def test_r_zero_pays_for_uncertainty_without_repeats(tmp_path):
    """Four questions, s .5 .9 .3 .6, of which the first two are alike: r 0 -.4 .05 .15; A .207 -1.4491 .414 .8281."""
    questions = ["1+1", "1+1", "123=", "4 ! 5"]
    votes = {0: "1" * 5 + "2" * 5, 1: "1" * 9 + "2", 2: "1112345678", 3: "1" * 6 + "2" * 4}
    proposed = iter(questions)

    def script(request):
        if request.ask.role == "proposer":
            return next(proposed)
        rollout = int(request.label.rpartition(".")[2])
        return votes[rollout][request.turn]

    challenger = {"round_robin": {"every": 9}}
    trainer, batch = batch_of("r_zero", tmp_path, script, branching={"group": 4}, schedule=challenger)
    said = [d.utterances[0] for d in batch.dialogues]
    assert [u.rewards["uncertainty"] for u in said] == pytest.approx([0.5, 0.1, 0.3, 0.4])
    assert [u.rewards["repeats"] for u in said] == [0.5, 0.5, 0.25, 0.25]
    assert [u.rewards["credit"] for u in said] == pytest.approx([0, -0.4, 0.05, 0.15])
    found = {id(row.utterance): row.advantage for row in rows(trainer.advantage(batch))}
    assert [found[id(u)] for u in said] == pytest.approx([0.207, -1.4491, 0.414, 0.8281], abs=1e-3)


def test_repeats_are_those_of_all_processes_that_play_an_update():
    """One process proposes a question twice and the other once more: 3 of 4 are alike. Alone it is all, and 1 of 2."""

    def proposing(*texts):
        tags = {"accepted": True}
        said = [Utterance(0, "ann", "ann", 0, 0, [], t, tags={**tags, "question": t}) for t in texts]
        return [Dialogue(Example("q", "q", "1"), [u]) for u in said]

    sources, played = (Repeats(), Repeats()), (proposing("1+1", "1+1"), proposing("4 ! 5", "1+1"))

    def shares(source, dialogues):
        source.meet(dialogues)
        return source(dialogues, None)

    processes = Processes(2)
    with processes.together():
        found = processes.run([partial(shares, *own) for own in zip(sources, played, strict=True)])
    assert found == [[[0.75], [0.75]], [[0.25], [0.75]]]
    assert Repeats()(played[0], None) == [[1.0], [1.0]]
    assert sources[1](proposing("4 ! 5", "1+1"), None) == [[0.5], [0.5]]


@pytest.mark.parametrize("seed", some(range(3), 0))
def test_repeats_are_those_of_the_questions_that_stay_on_one_process_and_on_two(seed, tmp_path):
    """All dialogues of a dull question are alike, so that it is replaced, in one process perhaps and not in the
    other."""
    lively = random_words(seed)

    def script(request):
        prompt = request.rng_key[-3]
        if prompt == seed % 2 or random.Random(f"{seed}/{prompt}").random() < 0.3:
            return "1+1?" if request.ask.role == "proposer" else "1"
        return lively(request)

    values = values_of("r_zero", tmp_path, questions=2)
    values["branching"] = {"group": 2, "resample": 2}
    one, two = one_update(values, script), update_of(2, values, script)
    assert len({place[0] for place in one.said} - {0, 1}) in (1, 2)
    proposals = [u for d in one.dialogues for u in d.utterances if u.role == "proposer"]
    shares = cluster_shares([u.tags["question"] or u.text for u in proposals])
    assert [u.rewards["repeats"] for u in proposals] == shares
    assert two.said == one.said and two.rewards == one.rewards


def test_repeats_are_not_compared_while_a_question_is_played():
    with pytest.raises(ConfigError, match="branching: tree compares answers while they are given"):
        load("r_zero", ["branching={how: tree, group: 2}"])


def test_the_solver_of_r_zero_learns_from_questions_of_middling_difficulty(tmp_path):
    """Each try is compared with the other tries of its question, and shares above .8 are left out."""
    proposed = iter(["1+1", "1+2", "1+3"])
    votes = {0: "1" * 5 + "2" * 5, 1: "1" * 9 + "2", 2: "1" * 8 + "22"}

    def script(request):
        rollout = int(request.label.rpartition(".")[2])
        return next(proposed) if request.ask.role == "proposer" else votes[rollout][request.turn]

    schedule = {"freeze": [{"agent": "challenger", "first": 1, "last": 9}], "round_robin": None}
    trainer, batch = batch_of("r_zero", tmp_path, script, branching={"group": 3}, schedule=schedule)
    found = [(row.utterance.grade.correct, row.advantage) for row in rows(trainer.advantage(batch))]
    z = [(1 - 0.5) / (10 / 36) ** 0.5, (1 - 0.8) / (1.6 / 9) ** 0.5, -0.8 / (1.6 / 9) ** 0.5]
    expected = [(True, z[0])] * 5 + [(False, -z[0])] * 5 + [(True, z[1])] * 8 + [(False, z[2])] * 2
    assert [right for right, _ in found] == [right for right, _ in expected]
    assert [a for _, a in found] == pytest.approx([a for _, a in expected], abs=1e-4)


def test_the_challenger_of_r_zero_takes_32_steps_a_batch_and_the_solver_4():
    config = load("r_zero")
    assert config.questions_per_update() == 32
    for name, steps in (("challenger", 32), ("solver", 4)):
        ppo = config.of(name).ppo
        assert (ppo.num_ppo_epochs, ppo.num_mini_batches) == (1, steps)
        assert (ppo.cliprange, ppo.cliprange_high, ppo.dual_clip, ppo.kl_coef) == (0.2, 0.3, 3, 0.01)


def test_a_proposal_without_a_question_costs_one_and_its_share(tmp_path):
    """Unreadable and alone among four: -1.25."""
    texts = {"proposer": ["1+1", "22=?", "", "4 ! 5"], "solver": ["1"]}
    _, batch = batch_of("r_zero", tmp_path, texts, branching={"group": 4})
    assert [d.utterances[0].rewards["credit"] for d in batch.dialogues][2] == pytest.approx(-1.25)


def test_alike_questions_share_a_cluster():
    texts = ["What is 12 plus 30?", "What is 12 plus 31?", "Name a prime above 50.", "", ""]
    assert cluster_shares(texts) == [0.4, 0.4, 0.2, 0.4, 0.4]
    assert cluster_shares(["one"]) == [1.0] and cluster_shares([]) == []


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tries": 0}, "tries: expected a whole number of at least 1, got 0"),
        ({"least_share": 0.8, "most_share": 0.3}, "the smaller one first, got 0.8 and 0.3"),
        ({"tag": "a b"}, "tag: expected a word"),
        ({"check": "calculator"}, "check: it is only used with vouch: given or tool"),
        ({"judge": "jo"}, "judge: it is only used with vouch: judge"),
        ({"least_quality": 1.5, "vouch": "judge"}, "least_quality: expected a number between 0 and 1, got 1.5"),
        ({"vouch": "given", "least_share": 0.2}, "least_share: it is only used with vouch: majority"),
        ({"tries": 1}, "tries: one try is always its own majority"),
        ({"proposer": "ann", "solver": "ann"}, "expected different agents, got ['ann', 'ann']"),
        ({"solve": "no place"}, "solve"),
        ({"mark": "{question}", "vouch": "judge"}, "mark"),
        ({"answer_tag": "a"}, "answer_tag: it is only used with vouch: stated"),
        ({"vouch": "tool"}, "check: vouch: tool needs a tool that finds the answer"),
        ({"vouch": "given", "check_about": ("kind",)}, "check_about: it says with what the tool check is called"),
        (
            {"vouch": "tool", "check": "c", "check_about": ("kind", "expression")},
            "check_about: 'expression' is the check_argument, which has the question",
        ),
        ({"vouch": "stated"}, "propose: with vouch: stated what stands between <answer> and </answer> is read"),
        (
            {"vouch": "stated", "tag": "q"},
            "between <q> and </q> is read, and the text tells the proposer of no such tags",
        ),
        ({"tag": None, "vouch": "stated"}, "with vouch: stated the question stands between tags of its own"),
        ({"tag": "answer", "vouch": "stated"}, "set tag: question"),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(ValueError) as caught:
        Propose(**options)
    assert words in str(caught.value)


TRIPLET = {"check": "triplet", "check_argument": "said", "check_about": []}


def test_seats():
    assert seats(("a", "b", "c"), None, None, None) == ["a", "b", "c"]
    assert seats(("a", "b", "c"), None, "a", None) == ["b", "a", "c"]
    assert seats(("a", "b"), "b", None, None) == ["b", "a", ""]


@pytest.mark.parametrize(
    ("recipe", "options", "left_out", "words"),
    [
        ("multi_agent_evolve", {}, ("agents", "judge"), "with vouch: judge it has 3 players but agents are"),
        ("search_self_play", {}, ("tools", "calculator"), "calculator"),
        (
            "search_self_play",
            {"check_argument": "expresion"},
            None,
            r"protocol.check_argument: tool calculator: unknown 'expresion'; .*'expression'",
        ),
        (
            "absolute_zero",
            TRIPLET,
            None,
            r"protocol.check_about: tool triplet needs 'kind', and is given \['said'\] alone; name it here",
        ),
        ("absolute_zero", TRIPLET | {"check_about": ["sort"]}, None, r"has no 'sort' in its meta, but \[\]"),
    ],
)
def test_what_a_proposer_lacks_is_named_before_the_run(recipe, options, left_out, words, tmp_path):
    values = recipe_values(recipe, tmp_path, protocol=options)
    if left_out is not None:
        section, name = left_out
        del values[section][name]
    if recipe == "absolute_zero":  # the tool needs a kind, which the sums of the tiny version do not have
        values["tools"] = {"triplet": {"use": "triplet", "options": {"workers": 1}}}
    with pytest.raises(ValueError, match=words):
        check_run(from_dict(values, "test"))


def test_a_check_of_given_answers_may_be_told_of_the_example(tmp_path):
    """The tool compares the question with what the example's meta has."""
    protocol = Propose(vouch="given", check="same", check_argument="said", check_about=("op",), tag=None)
    play = protocol.play(Example("e", "1+1", "2", {"op": "+"}), ("ann", "bob"))
    next(play)
    (act,) = play.send([Utterance(0, "ann", "ann", 0, 0, [], "2+0")])
    assert (act.name, act.arguments) == ("same", {"said": "2+0", "op": "+"})


@pytest.mark.parametrize(
    "protocol, words",
    [
        (
            {"propose": "Write <q> and <a>."},
            r"protocol\.propose: the task gives documents, and the text shows .* put \{document\} into",
        ),
        ({"vouch": "given", "tag": None, "answer_tag": "answer"}, r"protocol\.vouch: given takes .* set vouch: stated"),
    ],
)
def test_documents_must_be_shown_to_who_writes_on_them(protocol, words, tmp_path):
    (tmp_path / "a.txt").write_text("0123")
    values = recipe_values("spice", tmp_path / "run", protocol=protocol)
    values["task"] = {"name": "documents", "source": f"{tmp_path}/a.txt", "questions": {"name": "toy_sum"}}
    with pytest.raises(ConfigError, match=words):
        check_run(from_dict(values, "test"))


def test_a_protocol_that_has_no_use_for_documents_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("0123")
    task = {"name": "documents", "source": f"{tmp_path}/a.txt", "questions": {"name": "toy_sum"}}

    def checked(recipe, **changes):
        run = ResolvedRun(from_dict(recipe_values(recipe, tmp_path / "run") | changes, "test"))
        return [line for line in refuse(findings(Rehearsal(run))) if "gives documents" in line]

    (line,) = checked("grpo", task=task)
    assert "protocol 'debate' asks for answers to them, of which none is right" in line and "vouch: stated" in line
    (line,) = checked("spiral", task=task)
    assert "protocol 'game' shows them to nobody" in line


def test_rewards_read_the_answer_of_the_majority(tmp_path):
    texts = {"proposer": ["1+1"], "solver": ["7", "7", "8"]}
    protocol = {"vouch": "majority", "check": None, "tries": 3}
    reward = {"sources": {"near": 1.0, "f1": 1.0, "uncertainty": 1.0}}
    dialogue = dialogue_of("search_self_play", tmp_path, texts, protocol=protocol, reward=reward)
    tries = dialogue.utterances[1:]
    assert [u.rewards["f1"] for u in tries] == [1, 1, 0] and [dialogue.asked(u).answer for u in tries] == ["7"] * 3
    assert [u.rewards["near"] for u in tries] == pytest.approx([1, 1, 1 / (1 + 1 / 7)])


def test_tries_are_compared_within_their_question(tmp_path):
    """Two dialogues of one prompt: in the second all tries are wrong, so that nothing is learned from them."""

    def script(request):
        told = request.ask.messages[-1]["content"]
        rollout = int(request.label.rpartition(".")[2])
        if request.ask.role == "proposer":
            return f"{told[:-1]}+0"
        return told.partition("+")[0] if rollout == 0 and request.turn < 4 else "99"

    trainer, batch = batch_of("search_self_play", tmp_path, script, branching={"group": 2, "how": "independent"})
    found = {id(row.utterance): row.advantage for row in rows(trainer.advantage(batch))}
    first, second = ([found[id(u)] for u in d.utterances[1:]] for d in batch.dialogues)
    assert first == pytest.approx([0.4472] * 4 + [-1.7889], abs=1e-3) and second == [0] * 5


def test_records_of_older_versions_have_no_made_questions():
    old = json.loads(to_json(Dialogue(Example("e", "q", "a"), [Utterance(0, "a", "a", 0, 0, [], "x")])))
    del old["utterances"][0]["example"]
    assert from_json(json.dumps(old)).utterances[0].example is None


@pytest.mark.slow
def test_the_page_on_proposers_is_a_run(tmp_path):
    """It logs how many proposals were asked, and how many repeat another."""
    text = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/howto/propose.md").read_text(), re.DOTALL | re.MULTILINE)[0]
    config = from_dict(parse_yaml(text) | {"output_dir": str(tmp_path / "run"), "dialogues_logged": 99})
    _, after = train(config, resume=False, quiet=True)
    assert after.questions == 4 and len(after.turns) == 1, "in evaluations the solver answers once"
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    played = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    for update in (1, 2):
        tags = [d["utterances"][0]["tags"] for d in played if d["step"] == update]
        (found,) = [m for m in metrics if m["step"] == update and "proposals/asked" in m]
        assert len(tags) == 8 and found["proposals/asked"] == sum(t["accepted"] for t in tags) / 8
        assert found["proposals/asked"] > 0.2, "the warm start has taught the proposer to write sums that pass"
        read = [t["question"] for t in tags if t["question"] is not None]
        assert found["proposals/repeated"] == pytest.approx(1 - len(set(read)) / len(read))
