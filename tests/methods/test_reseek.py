"""An agent judges the results that it called for (ReSeek)."""

import pytest
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl import Arithmetic
from maporl.errors import ConfigError
from maporl.methods.reseek import Judgement, similarity
from maporl.methods.sections import JudgementSection
from maporl.protocols import CallReturn
from maporl.storage.run_folder import RunFolder
from maporl.types import Call, Dialogue, Example, Result, Utterance
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

TASK = Arithmetic(largest=3)
WORDS = " ".join(f"w{n}" for n in range(100))


def judged(share, useful, answer=WORDS, by_call=True):
    """A dialogue in which a result with this share of the answer's words is called useful, useless, or neither."""
    text = " ".join(f"w{n}" for n in range(round(share * 100))) or "nothing"
    call = Call("1", "search", {"query": "q"}, result=Result(text))
    asked = Utterance(0, "ann", "ann", 0, 0, [], "<search>q</search>", role="planner", answers=False)
    if by_call:
        asked.calls.append(call)
    said = [asked] if by_call else [asked, Utterance(1, "bob", "bob", 0, 1, [], text, role="worker", answers=False)]
    verdict = Utterance(
        2, "ann", "ann", 1, 2, [], "", role="judge", answers=False, parents=(len(said) - 1,), tags={"useful": useful}
    )
    return Dialogue(Example("q", "?", answer), [*said, verdict])


def earned(dialogue, **options):
    return Judgement(JudgementSection(**options))([dialogue], TASK)[0]


def measured(dialogues):
    return Judgement(JudgementSection()).after_update(1, dialogues, TASK)


@pytest.mark.parametrize("by_call", [True, False])
def test_the_published_costs_of_judgements_of_reseek(by_call):
    """Similarity .8, yes: +.3; .5, yes: -.6; .5, no: +.3; .8, no: -.3 (recipe reseek).

    What cannot be read is an error.
    """
    given = [(0.8, True), (0.5, True), (0.5, False), (0.8, False), (0.8, None), (0.5, None)]
    paid = [earned(judged(*one, by_call=by_call))[-1] for one in given]
    assert paid == [0.3, -0.6, 0.3, -0.3, -0.3, -0.6]
    assert earned(judged(0.7, True))[-1] == -0.6, "a result is useful if its similarity is over the bound"
    assert earned(judged(0.5, True), similar=0.4, right=1.0)[-1] == 1.0
    assert earned(judged(0.8, True, answer=None))[-1] is None and earned(judged(0.8, True))[0] is None


def test_always_saying_no_is_not_balanced():
    """With similarities from 0 to 1, always no earns .12 and always yes -.33 a step (recipe reseek); both are right by
    half."""
    means = {}
    for useful in (False, True):
        dialogues = [judged(n / 100, useful) for n in range(1, 101)]
        paid = [value for d in dialogues for value in earned(d) if value is not None]
        means[useful] = sum(paid) / len(paid)
        assert measured(dialogues) == {"judgements/balanced_accuracy": 0.5, "judgements/useful": float(useful)}
    assert means == pytest.approx({False: 0.12, True: -0.33})
    right = [judged(n / 100, n > 70) for n in range(1, 101)]
    for dialogue in right:
        earned(dialogue)
    assert measured(right)["judgements/balanced_accuracy"] == 1.0
    assert measured([judged(0.8, True)]) == {}, "nobody has said what the judgement should have been"


def test_similarity_is_a_share_of_the_answers_words():
    assert similarity("bd>kr", "kr") == 1.0 and similarity("", "kr") == 0.0 and similarity("a a", "a a a b") == 0.5


