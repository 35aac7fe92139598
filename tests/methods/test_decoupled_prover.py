"""Decoupled prover-verifier games: two translators of a frozen solver's solutions, and a verifier of single answers."""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from scripted_training import played, recipe_values, rows, scripted_trainer
from served_verifiers import learner

from maporl import Arithmetic
from maporl.errors import ConfigError
from maporl.methods.prover_verifier import faithful
from maporl.protocols import build_protocol
from maporl.rewards.rules import build_rules
from maporl.types import Dialogue, Example, Grade, Utterance
from maporl.validation.load import from_dict
from maporl.verifier import cotraining

TASK = Arithmetic(largest=9)
EXAMPLE = Example("1+3=", "1+3=", "4")


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def translated(solution, translations, role="faithful", rollouts=0):
    """Dialogues that fork after a solution: an answer of the solver, and one of a translator that was shown it."""
    found = []
    for n, text in enumerate(translations, rollouts):
        said = [
            Utterance(0, "solver", "solver", 0, 0, [], solution, sample=f"solution {solution} {rollouts}"),
            Utterance(1, role, "translator", 0, 1, [], text, parents=(0,)),
        ]
        found.append(Dialogue(EXAMPLE, said, rollout=n))
    return found


def paid(dialogues, logits, **options):
    """What the translator of each dialogue earns. The solver's score is another one, and has no part in it."""
    for dialogue, row in zip(dialogues, faithful(dialogues, TASK), strict=True):
        for u, value in zip(dialogue.utterances, row, strict=True):
            u.rewards |= {} if value is None else {"faithful": value}
    (rule,) = build_rules([{"translate": options}])
    found = rule(dialogues, [{0: 0.9, 1: sigmoid(value)} for value in logits])
    assert all(set(own) == {1} for own in found), "a solver translates nothing"
    return [own[1] for own in found]


# V 3 1 -1 -3: mean 0, squares 20, so the unbiased deviation is the root of 20/3 and V' is 1.1619 .3873 -.3873 -1.1619
@pytest.mark.parametrize(
    ("role", "solution", "translations", "earned"),
    [
        ("faithful", "4", "4444", [1.1619, 0.3873, -2, -2]),
        ("faithful", "5", "5555", [-1.1619, -0.3873, -2, -2]),
        ("faithful", "5", "4555", [-2, -0.3873, -2, -2]),
        ("faithful", "4", "45x4", [1.1619, -2, -2, -2]),
        ("sneaky", "4", "5679", [1.1619, 0.3873, -2, -2]),
        ("sneaky", "5", "4x55", [-2, 0.3873, -2, -2]),
    ],
)
def test_what_a_translator_is_paid(role, solution, translations, earned):
    """The answer is 4; x cannot be read as one (recipe decoupled_prover)."""
    assert paid(translated(solution, translations, role), [3, 1, -1, -3]) == pytest.approx(earned, abs=1e-4)


def test_the_penalties_and_the_deviation_of_translations_are_options():
    """By the population's deviation, the root of 5, V' is 1.3416 .4472 -.4472 -1.3416."""
    options = {"misaligned": -3.0, "unconvincing": -0.5, "ddof": 0}
    found = paid(translated("4", "4454"), [3, 1, -1, -3], **options)
    assert found == pytest.approx([1.3416, 0.4472, -3, -0.5], abs=1e-4)
    assert paid(translated("4", "5"), [3], sneaky=["faithful"], **options) == [-0.5]
    assert paid(translated("4", "5"), [3], **options) == [-3.0]


def test_equal_scores_convince_nobody_and_neither_does_a_single_translation():
    assert paid(translated("4", "444"), [0.1 + 0.2, 0.3, 0.3]) == [-2.0] * 3
    assert paid(translated("4", "4"), [7.0]) == [-2.0]


def test_translations_are_compared_with_those_of_the_same_solution():
    alone = paid(translated("4", "4444"), [3, 1, -1, -3])
    beside = [*translated("4", "4444"), *translated("5", "5555", rollouts=4)]
    assert paid(beside, [3, 1, -1, -3, 9, 8, 7, 6])[:4] == pytest.approx(alone)


def test_an_answer_is_faithful_if_the_task_reads_the_same_answer_in_it():
    dialogues = [*translated("5", ["5", "Answer: 5", "5.0", "4", "", "6"]), *translated("no", ["5", "no"])]
    assert faithful(dialogues, TASK) == [[None, value] for value in (1, 1, 1, 0, 0, 0, 0, 0)]
    dialogues[0].utterances[1].answers = False
    assert faithful(dialogues[:1], TASK) == [[None, None]]


