"""No text takes long: hostile answers, labels, verdicts and data through everything that reads them."""

import time
from contextlib import suppress

import pytest
from hostile_runs import MADE, MATHEMATICS

from maporl import Arithmetic, Skills
from maporl.config.schema import JudgeSection
from maporl.datasets.tinygsm import labelling_function, whole_number
from maporl.evaluation.metrics import evaluate_dialogues
from maporl.grading.answers import LONGEST_LABEL, LONGEST_TEXT, same_answer
from maporl.grading.benchmarks import grade_benchmark
from maporl.methods.arenarl import PairwiseJudge
from maporl.methods.forum import Forum
from maporl.methods.games import plans
from maporl.methods.sections import ArenaSection
from maporl.protocols import CallReturn, Refine
from maporl.report.counts import Counts
from maporl.report.dialogues import entry
from maporl.report.read import Recorded
from maporl.rewards.base import RewardFailure
from maporl.rewards.judges import PointwiseJudge
from maporl.rewards.labels import label, near, readable
from maporl.tasks import ANLI, GSM8K, Episodes, Mathematics, TinyGSM
from maporl.text import PatternError, matches, visible
from maporl.types import Dialogue, Example, Utterance
from maporl.verifier.filters import fault, same_text

SEVERAL = {"is_multiple_answer": True}
TASKS = {
    "gsm8k": (GSM8K(), "5", {}),
    "math": (Mathematics(), "\\frac{x}{2}", {}),
    "math, several answers": (Mathematics(), "x, 2, (3, 4), y", SEVERAL),
    "math, a tolerance": (Mathematics(), "3.14", {"error": "1e-2"}),
    "anli": (ANLI(), "neutral", {}),
    "arithmetic": (Arithmetic(largest=9), "5", {}),
    "skills": (Skills(), "555", {}),
    "tinygsm": (TinyGSM(), "5", {}),
    "episodes": (Episodes(), "", {}),
}
JUDGED = [
    Dialogue(Example("e", "2+2=", "4"), [Utterance(0, "ann", "ann", 0, 0, [], t)], rollout=r)
    for r, t in enumerate("45")
]


def graded(name, text, label=None):
    """The grade of ``text`` by a task, against the task's own label or ``label``."""
    task, own, meta = TASKS[name]
    return task.grade(Example("e", "?", own if label is None else label, meta), text)


def judged(text):
    judge = PointwiseJudge(JudgeSection(agent="jo", unreadable=-1.0), lambda agent, asked: [text] * len(asked))
    arena = PairwiseJudge(ArenaSection(agent="jo"), lambda agent, asked: [text] * len(asked))
    return judge(JUDGED, TASKS["arithmetic"][0]), arena(JUDGED, TASKS["arithmetic"][0])


def searched(text):
    """The defaults of the protocols' regular expressions."""
    scores = [match[1] for match in matches(Forum().pattern, text)]
    first = next(matches(CallReturn().pattern, text), None)
    return scores, first, any(matches(CallReturn().form, text)), any(matches(Refine().approval, text, True))


def planned(text):
    """As the tool agent of a puzzle reads it, but for running the program."""
    return plans.PROGRAM.search(text), plans._stated(text, "UDLR")


def recorded(text):
    """Rewards, evaluation and report of a dialogue of two turns."""
    said = [
        Utterance(n, agent, agent, turn, turn, [], text, parents=(1 - n,) if turn else ())
        for n, (turn, agent) in enumerate([(0, "ann"), (0, "bob"), (1, "ann"), (1, "bob")])
    ]
    dialogue = Dialogue(Example("e", text, "5", {"category": text}), said)
    for source in (label, readable, near):
        source([dialogue], TASKS["gsm8k"][0])
    one = Recorded(0, "after", "key", dialogue)
    return evaluate_dialogues([dialogue]), entry(one), listening_of(one), visible(text)


def listening_of(one):
    class Run:
        def of(self, when):
            return [one]

    return Counts(Run()).listened


def converted(text):
    """A row of a data set whose every text is hostile."""
    task = Mathematics(remove=r"\s*Let's think step by step\.", levels=(5,))
    with suppress(ValueError):  # a level of a million digits is refused
        task._example({"question": text, "answer": text, "level": text}, 0)
    solution = GSM8K().solution(Example("e", text, "5", {"solution": text}))
    return solution, labelling_function(text), fault(text), fault(text, free_form=True), same_text(text)


READERS = {
    **{f"{name}: answer": lambda text, name=name: graded(name, text) for name in TASKS},
    **{f"{name}: marked answer": lambda text, name=name: graded(name, f"Answer: {text}") for name in TASKS},
    **{f"{name}: boxed answer": lambda text, name=name: graded(name, f"\\boxed{{{text}}}") for name in TASKS},
    **{f"{name}: label": lambda text, name=name: graded(name, "Answer: 5\nneutral", text) for name in TASKS},
    "gsm8k: both": lambda text: graded("gsm8k", f"\\boxed{{{text}}}", text),
    "math: both": lambda text: graded("math", f"\\boxed{{{text}}}", text),
    "several answers: both": lambda text: graded("math, several answers", f"\\boxed{{{text}}}", text),
    "a tolerance": lambda text: grade_benchmark("\\boxed{3.14}", "3.1", {"error": text}),
    "judges": judged, "protocols": searched, "plans": planned, "records": recorded, "rows": converted,
}  # fmt: skip
"""Everything that reads a text of a model or of a data set, by name."""


@pytest.fixture
def spent():
    """A function that gives the CPU seconds of this thread since it was called last."""
    last = [time.thread_time()]

    def since():
        before, last[0] = last[0], time.thread_time()
        return last[0] - before

    return since


