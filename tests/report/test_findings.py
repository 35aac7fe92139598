"""The table of findings: each sentence stands under its condition, and no row is without a case."""

from types import SimpleNamespace

import pytest
from tiny_runs import TWO, played

from maporl.evaluation.metrics import Difference, Share
from maporl.report.counts import Calls, Case
from maporl.report.exhibits import Shown
from maporl.report.findings import FINDINGS, said
from maporl.report.groups import Pace
from maporl.studies.crossplay.alpha_rank import with_survival
from maporl.studies.crossplay.result import seatings
from maporl.types import Dialogue, Example, Utterance


class Some(SimpleNamespace):
    """Counts of which the others are None."""

    def __getattr__(self, name):
        return None


MORE, LESS, NONE, ZERO = (Difference(*numbers) for numbers in ((0.5, 0.25, 0.75), (-0.5, -0.75, -0.25), (0.1, -0.1, 0.3), (0, 0, 0)))  # fmt: skip
TEAM = ["ann", "bob"]


def run(after=(), updates=(), dialogues=(1,), **more):
    """The counts of a run with dialogues after training, updates, and a number of recorded dialogues."""
    record = Some(of=lambda when: after, updates=lambda: updates, dialogues=dialogues, after=more.pop("report", None))
    return Some(**{"run": record, "agents": TEAM, "right": {}, "temperatures": (None, None), **more})


def loop(finished, done, stages=()):
    stages = {"rounds": 3, "questions": 12, "stages": stages}
    return Some(finished=finished, updates=lambda: [1] * done, section=lambda name: stages)


def said_by(turn, score, agent="ann"):
    return Utterance(turn, agent, agent, turn, turn, [], "", parents=(5,) if turn else (), rewards={"score": score})


def teams(own, mixed, **more):
    """A cross-play of three runs: how often teams are right on four questions that trained together, and mixed ones."""
    return played({t: own if t[0] == t[1] else mixed for t in seatings(3, 2)}, ("one", "two", "three"), **more)


