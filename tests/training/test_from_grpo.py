"""The door for users of TRL's GRPOTrainer: data sets of prompts, TRL's reward functions, and its advantages."""

import json
import math
import re
import traceback

import numpy as np
import pytest
import torch
from chat_models import FAMILIES
from datasets import Dataset
from fast_cases import some
from notebook_runs import CHATS, ROWS, agent, grpo_trainer_of
from trl import GRPOConfig

from maporl import (
    Arithmetic,
    ConfigError,
    Debate,
    MultiAgentPPOTrainer,
    Prompts,
    Team,
    recipe_parts,
)
from maporl.config.faults import OF_TRL
from maporl.config.parse import parse_config
from maporl.config.schema import AdvantageConfig
from maporl.report.metric_panels import bar_text
from maporl.rewards.base import RewardFailure
from maporl.rollout.requests import opening
from maporl.tasks import TaskError
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.chat.encoding import CONCATENATION_TEMPLATE, encode_prompt
from trl_ext.errors import WHOLE
from trl_ext.trainer.scoring import RewardError, call_reward_functions


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


# -- the numbers ------------------------------------------------------------------------------------------------------


def test_the_recipe_grpo_single_has_trls_advantages(tmp_path):
    """TRL 1.16: (r - mean) / (std + 1e-4) over the completions of a prompt, with the unbiased standard deviation."""
    scores = {0: [1.0, 0.0, 0.0, 1.0], 1: [0.0, 0.0, 0.0, 3.0], 2: [2.0, 2.0, 2.0, 2.0], 3: [0.5, 0.25, 1.0, 0.25]}
    expected = {
        0: [0.865875, -0.865875, -0.865875, 0.865875], 1: [-0.499967, -0.499967, -0.499967, 1.499900],
        2: [0.0, 0.0, 0.0, 0.0], 3: [0.0, -0.706907, 1.413815, -0.706907],
    }  # fmt: skip

    def given(prompts, number, **kwargs):
        left = {n: iter(values) for n, values in scores.items()}
        return [next(left[n]) for n in number]

    trainer = grpo_trainer_of(tmp_path, given, overrides=["training.per_device_train_batch_size=4"])
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    rows = batch.token_batches["solo"]
    found: dict[int, dict[int, float]] = {}
    for row, label in enumerate(rows.labels):  # prompt 2.1 is the second completion of rows[2]
        number, rollout = map(int, re.search(r"prompt (\d+)\.(\d+)", label).groups())
        advantages = rows.advantages[row][rows.sampled_mask[row]]
        assert torch.equal(advantages, advantages[:1].expand_as(advantages)), (
            "each token has its completion's advantage"
        )
        found.setdefault(number, {})[rollout] = float(advantages[0])
    in_order = {n: [own[rollout] for rollout in range(4)] for n, own in found.items()}
    assert in_order == {n: pytest.approx(values, abs=2e-5) for n, values in expected.items()}


# -- what reward functions get ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", some([ROWS, CHATS, Dataset.from_list(CHATS)], 1), ids=["text", "messages", "data set"])
def test_reward_functions_get_what_trl_passes(tmp_path, rows):
    calls = []

    def seen(prompts, completions, completion_ids, number, trainer_state, **kwargs):
        calls.append((prompts, completions, completion_ids, number, trainer_state.global_step, kwargs))
        return [0.25] * len(prompts)

    async def brief(completions, **kwargs):
        return [None if n % 2 else 1.0 for n, _ in enumerate(completions)]

    trainer = grpo_trainer_of(tmp_path, [seen, brief], rows, reward_weights=[2.0, 0.5])
    metrics = trainer.train()
    assert [call[4] for call in calls] == [0, 1]
    prompts, completions, ids, numbers, _, more = calls[0]
    assert len(prompts) == len(completions) == len(ids) == len(numbers) == 8
    assert all(prompt == rows[number]["prompt"] for prompt, number in zip(prompts, numbers, strict=True))
    assert more == {"agents": ["solo"] * 8, "turns": [1] * 8}
    dialogues = [json.loads(line) for line in (tmp_path / "dialogues.jsonl").read_text().splitlines()]
    said = [d["utterances"][0] for d in dialogues][:8]
    texts = [u["text"] for u in said]
    assert completions == (texts if rows is ROWS else [[{"role": "assistant", "content": text}] for text in texts])
    assert said[0]["messages"] == ([{"role": "user", "content": prompts[0]}] if rows is ROWS else prompts[0]), (
        "the agent reads the messages of the prompt"
    )
    assert metrics["reward/seen"] == 0.25 and metrics["reward/brief"] == 1.0
    assert metrics["reward/score"] == pytest.approx(0.5 + 0.25)