def slowest(texts, readers, spent):
    """(CPU seconds, reader, text) of the slowest reading. What a reader raises is a failure, too."""
    found = (0.0, "", "")
    spent()
    for text_name, text in texts.items():
        for name, read in readers.items():
            read(text)
            found = max(found, (spent(), name, text_name))
    return found


def test_whoever_reads_a_text_reads_each_hostile_one():
    for text in [make(100) for make in MADE.values()] + ["", " "]:
        for read in READERS.values():
            read(text)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1_000, 30_000, 100_000, 300_000, 1_000_000])
def test_no_text_takes_a_second_anywhere(length, spent):
    seconds, reader, text = slowest({name: make(length) for name, make in MADE.items()}, READERS, spent)
    assert seconds < 1, (reader, text)


@pytest.mark.slow
def test_no_mathematics_takes_a_second_anywhere(spent):
    same_answer("x+1", "1+x")  # imports what computes
    seconds, reader, text = slowest({text: text for text in MATHEMATICS}, READERS, spent)
    several = {f"{text}, ...": ", ".join([text] * 5 + ["x"] * 5) for text in MATHEMATICS}
    seconds, reader, text = max((seconds, reader, text), slowest(several, READERS, spent))
    assert seconds < 1, (reader, text)


def test_a_mark_every_few_characters_is_read_from_the_end():
    """The last marks count, and what stands before the end of a very long text does not."""
    assert graded("gsm8k", "The answer is 5. " + "Perhaps the answer is open. " * 50).correct is True
    assert graded("gsm8k", "The answer is 5. " + "Perhaps the answer is open. " * 200).answer is None
    assert graded("gsm8k", "x " * LONGEST_TEXT + "Answer: 5").correct is True
    assert graded("gsm8k", "Answer: 5\n" + "x " * LONGEST_TEXT).answer is None
    assert graded("anli", "x " * LONGEST_TEXT + "Answer: neutral").correct is True


def test_a_label_that_is_too_long_cannot_be_graded():
    for name in ("gsm8k", "math", "tinygsm"):
        grade = graded(name, "Answer: 5", "5" + " " * LONGEST_LABEL)
        assert (grade.answer, grade.correct) == (None, None)
        assert grade.reason == f"the label has {LONGEST_LABEL + 1} characters; at most {LONGEST_LABEL} are compared"
    assert same_answer("5", "5" + " " * LONGEST_LABEL) is None
    grade = graded("anli", "Answer: neutral", "x" * 10**6)
    assert grade.correct is None and len(grade.reason) < 300
    many = ", ".join(str(n) for n in range(33))
    assert graded("math, several answers", f"\\boxed{{{many}}}", many).reason == "the label lists more than 32 answers"
    fewer = ", ".join(str(n) for n in range(32))
    assert graded("math, several answers", f"\\boxed{{{fewer}}}", fewer).correct is True


def test_numbers_without_end_are_no_numbers():
    assert whole_number(10**400) is None and whole_number(-(10**300)) == "-1" + "0" * 300
    assert whole_number(1e308) == str(round(1e308)) and whole_number(float("inf")) is None
    for error in ("1e999999999", "1/0", "9" * 5000, "nan"):
        assert grade_benchmark(r"\boxed{3.14}", "3.1416", {"error": error}).correct is False
    for text in ("1e" + "9" * 5000, "10^{" + "9" * 5000 + "}", "9" * 5000, "1/" + "9" * 5000):
        assert grade_benchmark(rf"\boxed{{{text}}}", "5").correct is False
        assert grade_benchmark(r"\boxed{5}", text).correct is False


def test_a_users_regular_expression_cannot_search_for_ever(monkeypatch):
    monkeypatch.setattr("maporl.text.PATTERN_SECONDS", 0.2)
    endless = r"(?s)<call>(.*?)</call>"
    with pytest.raises(PatternError, match=r"took more than 0\.2 s on a text of 600000 characters; write one in which"):
        next(matches(endless, "<call>" * 100_000), None)
    section = JudgeSection(agent="jo", pattern=endless)
    with pytest.raises(PatternError):
        PointwiseJudge(section, lambda agent, asked: ["<call>" * 100_000] * len(asked))(JUDGED, TASKS["arithmetic"][0])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: JudgeSection(agent="jo", pattern="("), "pattern: '\\(' is not a regular expression"),
        (lambda: ArenaSection(agent="jo", pattern="(a)(b)"), "pattern: expected at most one group"),
        (lambda: Forum(pattern="("), "pattern: '\\(' is not a regular expression"),
        (lambda: CallReturn(form="["), "form: '\\[' is not a regular expression"),
    ],
)
def test_a_pattern_that_is_none_is_refused_before_anything_loads(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("found", ["nan", "", "1e"])
def test_a_verdict_that_is_no_number_is_unreadable(found):
    def verdicts(unreadable):
        section = JudgeSection(agent="jo", pattern=r"Score: *(.*)", unreadable=unreadable)
        judge = PointwiseJudge(section, lambda agent, asked: [f"Score: {found}"] * len(asked))
        return judge(JUDGED, TASKS["arithmetic"][0])

    assert verdicts(0.25) == [[0.25], [0.25]]
    with pytest.raises(RewardFailure, match="finds no number"):
        verdicts(None)


def test_what_is_called_is_what_stands_between_the_nearest_marks():
    assert next(matches(CallReturn().pattern, "I may <call> you: <call>2+2</call>"))[1] == "2+2"
    assert next(matches(CallReturn().pattern, "<call>a < b\nand c</call> <call>d</call>"))[1] == "a < b\nand c"