ONE = SimpleNamespace(dialogue=Dialogue(Example("q", "", ""), [said_by(0, 0.25), said_by(5, 0.0, "bob"), said_by(1, 0.5)], "illegal"))  # fmt: skip
WAS, BOB, NOW = ONE.dialogue.utterances
BOB.id = 5
MEASURED = Some(unmeasured={"judge": "nobody was asked"})
CASES = [
    ("verdict", run(game="chess", gain=MORE), ""),
    ("verdict", run(unlabelled=True, score_sign=1), "Scores rose on held-out questions."),
    ("verdict", run(gain=LESS, apart=True), "Answers are right less often than before training."),
    ("verdict", run(gain=MORE, apart=True, score_sign=-1), "Scores fell, but answers are right more often than before training."),
    ("verdict", run(gain=NONE, apart=True, score_sign=1), "Scores rose, but answers are not clearly right more often or less often than before training."),
    ("verdict", run(gain=LESS, talking=LESS), "The team got worse: its last answers are right less often than before training. Talking hurts."),
    ("verdict", run(gain=ZERO, talking=ZERO), "Training changed nothing that the held-out questions show. Talking changes nothing that the held-out questions show."),
    ("verdict", run(gain=NONE, talking=NONE), "It is not clear that the team learned: chance in the choice of questions may explain the difference. It is not clear that talking helps."),
    ("verdict", run(gain=MORE, learned=(True, True), talking=MORE, best=("bob", NONE)), "The team learned to answer and to talk: first answers got better, and talking adds more to them. Talking helps on average, but the team is not clearly better than bob alone."),
    ("verdict", run(gain=MORE, learned=(False, True), talking=MORE, best=("bob", MORE)), "The team learned to use what is said: last answers got better, and first answers hardly did. Talking helps."),
    ("verdict", run(gain=MORE, learned=(True, False)), "The team learned to answer: first answers got better, and talking adds no more than before."),
    ("verdict", run(gain=MORE, agents=["solo"]), "The agent learned: its answers are right more often than before training."),
    ("gain", run(gain=MORE, talking=ZERO), "By training: +50.0 points (95% interval +25.0 to +75.0, compared question by question)."),
    ("about", run(dialogues=()), "Nothing has been trained yet."),
    ("about", run(after=[1], report=Some(unmeasured={}), game="chess", ended=[1, 2], unit="game"), "chess: 2 held-out games after training."),
    ("about", run(unlabelled=True, scored=[1], updates=[1]), "The mean score of an utterance. The questions have no labels. No evaluation after training is recorded."),
    ("about", run(right={"after": Share(3, 8)}, report=MEASURED), "How often answers are right, on 8 held-out questions. The score is without rewards that an evaluation does not ask for (judge: nobody was asked)."),
    ("about", run(last_turn="accuracy/turn_2", updates=[1]), "How often answers of the last turn are right. No evaluation after training is recorded."),
    ("about", run(right={"after": Share(1, 1)}, pays_more=True, score_means={"after": 1.0}), "How often answers are right, on 1 held-out question. A score is the mean of what training pays an utterance before credit is assigned."),
    ("about", run(right={"after": Share(1, 1)}, pays_more=True), "How often answers are right, on 1 held-out question. What training pays for was not measured on these questions."),
    ("drawn", run(temperatures=(0.0, 0.9)), "Held-out answers are the likeliest ones, and answers in training are sampled at temperature 0.9, so the charts of training cannot be compared with the held-out numbers."),
    ("drawn", run(temperatures=(0.9, 0.9)), ""),
    ("answers", 0.0, "the likeliest ones"),
    ("answers", 0.5, "sampled at temperature 0.5"),
    ("rounds", loop(False, 0), "No round has ended."),
    ("rounds", loop(True, 3, [{"train": "reward", "build": "joint"}, {"train": "ppo", "updates": 2}, {"train": "dpo", "build": {"best_of": {}}}]), "The team was trained in 3 rounds. A round samples up to 12 questions and then trains a reward model on joint, then by 2 updates of PPO, then by DPO on best_of."),
    ("rounds", loop(False, 1, [{"train": "sft", "build": "threshold"}]), "The team was trained in 1 of 3 rounds so far. A round samples up to 12 questions and then trains by SFT on threshold."),
    ("reward", {"sources": {"label": 1, "mine.py:Short": 0.5}}, "The reward is label + 0.5 Short."),
    ("warm start", {"steps": 300}, "A supervised warm start of 300 steps on written answers came first, and \u201cbefore training\u201d means after it."),
    ("warm start", {}, ""),
    ("tools", Calls("after", {"ann": Share(1, 2)}, 3, 1, 2, MORE), "After training, ann called in 50.0% (9.5 to 90.5%) of 2 turns. 1 of 3 calls failed. Over 2 questions with turns of both kinds, accuracy with calls minus accuracy without is +50.0 points (95% interval +25.0 to +75.0, compared question by question)."),
    ("others", played(TWO), "Teams that trained together are right 81.2% (34.6 to 97.3%) of the time, and teams whose agents come from different runs 43.8% (12.0 to 81.7%), on 4 questions. Trained together minus mixed: +37.5 points (95% interval +13.0 to +62.0, compared question by question). With 2 seeds of each, chance in training may explain any difference, so this comparison proves nothing about how they were trained."),
    ("others", teams((1.0, 1.0, 1.0, 0.5), (0.5, 0.0, 0.5, 0.0)), "... So a part of what the agents learned works with their own partners only."),
    ("others", teams((1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.5)), "... The interval contains 0, so no dependence on the own partners is seen."),
    ("others", teams((0.0,) * 4, (1.0,) * 4, left_out=2), "... So the agents do not depend on their own partners: teams of strangers are even better. 2 held-out questions of one were left out, because another run was trained on them."),
    ("cells", played(TWO), "A row has ann of one run, and a column has bob of one run. The diagonal has the teams that trained together. The mean of the others is over 2 mixed teams."),
    ("cells", with_survival(played(TWO)), "... Where seats were refilled again and again by the agents of whichever run does better (alpha-Rank), the time would be spent in these teams: ann of one with bob of one 100%."),
    ("cells", played(dict.fromkeys(seatings(2, 3), (1.0,)), seats=("ann", "bob", "cat")), "A row has the agents ann, bob and cat of one run. Off the diagonal, one of them comes from the column's run; the number is the mean over which one. The diagonal has the teams that trained together. The mean of the others is over 6 mixed teams."),
    ("scope", run(ended=[]), ""),
    ("scope", run(ended=[1], unit="question", after=[1]), "1 held-out question after training"),
    ("scope", run(ended=[1, 2], unit="dialogue"), "2 dialogues recorded in the last 10 updates"),
    ("fails", Case("wrong", [], 2, 10, "question"), "The last answer is wrong on 2 of 10 questions (20.0%)."),
    ("fails", Case("cut", [], 1, 1, "illegal move"), "1 of 1 illegal move (100.0%) reached the length limit."),
    ("fails", Case("moved", [], 1, 4, "game", "{ann}"), "{ann} moved illegally in 1 of 4 games (25.0%) in which it moved."),
    ("pace", Pace("ann", "", "", 0.45), "The processes of every group are idle more than half of the time; those of ann work 45% of it. The driver sets the pace: the chart of seconds per update says with what."),
    ("pace", Pace("ann", "learner", "learning", 0.7), "Group ann learns 70% of the time. Learning sets the pace: a larger cluster.groups.ann.learner.devices shortens an update."),
    ("pace", Pace("bob", "engines", "dead", 0.6), "The engines of bob are dead 60% of the time. Processes that die set the pace: the folder logs/ has what they printed."),
    ("pace", Pace("bob", "engines", "sampling", 0.6), "The engines of bob sample 60% of the time. Sampling sets the pace: a larger cluster.groups.bob.engines.replicas shortens an update."),
    ("pace", Pace("ann", "engines", "sending", 0.5), "The engines of ann take over weights 50% of the time. Sending weights sets the pace: adapters (lora) have fewer weights to send."),
    ("pace", Pace("ann", "learner", "saving", 0.5), "Group ann saves 50% of the time. Saving sets the pace: training.async_save writes while training goes on, and training.save_steps saves less often."),
    ("dialogue", Shown("game", True, asked=4), "None of 4 games was one."),
    ("dialogue", Shown("game", False, ONE), "It ended: illegal."),
    ("dialogue", Shown("answer", False), "No recorded answer is wrong."),
    ("dialogue", Shown("answer", True, ONE, NOW, NOW), "ann is right."),
    ("dialogue", Shown("training", True, asked=2), "No wrong answer became right on 2 held-out questions."),
    ("dialogue", Shown("training", False, ONE, WAS, NOW), "ann was right before training and is wrong after it."),
    ("dialogue", Shown("score", True), "No answer has one."),
    ("dialogue", Shown("score", True, ONE, NOW, NOW), "ann earned 0.500."),
    ("dialogue", Shown("scores", False), "No answer's score was lowered by talking."),
    ("dialogue", Shown("scores", True, ONE, WAS, NOW), "ann earned 0.250 in turn 1 and 0.500 in turn 2."),
    ("dialogue", Shown("talking", True, ONE, WAS, NOW), "ann was wrong in turn 1, was shown what bob said, and is right in turn 2."),
    ("dialogue", Shown("talking", False, asked=3, recent=1), "No right answer became wrong in 3 held-out dialogues after training. No right answer became wrong in 1 dialogue of the last 10 updates."),
]  # fmt: skip


@pytest.mark.parametrize("section, counts, text", CASES)
def test_a_sentence_stands_under_its_condition(section, counts, text):
    told = said(section, counts)
    assert told.endswith(text.removeprefix("...")) if text.startswith("...") else told == text


def test_no_row_is_without_a_case():
    def is_said(row):
        before = [other for other in FINDINGS[: FINDINGS.index(row)] if other[:2] == row[:2]]
        return any(
            not any(other.holds(counts) for other in before) and row.holds(counts)
            for section, counts, _ in CASES
            if section == row.section
        )

    assert [row[:2] for row in FINDINGS if not is_said(row)] == []