def test_every_agent_and_turn_of_a_team_is_scored(tmp_path):
    who = []

    def seen(completions, agents, turns):
        who.extend(zip(agents, turns, strict=True))
        return [float(len(text)) for text in completions]

    key = AdvantageConfig(returns="utterance", baseline="mean", scale="std", key=("prompt", "agent", "turn"))
    more = {"protocol": Debate(turns=2, later="{others}", quote="{text}", separator=" "), "advantage": key}
    trainer = grpo_trainer_of(tmp_path, seen, CHATS, ("ann", "bob"), ["updates=1", "ppo.response_length=3"], **more)
    trainer.train()
    assert {cell: who.count(cell) for cell in who} == {(a, t): 8 for a in ("ann", "bob") for t in (1, 2)}


def test_a_task_of_maporl_goes_with_reward_functions_too(tmp_path):
    def right(prompts, completions, answer):
        assert all(isinstance(text, str) for text in (*prompts, *completions, *answer))
        return [float(a in text) for text, a in zip(completions, answer, strict=True)]

    trainer = grpo_trainer_of(tmp_path, right, None, task=Arithmetic(largest=4), overrides=["updates=1"])
    metrics = trainer.train()
    assert "reward/right" in metrics and "accuracy/turn_1" in metrics


@pytest.mark.parametrize(("function", "expected"), [
    (lambda prompts, completions: [1.0], [1.0]),
    (lambda completions, **kwargs: [float(len(completions[0]))], [1.0]),
    (lambda completions: [float(completions == ["c"])], [1.0]),
    (lambda number, completions: [float(number == [5] and completions == ["c"])], [1.0]),
    (lambda **kwargs: [float(sorted(kwargs) == ["completion_ids", "completions", "number", "prompts", "trainer_state"])], [1.0]),
    (lambda questions, answers: [float(questions == ["p"] and answers == ["c"])], [1.0]),
    (lambda q, completions, **kwargs: [float(q == ["p"] and completions == ["c"])], [1.0]),
    (lambda prompts, completions, /, number: [float(prompts == ["p"] and number == [5])], [1.0]),
    (lambda *texts, **kwargs: [float(texts == (["p"], ["c"]) and "number" in kwargs)], [1.0]),
    (lambda prompts, completions, trainer_state: [float(trainer_state == "state")], [1.0]),
])  # fmt: skip
def test_functions_of_every_signature_get_their_arguments(function, expected):
    (found,) = call_reward_functions([function], ["p"], ["c"], [[3]], {"number": [5]}, "state").values()
    assert found == expected


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_values_may_be_an_array(kind):
    rows = (["p", "p"], ["c", "dd"], [[3], [3, 4]], {})
    (found,) = call_reward_functions([lambda completions: kind([len(c) / 2 for c in completions])], *rows).values()
    assert found == [0.5, 1.0]


