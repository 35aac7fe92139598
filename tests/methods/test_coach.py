"""A judge that marks everything that is said, as a coach does, and MAPPA's use of the marks."""

from collections import defaultdict

import torch
from scripted_training import played, recipe_values, scripted_trainer

from maporl import Arithmetic
from maporl.advantages.transforms import CumulativeKL
from maporl.config.parse import read_yaml
from maporl.config.recipes import recipe_file
from maporl.config.schema import JudgeSection
from maporl.rewards.judges import PointwiseJudge
from maporl.types import Call, Dialogue, Example, Result, Utterance
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

TASK = Arithmetic(largest=9)


def said(number, agent, text, answers, **more):
    return Utterance(
        number, agent, agent, 0, number, [{"role": "user", "content": "2+2="}], text, answers=answers, **more
    )


def test_a_coach_marks_what_does_not_answer_too():
    shown = []

    def speak(agent, conversations):
        shown.extend(c[0]["content"] for c in conversations)
        return ["Score: 8"] * len(conversations)

    call = Call("0.0", "search", {}, None, Result("found"))
    dialogue = Dialogue(
        Example("e", "2+2=", "4"),
        [said(0, "ann", "a plan", False, role="planner", calls=[call]), said(1, "bob", "4", True)],
    )
    section = JudgeSection(
        agent="jo", prompt="{agent}|{role}|{input}|{answer}|{tools}|{reference}", scores="everything"
    )
    judge = PointwiseJudge(section, speak)
    assert judge([dialogue], TASK) == [[0.8, 0.8]] and judge.answers_only is False
    assert shown == ["ann|planner|2+2=|a plan|found|4", "bob|bob|2+2=|4|nothing|4"]
    assert PointwiseJudge(JudgeSection(agent="jo"), speak).answers_only is True


# -- MAPPA ------------------------------------------------------------------------------------------------------------

MARKS, LENGTHS = [8, 6, 3, 7], [2, 5, 10, 3]
WHITENED = [1.6316, 0.5956, -0.9582, 1.1136]


def mappa(tmp_path, bias=0, readable=False, **sections):
    """The trainer of mappa and what its coach was asked.

    Dialogue k of the update has mark and length k for every agent.
    """
    values = recipe_values("mappa", tmp_path, **sections)
    values["ppo"] |= {"response_length": 12, "kl_coef": 0.0, "num_mini_batches": 1}
    values["training"] |= {"per_device_train_batch_size": 2}
    counts, asked = defaultdict(int), []

    def script(request):
        agent = request.ask.agent
        if agent == "coach":
            text = request.ask.messages[-1]["content"]
            asked.append(text)
            length = len(text.partition("It said:\n")[2].partition("\n")[0]) + 1  # and its end
            mark = MARKS[LENGTHS.index(length)] + (bias if "coach the solver" in text else 0)
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


def judge_of(**changes):
    return read_yaml(recipe_file("mappa"))["reward"]["judge"] | changes


def test_a_coach_that_favours_an_agent_changes_nothing(tmp_path):
    """The solver's marks are 2 points higher, up to 12, which whitening for each agent removes."""
    plain, biased = (
        advantages(played(mappa(tmp_path / str(bias), bias, True, reward={"judge": judge_of(largest=12.0)})[0]))
        for bias in (0, 2)
    )
    for policy, own in plain.items():
        for length, expected in own.items():
            torch.testing.assert_close(biased[policy][length], expected, atol=1e-4, rtol=0)


def test_the_kl_to_come_is_part_of_an_actions_return():
    """A mark of 8 over three tokens with the log-ratios .02, -.01 and .03, and the weight .01."""
    kl = torch.tensor([[0.02, -0.01, 0.03]])
    found = CumulativeKL().apply_to_tokens(torch.full((1, 3), 0.8), kl, torch.ones(1, 3, dtype=torch.bool), 0.01)
    torch.testing.assert_close(found, torch.tensor([[0.7996, 0.7998, 0.7997]]), atol=1e-5, rtol=0)


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
