"""A judge that marks everything that is said, as a coach does, and MAPPA's use of the marks."""

from collections import defaultdict

import torch
from scripted_training import played, recipe_values, scripted_trainer

from maporl import Arithmetic
from maporl.config.schema import JudgeSection
from maporl.rewards.judges import PointwiseJudge
from maporl.types import Call, Dialogue, Example, Result, Utterance
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

TASK = Arithmetic(largest=9)


def said(number, agent, text, answers, **more):
    asked = [{"role": "user", "content": "2+2="}]
    return Utterance(number, agent, agent, 0, number, asked, text, answers=answers, **more)


def test_a_coach_marks_what_does_not_answer_too():
    shown = []

    def speak(agent, conversations):
        shown.extend(c[0]["content"] for c in conversations)
        return ["Score: 8"] * len(conversations)

    call = Call("0.0", "search", {}, None, Result("found"))
    plan = said(0, "ann", "a plan", False, role="planner", calls=[call])
    dialogue = Dialogue(Example("e", "2+2=", "4"), [plan, said(1, "bob", "4", True)])
    prompt = "{agent}|{role}|{input}|{answer}|{tools}|{reference}"
    section = JudgeSection(agent="jo", prompt=prompt, scores="everything")
    judge = PointwiseJudge(section, speak)
    assert judge([dialogue], TASK) == [[0.8, 0.8]] and judge.answers_only is False
    assert shown == ["ann|planner|2+2=|a plan|found|4", "bob|bob|2+2=|4|nothing|4"]
    assert PointwiseJudge(JudgeSection(agent="jo"), speak).answers_only is True


# -- MAPPA ------------------------------------------------------------------------------------------------------------

MARKS, LENGTHS = [8, 6, 3, 7], [2, 5, 10, 3]
WHITENED = [1.6316, 0.5956, -0.9582, 1.1136]


def mappa(tmp_path, readable=False):
    """The trainer of mappa and what its coach was asked. Dialogue k of the update has mark and length k for all."""
    values = recipe_values("mappa", tmp_path, questions=2, ppo={"response_length": 12, "kl_coef": 0.0})
    counts, asked = defaultdict(int), []

    def script(request):
        agent = request.ask.agent
        if agent == "coach":
            text = request.ask.messages[-1]["content"]
            asked.append(text)
            length = len(text.partition("It said:\n")[2].partition("\n")[0]) + 1  # and its end
            mark = MARKS[LENGTHS.index(length)]
            return f"Score: {mark}" if readable or mark != 7 else "hm"
        counts[agent] += 1
        return "x" * (LENGTHS[(counts[agent] - 1) % 4] - 1)

    return scripted_trainer(values, script), asked


def advantages(batch):
    """By policy, the advantages of each row's tokens, by the row's length."""
    found = defaultdict(dict)
    for policy, tokens in batch.token_batches.items():
        for i in range(len(tokens)):
            own = tokens.advantages[i][tokens.sampled_mask[i]]
            found[policy][len(own)] = own
    return found


def test_mappa_whitens_marks_over_the_tokens_of_each_agent(tmp_path):
    """Marks 8, 6, 3 and 7 of 2, 5, 10 and 3 tokens, over the population of tokens."""
    trainer, _ = mappa(tmp_path, readable=True)
    found = advantages(played(trainer))
    assert found.keys() == {"planner", "solver", "checker"}
    for own in found.values():
        for length, expected in zip(LENGTHS, WHITENED, strict=True):
            torch.testing.assert_close(own[length], torch.full((length,), expected), atol=1e-3, rtol=0)


def test_the_coach_of_mappa_sees_what_an_agent_was_shown_and_did(tmp_path):
    trainer, asked = mappa(tmp_path)
    batch = played(trainer)
    spoken = [u for d in batch.dialogues for u in d.utterances]
    assert len(asked) == len(spoken) == 2 * 2 * 3
    first = next(text for text in asked if "coach the planner" in text)
    question = batch.dialogues[0].example.question
    assert question in first and "The right answer is" in first and "Its calls returned:\nnothing" in first
    assert {u.rewards["judge"] for u in spoken} == {0.8, 0.6, 0.3, 0.5}, "an unreadable mark is 5 of 10"
    assert all("score" in u.rewards for u in spoken)


def test_a_check_knows_that_a_coach_credits_everything(tmp_path):
    config = from_dict(recipe_values("mappa", tmp_path), "test")
    (line,) = [line for line in check_run(config) if line.startswith("credit:")]
    assert "planner, solver: other words (judge 1), by reward.rules [own]" in line
    assert "checker: answers (judge 1, label 0)" in line
