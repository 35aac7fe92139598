"""Several tasks in one run: each question is asked and graded by its own task, and tasks can be compared apart."""

import random
from collections import defaultdict

import pytest
import torch
from scripted_training import played, recipe_values, scripted_trainer

from maporl.advantages import AdvantageConfig, TurnBatch, estimate
from maporl.errors import ConfigError
from maporl.tasks import Mixture, build_task
from maporl.validation.load import from_dict

SMALL = {"sums": {"name": "toy_sum", "largest": 3}, "products": {"name": "toy_times", "largest": 9}}


def test_each_question_is_asked_and_graded_by_its_own_task():
    task = Mixture(SMALL)
    sums, products = (build_task(section, "train", 0) for section in SMALL.values())
    examples = list(task)
    assert len(examples) == len(task) == 2 * len(products), "the shorter task is repeated"
    of = defaultdict(list)
    for example in examples:
        of[example.meta["task"]].append(example)
    assert {e.question for e in of["sums"]} == {e.question for e in sums}
    assert [e.question for e in of["products"]] == [e.question for e in products]
    assert all("+" in e.question and e.id.startswith("sums/") for e in of["sums"])
    texts = [example.answer if i % 2 else "x" for i, example in enumerate(examples)]
    assert [g.correct for g in task.grade_many(examples, texts)] == [bool(i % 2) for i in range(len(examples))]
    assert [task.grade(e, t).correct for e, t in zip(examples, texts, strict=True)][:4] == [False, True, False, True]
    rng = random.Random(0)
    assert all(task.grade(e, task.write_answer(e, rng, True)).correct for e in examples[:: len(examples) // 7])
    assert task.columns(examples[0]) == {"answer": examples[0].answer, "task": "sums"}


def test_a_mixture_by_size_asks_every_question_once():
    task = Mixture(SMALL, balance="size")
    assert len({example.id for example in task}) == len(task) < len(Mixture(SMALL))
    with pytest.raises(IndexError):
        task[len(task)]


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"sums": {"name": "toy_sum"}}, "expected at least two tasks"),
        (SMALL | {"more": {"name": "episodes"}}, "tasks.more: it has no questions"),
        (SMALL | {"more": {"name": "mixture", "tasks": SMALL}}, "tasks.more: it is a mixture itself"),
        (SMALL | {"more": {"name": "toy_summ"}}, "task.tasks.more: task.name.*toy_sum"),
        (SMALL | {"more": {"name": "toy_sum", "largst": 3}}, "task.tasks.more: .*largst"),
    ],
)
def test_what_cannot_be_mixed_is_refused(tasks, words):
    with pytest.raises(ConfigError, match=words):
        build_task({"name": "mixture", "tasks": tasks}, "train", 0)


def test_tokens_of_each_task_are_whitened_apart():
    batch = TurnBatch(reward=[1, 1, -1, 3, -3, 0, 0], prompt=list(range(7)), task=[1, 1, 1, 2, 2, 2, 2], tokens=[1] * 7)
    plain = {"returns": "utterance", "baseline": "none", "scale": "none", "key": ("prompt",)}
    post = ({"whiten": {"key": ["task"], "over": "tokens"}},)
    for ddof, expected in (
        (1, [0.5773, 0.5773, -1.1547, 1.2247, -1.2247, 0, 0]),
        (0, [0.7071, 0.7071, -1.4142, 1.4142, -1.4142, 0, 0]),
    ):
        found = estimate(batch, AdvantageConfig(**plain, post=post, ddof=ddof))
        torch.testing.assert_close(found.float(), torch.tensor(expected), atol=1e-3, rtol=0)


def test_agent_rl_gives_each_task_advantages_of_one_size(tmp_path):
    """Through the trainer: over the tokens of each task of the recipe agent_rl, mean 0 and deviation 1."""
    values = recipe_values("agent_rl", tmp_path, branching={"group": 4})
    values["ppo"] |= {"response_length": 12}
    values["training"] |= {"per_device_train_batch_size": 8}
    draw = random.Random(0)

    def script(request):
        right = draw.random() < (0.9 if request.example.meta["task"] == "words" else 0.3)
        return request.example.answer if right else "x" * draw.randint(1, 9)

    batch = played(scripted_trainer(values, script))
    tokens_of = defaultdict(list)
    for policy, tokens in batch.token_batches.items():
        for i, sample in enumerate(tokens.sample.tolist()):
            task = batch.samples[policy][sample].columns.values["task"]
            tokens_of[task] += tokens.advantages[i][tokens.sampled_mask[i]].tolist()
    assert tokens_of.keys() == {"words", "contests"}
    for found in tokens_of.values():
        own = torch.tensor(found, dtype=torch.float64)
        assert float(own.mean()) == pytest.approx(0, abs=1e-5)
        assert float(own.std()) == pytest.approx(1, abs=1e-3)


def test_the_column_task_needs_a_mixture(tmp_path):
    values = recipe_values("agent_rl", tmp_path)
    values["task"] = {"name": "toy_sum"}
    with pytest.raises(ConfigError, match="column 'task', which is not recorded; there are"):
        from_dict(values, "test")