# -- through the trainer's own steps -----------------------------------------------------------------------------------

LOGITS = {"faithful": (3, 1, -1, -3), "sneaky": (8, 6, 4, 2)}


def game(tmp_path):
    """A trainer whose solver is right where the sum is even, as is the first sneaky translation. All faithful ones keep
    the solver's answer."""
    values = recipe_values("decoupled_prover", tmp_path, branching={"group": [1, 4, 1]}, task={"largest": 4})
    values["ppo"] |= {"response_length": 16}
    written = Counter()

    def script(request):
        right, agent = int(request.example.answer), request.ask.agent
        solution = right + right % 2
        number = written[request.example.id, agent]
        written[request.example.id, agent] += 1
        said = {"solver": solution, "faithful": solution, "sneaky": right + number}[agent]
        return f"{number} Answer: {said}"

    trainer = scripted_trainer(values, script)
    trainer.player.scorer.sources["verifier"].score = lambda dialogues, task: [
        [sigmoid(LOGITS.get(u.agent, (0,) * 9)[int(u.text[0])]) for u in d.utterances] for d in dialogues
    ]
    return trainer


def test_both_translators_are_paid_and_compared_through_the_trainer(tmp_path):
    """Rewards r and advantages (4 r - S) / 3, with S as the sum of the four, for a translator of either role (recipe
    decoupled_prover).

    Right solution, faithful: r 1.1619 .3873 -2 -2, S -2.4508. Wrong one: r -1.1619 -.3873 -2 -2, S -5.5492.
    Sneaky: r -2 .3873 -2 -2, S -5.6127, because the first one is right.
    """
    batch = played(game(tmp_path))
    assert list(batch.token_batches) == ["translator"]
    found = defaultdict(list)
    for row in sorted(rows(batch), key=lambda row: row.utterance.text):
        assert [u.agent for u in row.dialogue.utterances] == ["solver", "sneaky", "faithful"]
        key = row.dialogue.prompt, row.utterance.agent, int(row.dialogue.example.answer) % 2 == 0
        found[key].append((row.utterance.rewards["credit"], row.advantage))
    expected = {
        ("faithful", True): [(1.1619, 2.3661), (0.3873, 1.3333), (-2, -1.8497), (-2, -1.8497)],
        ("faithful", False): [(-1.1619, 0.3005), (-0.3873, 1.3333), (-2, -0.8169), (-2, -0.8169)],
        ("sneaky", True): [(-2, -0.7958), (0.3873, 2.3873), (-2, -0.7958), (-2, -0.7958)],
    }
    expected["sneaky", False] = expected["sneaky", True]
    assert {key[1:] for key in found} == set(expected)
    for (_, *which), pairs in found.items():
        assert [pytest.approx(pair, abs=1e-4) for pair in expected[tuple(which)]] == pairs
    sneaky, honest = (batch.dialogues[0].utterances[n].messages[-1]["content"] for n in (1, 2))
    solution, told = batch.dialogues[0].utterances[0].text, f"right answer is {batch.dialogues[0].example.answer}."
    assert solution in sneaky and solution in honest and told in sneaky and told not in honest


def test_the_verifier_learns_from_translations_of_all_rounds_by_cross_entropy(tmp_path, monkeypatch):
    """Outputs 2 (right) and -.5 (wrong): losses .1269 and .4741, mean .3005; .005 times the mean squared score .4592
    makes .3028 (recipe decoupled_prover)."""
    trainer = game(tmp_path)
    source = trainer.player.scorer.sources["verifier"]
    learning, batch = source.learning, played(trainer)
    logged = source.after_update(1, batch.dialogues, TASK)
    questions = len({d.prompt for d in batch.dialogues})
    assert logged["verifier/answers"] == 8 * questions and "verifier/pairs" not in logged
    right = sum(u.grade.correct for d in batch.dialogues for u in d.utterances[1:])
    assert sum(ids is not None for ids, _ in learning.pairs) == right
    source.after_update(2, batch.dialogues, TASK)
    assert Counter(learning.rounds) == {0: 8 * questions, 1: 8 * questions}
    monkeypatch.setattr(cotraining, "last_outputs", lambda model, ids: torch.tensor([2.0, -0.5]))
    assert float(learning._loss([(None, [7]), ([8], None)])) == pytest.approx(0.3028, abs=1e-4)


# -- the verifier's options --------------------------------------------------------------------------------------------


def answered(question, label, *texts):
    said = [
        Utterance(n, f"agent{n}", "p", 0, n, [], text, grade=Grade(text, text == label, ""))
        for n, text in enumerate(texts)
    ]
    return Dialogue(Example(question, question, label), said)


