"""The first screen of a run's page: its title, its verdict, its numbers and its two dialogues."""

import json

import pytest
from hostile_runs import AFTER, BEFORE, RIGHT, WRONG, debate, utterance, write_run

from maporl.evaluation.metrics import Difference
from maporl.report.dialogues import compared_with
from maporl.report.exhibits import exhibits
from maporl.report.language import model_name, named, part_name
from maporl.report.page import about, title_of
from maporl.report.read import read_run
from maporl.report.result import first_screen
from maporl.report.story import setup
from maporl.types import Dialogue, Example, Grade, Trace, Utterance

CACHED = "/home/me/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/0a1b2c"


def numbers(run):
    return [(n["label"], n["value"], n["interval"], n["note"]) for n in first_screen(run)["numbers"]]


# -- names --------------------------------------------------------------------------------------------------------


def test_models_and_parts_have_the_names_that_people_use(tmp_path):
    assert model_name(CACHED) == "HuggingFaceTB/SmolLM2-135M" and model_name("gpt2") == "gpt2"
    assert named(f'"{CACHED}"') == '"HuggingFaceTB/SmolLM2-135M"'
    assert part_name("__main__.PlanSolveCheck") == part_name("__main__:PlanSolveCheck") == "PlanSolveCheck"
    assert part_name("parts/mine.py:Relay") == part_name("test.<locals>.Relay") == "Relay"
    assert part_name("openai/gsm8k") == "openai/gsm8k"
    agents = {"solo": {"model": CACHED, "lora": {"r": 8}}}
    run = read_run(write_run(tmp_path / "one", agents=agents, protocol={"name": "__main__.PlanSolveCheck"}))
    rows = dict(setup(run))
    assert rows["Agent solo"] == "HuggingFaceTB/SmolLM2-135M, LoRA" and rows["Protocol"] == "PlanSolveCheck"
    shown = about([run, run])
    text = json.dumps([{k: v for k, v in one.items() if k != "config"} for one in shown["runs"]])
    assert "__main__" not in text + json.dumps(shown["comparison"]) and "snapshots" not in text