def test_a_function_that_asks_for_what_nobody_has_is_named():
    def wants(completions, log_metric):
        return [0.0]

    with pytest.raises(RewardError, match=r"reward 'wants' raised TypeError: .*'log_metric'"):
        call_reward_functions([wants], ["p"], ["c"], [[3]], {})


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_a_text_is_a_users_message_or_with_another_template_the_bare_text(family):
    """TRL feeds the bare text. docs/howto/from_grpo.md says how to get that here."""
    tokenizer, text = FAMILIES[family](), "Bob has 3 + 4 apples. How many? "
    asked = [{"role": "user", "content": text}]
    bare = tokenizer.encode(text)
    assert bare != encode_prompt(tokenizer, asked)
    tokenizer.chat_template = CONCATENATION_TEMPLATE
    assert encode_prompt(tokenizer, asked) == bare
    if tokenizer.bos_token:
        tokenizer.chat_template = "{{ bos_token }}" + CONCATENATION_TEMPLATE
        assert encode_prompt(tokenizer, asked) == [tokenizer.bos_token_id, *bare]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "message"), [
    ([], "the data set is empty"),
    ([{"prompt": "1"}, {"question": "2"}], r"row 1: expected a column 'prompt', got \['question'\]; rename"),
    (["1+1="], "row 0: expected a column 'prompt', got str"),
    ([{"prompt": "  "}], "row 0: the prompt is empty"),
    ([{"prompt": None}], "row 0: expected a text or a list of messages as prompt, got None"),
    ([{"prompt": []}], "row 0: expected a text or a list of messages"),
    ([{"prompt": ["1+1="]}], "row 0: its prompt cannot be read: message 1 is '1.1=' of type str, expected a dict"),
    ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}], "message 1 has a content of type list, expected a text"),
    ([{"prompt": [{"role": "assistant", "content": "1"}]}], r"the last message must be the user's, .* got 'assistant'"),
])  # fmt: skip
def test_rows_that_are_no_prompts_are_refused_before_anything_runs(rows, message):
    with pytest.raises(TaskError, match=message):
        Prompts(rows)


@pytest.mark.parametrize(("functions", "more", "message"), [
    ([], {}, "reward_funcs: expected a function or a list of functions, got an empty list"),
    ("org/reward-model", {}, r"reward_funcs: expected functions .* got 'org/reward-model'; a reward model is"),
    ([length, length], {}, r"different names, got \['length', 'length'\]; rename one"),
    (length, {"reward_weights": [1, 2]}, r"reward_weights: expected 1 numbers, for \['length'\], got 2"),
    (length, {"task": Arithmetic()}, "expected either task or train_dataset, got both"),
    (length, {"eval_task": Arithmetic(), "eval_dataset": ROWS}, "either eval_task or eval_dataset, got both"),
    (torch.nn.Linear(2, 1), {}, "a reward model is a source of its own"),
    (lambda completions, label: [], {}, r"missing a required argument: 'label'; its parameters may be prompts, .*, agents, "),
    (length, {"train_dataset": [{"prompt": "1", "turns": 2}]}, "train_dataset: the column 'turns' has the name of what"),
    (length, {"overrides": ["training.eval_steps=1"]}, "eval_steps: nothing to evaluate on; pass eval_dataset or eval_ta"),
    (length, {"train_dataset": None}, "expected either task or train_dataset, got neither"),
    (length, {"protocol": Debate}, r"protocol: expected an object, got the class Debate; write Debate\(...\)"),
    (length, {"reward": {"sources": {"a": 1.0}}}, "reward: expected a maporl.RewardSection, got dict {'sources': {'a': 1.0}}"),
    (length, {"sources": [length]}, "sources: expected a mapping, got list"),
    (length, {"team": [1]}, r"team: expected a maporl.Team, got list \[1\]"),
    (length, {"train_dataset": None, "task": ROWS}, r"task: expected a maporl.Task, got list; pass a data set as train_"),
])  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(tmp_path, functions, more, message):
    with pytest.raises(ValueError, match=message):
        grpo_trainer_of(tmp_path, functions, **more)