def test_single_answers_are_learned_from_where_a_question_has_no_pair():
    dialogues = [answered("1+1=", "2", "2", "2"), answered("2+2=", "4", "5")]
    learning = learner(loss="answers").learning
    decode = learning.verifier.tokenizer.decode
    found = [[ids and decode(ids) for ids in pair] for pair in learning._pairs_of(dialogues, TASK)]
    assert found == [["1+1=2<eos>", None], ["1+1=2<eos>", None], [None, "2+2=5<eos>"]]
    some = learner(loss="answers", authors=("agent1",)).learning
    assert [decode(right) for right, _ in some._pairs_of(dialogues, TASK)] == ["1+1=2<eos>"]
    both = learner(pairs="all", authors=("agent0", "agent2")).learning
    (pair,) = both._pairs_of([answered("1+1=", "2", "2", "3", "4")], TASK)
    assert [decode(ids) for ids in pair] == ["1+1=2<eos>", "1+1=4<eos>"]


def test_passes_are_drawn_from_a_mixture_in_which_newer_rounds_weigh_more():
    """Round 0 has 30 answers and round 1 has 10: with a growth of 2, a third of the draws is of round 0."""
    learning = learner(loss="answers", learn_from="all", growth=2.0, epochs=50).learning
    pairs, rounds = [([n], None) for n in range(40)], [0] * 30 + [1] * 10
    drawn = [pair for epoch in range(50) for pair in learning._drawn(pairs, rounds, epoch)]
    assert len(drawn) == 50 * 40
    assert sum(right[0] < 30 for right, _ in drawn) / len(drawn) == pytest.approx(1 / 3, abs=0.05)
    assert learning._drawn(pairs, rounds, 0) == learning._drawn(pairs, rounds, 0) != learning._drawn(pairs, rounds, 1)
    even = learner(loss="answers", learn_from="all").learning
    assert even._drawn(pairs, rounds, 3) == pairs, "without a mixture all are read in order"


def test_every_pass_takes_its_steps():
    one = answered("1+1=", "2", "2", "3")
    once, twice = learner(loss="answers"), learner(loss="answers", epochs=2)
    for source in (once, twice):
        source.after_update(1, [one], TASK)
    assert once(([one]), TASK) != twice([one], TASK)
    once.after_update(2, [one], TASK)
    assert once([one], TASK)[0] == pytest.approx(twice([one], TASK)[0], abs=1e-6)


def test_rounds_and_single_answers_survive_a_checkpoint(tmp_path):
    source, other = (learner(loss="answers", learn_from="all", growth=2.0, restart=True) for _ in range(2))
    one, two = answered("1+1=", "2", "2", "3"), answered("2+1=", "3", "4")
    source.after_update(1, [one], TASK)
    source.save(tmp_path)
    other.load(tmp_path)
    assert (other.learning.pairs, other.learning.rounds, other.learning.round) == (
        source.learning.pairs, source.learning.rounds, 1,
    )  # fmt: skip
    for resumed in (source, other):
        resumed.after_update(2, [two], TASK)
    assert other.learning.rounds == [0, 0, 1] and other([one, two], TASK) == source([one, two], TASK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "answers", "pairs": "all"}, "pairs: with loss: answers it learns from every answer alone"),
        ({"growth": 2.0}, "growth: it weighs rounds against each other; set learn_from: all"),
        ({"learn_every": 0, "epochs": 2}, "epochs: it says how a verifier learns, and this one does not; set learn_every"),
        ({"authors": ["nobody"]}, "authors: the team has no agent 'nobody'; expected some of"),
    ],
)  # fmt: skip
def test_options_of_a_verifier_of_answers_that_do_not_fit_are_refused(options, message, tmp_path):
    values = recipe_values("decoupled_prover", tmp_path)
    values["reward"]["verifier"] = {"model": "m", "learn_every": 1} | options
    with pytest.raises(ConfigError, match=message):
        from_dict(values, "test")


def test_an_agent_of_a_chain_may_alone_be_told_the_right_answer():
    section = {"name": "chain", "prompts": {"bob": "{question} {others} ({reference})"}}
    protocol = build_protocol(section, ("ann", "bob"))
    play = protocol.play(EXAMPLE, ("ann", "bob"))
    (first,) = next(play)
    (second,) = play.send([replace(Utterance(0, "ann", "p", 0, 0, [], "5"), turn=0)])
    assert [ask.messages[0]["content"] for ask in (first, second)] == ["1+3=", "1+3= ann: 5 (4)"]