@pytest.mark.parametrize(
    "folder, title",
    [
        ("quickstart", "quickstart"),
        ("run", "ann and bob on toy_sum"),
        ("output_2", "ann and bob on toy_sum"),
        ("2026-11-26T10", "ann and bob on toy_sum"),
        ("models--org--team/snapshots/0a1b2c3d4e5f", "org/team"),
    ],
)
def test_the_title_is_a_name_that_a_person_gave_or_what_the_team_and_the_task_say(tmp_path, folder, title):
    (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
    assert title_of(read_run(write_run(tmp_path / folder))) == title


# -- numbers and words --------------------------------------------------------------------------------------------


def test_three_numbers_and_a_verdict_say_what_the_team_learned(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    shown = first_screen(run)
    assert shown["about"] == "How often answers are right, on 10 held-out questions."
    assert numbers(run) == [
        ("Before training", "0.0%", "0.0 to 27.8%", "last turn"),
        ("After training", "75.0%", "44.2 to 91.9%", "last turn"),
        ("By talking", "+30.0 points", "+8.3 to +51.7 points", "last turn minus first turn, after training"),
    ]
    assert shown["verdict"] == [
        "The team learned to answer and to talk: first answers got better, and talking adds more to them.",
        "Talking helps on average, but the team is not clearly better than bob alone.",
    ]


def test_the_verdict_does_not_name_what_is_a_tenth_of_the_gain_or_less(tmp_path):
    """First answers gain 2.5 points, surely (0.4 to 4.6), and last ones 50."""
    half, whole = (RIGHT, WRONG), (RIGHT, RIGHT)
    before = [debate(f"q{n}", half, half) for n in range(100)]
    after = [debate(f"q{n}", whole if n < 5 else half, whole) for n in range(100)]
    told = first_screen(read_run(write_run(tmp_path / "run", before=before, after=after)))["verdict"]
    assert told[0] == "The team learned to use what is said: last answers got better, and first answers hardly did."


def test_a_run_without_an_evaluation_after_training_shows_training_and_says_so(tmp_path):
    run = read_run(write_run(tmp_path / "run", updates=30, after=None))
    assert first_screen(run)["verdict"] == [] and first_screen(run)["about"] == (
        "How often answers of the last turn are right. No evaluation after training is recorded."
    )
    # Wilson of 80 of 80: 80 / (80 + 3.8415); turn 1 is 0.1 and turn 2 is 1 in all of the last 10 updates
    assert numbers(run) == [
        ("Before training", "0.0%", "0.0 to 27.8%", "10 held-out questions"),
        ("Last updates", "100.0%", "95.4 to 100.0%", "training questions, last 10 updates"),
        ("By talking", "+90.0 points", "+90.0 to +90.0 points", "training questions, last turn minus first, last 10 updates"),
    ]  # fmt: skip
    assert numbers(read_run(write_run(tmp_path / "none", updates=0, before=None, after=None))) == []


def test_a_single_agent_shows_what_training_changed(tmp_path):
    def alone(name, ok):
        return Dialogue(Example(name, f"{name}=", "2"), [utterance(0, "solo", 0, *(RIGHT if ok else WRONG))])

    before, after = ([alone(f"q{n}", n in right) for n in range(8)] for right in ({0}, set(range(1, 8))))
    run = read_run(write_run(tmp_path / "run", before=before, after=after, agents={"solo": {}}))
    # differences 7 x 1 and -1: mean 0.75, standard deviation sqrt((7 x 0.0625 + 3.0625) / 7) = 0.7071
    assert numbers(run)[2] == ("By training", "+75.0 points", "+26.0 to +100.0 points", "after minus before")
    assert first_screen(run)["verdict"] == ["The agent learned: its answers are right more often than before training."]
    better, worse = exhibits(run)
    assert [(line["when"], line["correct"]) for line in better["lines"]] == [
        ("before training", False), ("after training", True),
    ]  # fmt: skip
    assert worse["told"] == "solo was right before training and is wrong after it." and worse["question"] == "q0="


def scored(name, *scores):
    said = [
        Utterance(turn, "ann", "ann", turn, turn, [], f"{s}", grade=Grade(None, None, ""), rewards={"score": s})
        for turn, s in enumerate(scores)
    ]
    return Dialogue(Example(name, f"{name}=", ""), said)


def test_a_run_without_labels_shows_scores(tmp_path):
    before = [scored(f"p{n}", 0.1, 0.1) for n in range(4)]
    after = [scored(f"p{n}", 0.5, 0.5 + 0.1 * n) for n in range(4)]
    folder = write_run(tmp_path / "run", before=before, after=after)
    for when, score in (("before", 0.1), ("after", 0.575)):
        file = folder / f"evaluation_{when}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rewards": {"reward/score": score}}))
    run = read_run(folder)
    # means of the dialogues 0.5, 0.55, 0.6, 0.65: standard error 0.0645 / 2; gains 0, 0.1, 0.2, 0.3: 0.1291 / 2
    assert numbers(run) == [
        ("Before training", "0.100", "0.100 to 0.100", "held-out questions"),
        ("After training", "0.575", "0.512 to 0.638", "held-out questions"),
        ("By talking", "+0.150", "+0.023 to +0.277", "last turn minus first turn, after training"),
    ]
    assert first_screen(run)["verdict"] == ["Scores rose on held-out questions."]
    raised, lowered = exhibits(run)
    assert raised["told"] == "ann earned 0.500 in turn 1 and 0.800 in turn 2."
    assert lowered["told"] == "No answer's score was lowered by talking." and lowered["lines"] == []


# -- dialogues ----------------------------------------------------------------------------------------------------


def heard(name, first, last):
    """A debate in which each agent is shown the other's first answer."""
    dialogue = debate(name, first, last)
    for u in dialogue.utterances[2:]:
        u.parents = (3 - u.id,)
    return dialogue


def test_the_two_dialogues_are_held_out_and_say_what_changed(tmp_path):
    after = [*AFTER, heard("long", (WRONG, RIGHT), (RIGHT, RIGHT))]
    run = read_run(write_run(tmp_path / "run", after=after, dialogues=[heard("t", (RIGHT, WRONG), (WRONG, WRONG))]))
    better, worse = exhibits(run)
    assert better["told"] == "ann was wrong in turn 1, was shown what bob said, and is right in turn 2."
    assert (better["where"], better["question"], better["label"]) == (
        "A held-out question, after training",
        "long=",
        "2",
    )
    assert [line["changed"] for line in better["lines"]] == [False, False, True, False]
    assert worse["told"] == "bob was right in turn 1 and is wrong in turn 2." and worse["key"] == "after/q7"


def test_what_no_held_out_dialogue_shows_is_taken_from_training_or_said_in_words(tmp_path):
    spoiled = heard("t", (RIGHT, WRONG), (WRONG, WRONG))
    run = read_run(write_run(tmp_path / "one", after=AFTER[:7], dialogues=[spoiled]))
    assert exhibits(run)[1]["told"] == (
        "ann was right in turn 1, was shown what bob said, and is wrong in turn 2. No right answer became wrong in 7 "
        "held-out dialogues after training."
    )
    assert exhibits(run)[1]["title"] == "Talking spoiled a right answer"
    assert exhibits(run)[1]["where"] == "A question in training, update 1"
    none = exhibits(read_run(write_run(tmp_path / "two", after=AFTER[:7], dialogues=AFTER[:1])))[1]
    assert (none["lines"], none["told"]) == (
        [],
        "No right answer became wrong in 7 held-out dialogues after training. No right answer became wrong in 1 "
        "dialogue of the last 10 updates.",
    )
    assert exhibits(read_run(write_run(tmp_path / "three", before=None, after=None))) == []