def test_judgements_are_paid_by_reseek_in_an_update(tmp_path):
    """Through the trainer: a dialogue earns 1 for its answer and what its judgements earn, and all that was said has
    that.

    Dialogue 0: a useful result, called useful, and a right answer: 1.3. Dialogue 1: the same result, called useless:
    .7. Dialogue 2: a useless result, called useful, and a wrong answer: -.6. Mean .4667, standard deviation .9713.
    """
    values = recipe_values("reseek", tmp_path, task={"hops": [1]})
    values["environments"]["library"]["options"]["k"] = 1
    values["updates"] = 1

    def script(request):
        number, facts = request.rng_key[-2], dict(p["text"].split(">") for p in request.example.meta["paragraphs"])
        start, answer = request.example.meta["start"], request.example.answer
        wrong = next(name for name in facts if name not in (start, answer) and facts[name] != answer)
        if request.ask.role == "judge":
            return "<judge>no</judge>" if number == 1 else "<judge>yes</judge>"
        if request.turn == 0:
            return f"<search>{wrong if number == 2 else start}</search>"
        return f"Answer: {wrong if number == 2 else answer}"

    trainer = scripted_trainer(values, script)
    batch = played(trainer)
    for d in batch.dialogues:
        call, judgement, answer = d.utterances
        (result,) = [one.result.text for one in call.calls]
        assert result in judgement.messages[-1]["content"] and result not in answer.messages[-1]["content"]
        assert judgement.prompt_ids[: len(call.prompt_ids)] == call.prompt_ids, "the judgement is in the conversation"
        assert answer.prompt_ids[: len(judgement.prompt_ids)] == judgement.prompt_ids
        expected = {0: (0.3, 1.0), 1: (-0.3, 1.0), 2: (-0.6, 0.0)}[d.rollout]
        assert (judgement.rewards["judgement"], answer.rewards["label"]) == expected
    total = {0: 1.3, 1: 0.7, 2: -0.6}
    for d in batch.dialogues:
        own = [row.advantage for row in rows(batch) if row.dialogue is d]
        assert own == pytest.approx([(total[d.rollout] - 0.4667) / 0.9713] * 3, abs=2e-3)
    trainer.train()
    (metrics,) = RunFolder(tmp_path).read_metrics()
    assert metrics["judgements/balanced_accuracy"] == pytest.approx(0.25)
    assert metrics["judgements/useful"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge": "Useful?"}, r"judge: it must contain \{reply\}"),
        ({"judge": "{reply}", "call": "tool"}, "judge: goes with calls in text, got call: tool"),
        ({"tool": "search", "call": "tool"}, "tool: goes with calls in text, got call: tool"),
        ({"place": "library"}, "place: 'library' is where a tool is called; name it, as tool: search"),
        ({"returned": "Go on."}, r"returned: it must contain \{reply\}"),
    ],
)
def test_judgements_that_cannot_be_asked_for_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CallReturn(**options)


def test_a_source_of_judgements_needs_somebody_who_judges(tmp_path):
    values = recipe_values("reseek", tmp_path)
    del values["protocol"]["judge"]
    values["protocol"]["returned"] = values["protocol"]["enough"] = "{reply}"
    with pytest.raises(ConfigError, match=r"reward\.sources: judgement scores what an agent says of results"):
        check_run(from_dict(values, "test"))


def test_a_worker_is_judged_too(tmp_path):
    """A planner judges a worker that is an agent. The worker's words are the result."""
    values = recipe_values("m_grpo", tmp_path, protocol={"judge": "{reply} ?", "returned": "on", "calls": 1})
    values["reward"] = {"sources": {"label": 1.0, "judgement": 1.0}, "rules": ["own"]}
    values["advantage"] = {"returns": "utterance", "baseline": "mean", "key": ["prompt", "role"], "singleton": "zero"}

    def script(request):
        if request.ask.role == "judge":
            return "<judge>yes</judge>" if request.rng_key[-2] else "?"
        if request.ask.role == "worker":
            return request.example.answer
        return "<call>q</call>" if request.turn == 0 else request.example.answer

    batch = played(scripted_trainer(values, script))
    for d in batch.dialogues:
        by_role = {u.role: u for u in d.utterances}
        assert by_role["judge"].parents == (by_role["worker"].id,)
        assert by_role["judge"].rewards["judgement"] == (0.3 if d.rollout else -0.3)