@pytest.mark.parametrize("single", [False, True])
def test_a_wrong_parameter_of_a_reward_function_is_told_in_a_few_lines(tmp_path, monkeypatch, single):
    monkeypatch.delenv(WHOLE, raising=False)

    def labelled(completions, label):
        return [0.0 for _ in completions]

    with pytest.raises(ValueError) as caught:
        if single:
            one, args = agent("solo"), PPOv2Config(output_dir=str(tmp_path), total_episodes=8, use_cpu=True)
            PPOv2Trainer(args, one.tokenizer, one.model, train_dataset=ROWS, reward_funcs=labelled)
        else:
            grpo_trainer_of(tmp_path, labelled)
    told = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(told) <= 17 and not any("maporl/training" in line or "trl_ext/trainer/p" in line for line in told)
    assert "'labelled': missing a required argument: 'label'; its parameters may be prompts, comp" in told[-1]


def test_arguments_of_trls_trainer_are_refused(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match="expected a MultiAgentPPOConfig, got a GRPOConfig; see docs/howto/from_grpo"):
        MultiAgentPPOTrainer(args, Team([agent("solo")]), train_dataset=ROWS, reward_funcs=length)


def test_trls_names_in_yaml_lead_to_those_here():
    for name, here in OF_TRL.items():
        with pytest.raises(ConfigError, match=f"TRL's {name} is '{here}' here; known: "):
            parse_config({"training": {name: 1}})


@pytest.mark.parametrize(
    ("function", "error", "message"),
    some([
        (lambda completions: [1.0], RewardFailure, "expected 8 values, for each completion, got 1 values"),
        (lambda completions: 1 / 0, RewardFailure, "test_from_grpo.py, line [0-9]+: ZeroDivisionError"),
        (lambda completions, completion_ids: [[0.0] * len(i) for i in completion_ids], RewardFailure, "gave a list of numbers"),
        (lambda completions: [math.nan] * 8, RewardFailure, "^reward '<lambda>': value nan for completion 0 "),
    ], 0, 1),
)  # fmt: skip
def test_a_reward_that_fails_stops_the_run(tmp_path, function, error, message):
    with pytest.raises(error, match=message):
        grpo_trainer_of(tmp_path, function).train()


def test_recipe_parts_refuses_what_belongs_to_another_team():
    with pytest.raises(ConfigError, match=r"recipe_parts: quickstart: warm_start belongs to the configuration's own"):
        recipe_parts("quickstart")
    with pytest.raises(ConfigError, match="grpo_singel"):
        recipe_parts("grpo_singel")


# -- unlabelled questions ---------------------------------------------------------------------------------------------


def test_without_labels_nothing_states_an_accuracy(tmp_path):
    trainer = grpo_trainer_of(tmp_path, length, eval_dataset=ROWS[:2], overrides=["training.eval_steps=1"])
    metrics = trainer.train()
    assert not any("accuracy" in name or "majority" in name for name in metrics)
    assert bar_text(metrics).startswith("credit ")
    assert all(not math.isnan(value) for value in metrics.values())
    found = trainer.evaluate()
    assert set(found) == {
        f"eval_reward/{n}" for own in ("length", "score") for n in (own, f"{own}/solo", f"{own}/solo/turn_1")
    }
    assert trainer.evaluate(ROWS[:1])["eval_reward/length"] >= 0
    after = json.loads((tmp_path / "evaluation_after.json").read_text())["rewards"]
    assert after == {name.removeprefix("eval_"): value for name, value in found.items()} == trainer.after.rewards
    assert trainer.before.rewards.keys() == after.keys()
    rows = [json.loads(line) for line in (tmp_path / "evaluation_after.jsonl").read_text().splitlines()]
    earned = [u["rewards"]["length"] for row in rows for u in row["utterances"]]
    assert len(earned) == 2 and sum(earned) / 2 == after["reward/length"]
    logged = (tmp_path / "metrics.jsonl").read_text()
    assert "eval_reward/length" in logged and "NaN" not in logged


def test_an_agents_own_system_prompt_stands_above_that_of_the_messages():
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "u"}
    assert opening(None, [system]) == [system]
    assert opening("own", []) == [{"role": "system", "content": "own"}]
    assert opening("own", [system, user]) == [{"role": "system", "content": "own\n\nS"}, user]
    assert opening("own", [user]) == [{"role": "system", "content": "own"}, user]