def test_two_runs_on_one_task_are_compared_question_by_question(tmp_path):
    one, two = read_run(write_run(tmp_path / "one")), read_run(write_run(tmp_path / "two", after=BEFORE))
    assert Difference.of([(0.75, 0.0)]).sign == -1
    assert about([one, two])["comparison"]["verdict"] == (
        "On 10 held-out questions, two is worse than one: -75.0 points (95% interval -100.0 to -48.7, compared question "
        "by question). With 1 seed of each, chance in training may explain any difference, so this comparison proves "
        "nothing about how they were trained."
    )
    never = [debate(f"q{n}", (WRONG, WRONG), (WRONG, WRONG)) for n in range(4)]
    both = [read_run(write_run(tmp_path / name, after=never)) for name in ("three", "four")]
    assert about(both)["comparison"]["verdict"].endswith("No answer was ever right, so this comparison proves nothing.")


def test_runs_with_different_rewards_say_so_beside_their_scores(tmp_path):
    one, two = (
        paid(tmp_path / name, (0, 1), (0, 1), sources) for name, sources in (("one", MORE), ("two", {"label": 1}))
    )
    versus = about([one, two])["comparison"]
    rows = {row["key"]: row["values"] for row in versus["results"]}
    assert rows["right after training"] == ["100.0% (67.6 to 100.0%), score 1.000"] * 2 and versus["scores"]
    assert versus["rewards"] == (
        "These scores are different sums and cannot be compared. one: The reward is label + 0.5 format. two: The reward "
        "is label."
    )
    assert about([one, one])["comparison"]["rewards"] == ""


MORE = {"label": 1.0, "format": 0.5}


def paid(folder, right, scores, sources, unmeasured=None):
    """A run of eight questions with these shares of right answers and mean scores, before and after training."""

    def played(share, score):
        said = [utterance(0, "ann", 0, *(RIGHT if n < 8 * share else WRONG)) for n in range(8)]
        for n, u in enumerate(said):
            u.rewards = {} if score is None else {"score": score + 0.01 * (n % 2)}
        return [Dialogue(Example(f"q{n}", f"{n}=", "2"), [u]) for n, u in enumerate(said)]

    ends = [played(*each) for each in zip(right, scores, strict=True)]
    write_run(folder, before=ends[0], after=ends[1], reward={"sources": sources})
    for when, score in zip(("before", "after"), scores, strict=True):
        file = folder / f"evaluation_{when}.json"
        more = {"rewards": {} if score is None else {"reward/score": score}, "unmeasured": unmeasured or {}}
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return read_run(folder)


def test_scores_stand_before_accuracies_and_say_what_they_are_without(tmp_path):
    why = {"judge": "agent carol would be asked about every answer"}
    shown = first_screen(paid(tmp_path / "run", (0, 1), (0.5, 0.25), MORE | {"judge": 1.0}, why))
    assert shown["verdict"] == ["Scores fell, but answers are right more often than before training."]
    by_label = first_screen(paid(tmp_path / "label", (0, 1), (0.5, 0.25), {"label": 1.0, "tokens": 0.0}))["verdict"]
    assert by_label == ["The team learned: its answers are right more often than before training."]
    # eight scores of 0.25 and 0.26: standard error 0.00535 / sqrt(8), around the mean that the evaluation recorded
    assert [(n["label"], n["value"], n["interval"]) for n in shown["numbers"]] == [
        ("Score before training", "0.500", "0.496 to 0.504"),
        ("Score after training", "0.250", "0.246 to 0.254"),
        ("Before training", "0.0%", "0.0 to 32.4%"),
        ("After training", "100.0%", "67.6 to 100.0%"),
    ]
    assert shown["about"] == (
        "How often answers are right, on 8 held-out questions. A score is the mean of what training pays an utterance "
        "before credit is assigned. The score is without rewards that an evaluation does not ask for (judge: agent carol "
        "would be asked about every answer)."
    )


def test_an_utterance_says_which_others_it_was_compared_with():
    group = {"by": "baseline", "name": "mean", "key": {"prompt": 3, "agent": "ann", "turn": 1}, "utterances": 8,
             "questions": 1, "credit": 0.25}  # fmt: skip
    u = utterance(0, "ann", 1, "2", True, trace=Trace(["a"], [-0.5], [1.0], None, group))
    assert compared_with(u) == (
        "One of 8 utterances on 1 question of this update (the same question, agent ann, turn 2), whose credits are "
        "compared (baseline mean). Their mean credit is 0.250."
    )
    u.trace = Trace(["a"], [-0.5], [1.0])
    assert compared_with(u) is None
