"""Values far outside what anybody uses, choices that undo each other, and the learning rates that nobody set."""

import json

import pytest
from folders import ROOT
from peft import LoraConfig, get_peft_model

from maporl import MultiAgentPPOConfig
from maporl.config.parse import read_values
from maporl.errors import refuse
from maporl.loops.section import SFTStage
from maporl.run import ResolvedRun
from maporl.runs.build import build_trainer
from maporl.training.doubts import USUAL, doubts
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run
from trl_ext import PPOv2Config
from trl_ext.learning.arguments import deciding_options
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.ppo.options import rate_of

TINY = {"alphabet": "0123456789+=;", "hidden_size": 32, "layers": 1, "heads": 2}
BASE = {
    "output_dir": "runs/doubts",
    "task": {"name": "toy_sum", "largest": 9},
    "agents": {"ann": {"tiny": TINY, "role": "solver"}, "bob": {"tiny": TINY, "role": "critic"}},
    "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}", "separator": ";"},
    "ppo": {"response_length": 4, "kl_coef": 0.0},
    "training": {"per_device_train_batch_size": 4, "use_cpu": True},
    "evaluation": {"questions": 0},
}
WHOLE = {"ann": {"model": "a/model"}, "bob": {"tiny": TINY}}
LORA = {"ann": {"model": "a/model", "lora": {}}, "bob": {"tiny": TINY}}
SHARED = {name: {"tiny": TINY, "policy": "one", "role": role} for name, role in (("ann", "solver"), ("bob", "critic"))}
GROUPED = {"returns": "utterance", "baseline": "mean", "scale": "none"}
OPPOSITE = [{"mix": {"weights": {"label": -2.0}, "roles": ["critic"]}}]


def merged(values, changes):
    for key, value in changes.items():
        inner = isinstance(value, dict) and key not in ("agents", "advantage", "loop")
        values = values | {key: merged(values.get(key) or {}, value) if inner else value}
    return values


def said_of(config):
    return refuse(doubts(ResolvedRun(config)))


def said(**changes):
    return said_of(from_dict(merged(BASE, changes)))


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "told"), [
    ({"ppo": {"kl_coef": 50}}, "ppo.kl_coef: 50 is far above what is usual, 1e-05 to 0.5 (0.05 in TRL's PPO; "),
    ({"ppo": {"cliprange": 0.0}}, "ppo.cliprange: 0 is far below what is usual, 0.0001 to 5 "),
    ({"reward": {"discount": 5}}, "reward.discount: 5 is far above what is usual, 0 to 1 "),
    (
        {"agents": {"ann": {"tiny": TINY, "sampling": {"temperature": [1.0, 5.0]}}, "bob": {"tiny": TINY}}},
        "agents.ann.sampling.temperature.1: 5 is far above ",
    ),
    ({"training": {"max_grad_norm": 1e-9}}, "training.max_grad_norm: 1e-09 is far below what is usual, 0.001 to 100 "),
    ({"training": {"learning_rate": 0.09}}, "training.learning_rate: 0.09 is far above what is usual of a tiny model, "),
    (
        {"agents": LORA, "training": {"learning_rate": 0.01}},
        "training.learning_rate: 0.01 is far above what is usual of an adapter or a critic's head, 5e-07 to 0.005 ",
    ),
    (
        {"agents": WHOLE, "training": {"learning_rate": 1e-3}},
        "training.learning_rate: 0.001 is far above what is usual of a whole model, 1e-08 to 0.0006 ",
    ),
    (
        {"agents": {"ann": WHOLE["ann"] | {"learning_rate": 1e-3}, "bob": {"tiny": TINY}}},
        "agents.ann.learning_rate: 0.001 is far above what is usual of a whole model, ",
    ),
    (
        {"agents": WHOLE, "training": {"learning_rate": 1e-5, "value_learning_rate": 0.003, "critic": "model"}},
        "training.value_learning_rate: 0.003 is far above what is usual of a whole model, ",
    ),
    (
        {"loop": {"rounds": 1, "stages": [{"train": "sft", "build": "best_of", "learning_rate": 0.3}]}},
        "loop.stages.0.learning_rate: 0.3 is far above what is usual of a tiny model, ",
    ),
])  # fmt: skip
def test_a_value_that_nobody_uses_is_told_with_the_usual_range_and_who_uses_it(changes, told):
    (warning,) = said(**changes)
    assert warning.startswith(f"warning: {told}") and "(" in warning
    assert warning.endswith("; choose a value in this range unless you know why not")


def test_check_prints_a_doubt_and_the_usual_value_has_none():
    far, near = ({**BASE, "ppo": BASE["ppo"] | {"kl_coef": kl}} for kl in (50, 0.05))
    warned = [line for line in check_run(from_dict(far)) if line.startswith("warning: ppo.kl_coef: 50 is far above")]
    assert len(warned) == 1
    assert not [line for line in check_run(from_dict(near)) if line.startswith("warning: ")]


def test_what_is_switched_off_and_what_nobody_set_is_not_doubted():
    off = {"learning_rate": 0.0, "max_grad_norm": 0.0}
    assert said() == said(training=off, evaluation={"questions": 4}) == said(agents=LORA) == said(agents=WHOLE) == []


SHIPPED = sorted(
    path
    for folder in ("configs/ppo", "examples/programs")
    for path in (ROOT / folder).rglob("*.yaml")
    if "agents" in read_values(path)
)
MEANT = {
    # the papers' warning about majority rewards, and the last stage of its curriculum, which a longer run reaches
    "recipes/co_rl.yaml": ["reward.sources: peer_majority pays agreement, right or wrong"],
    "recipes/debate_majority.yaml": ["reward.sources: majority pays agreement, right or wrong"],
    "recipes/scaling_inter.yaml": ["schedule.growth: its stage from update 201 on is never reached in 200"],
}  # fmt: skip
"""The doubts about shipped configurations, each of which is meant."""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_shipped_configuration_is_doubted_unless_that_is_meant(path):
    warned = said_of(load(path))
    told = MEANT.get(str(path.relative_to(ROOT)).removeprefix("configs/ppo/"), [])
    assert [line.startswith(f"warning: {begins}") for line, begins in zip(warned, told, strict=True)] == [True] * len(
        told
    )


def test_the_page_has_the_table():
    page = (ROOT / "docs/losses.md").read_text().split("## What is usual")[1]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{row.option}`{f' of {row.of}' if row.of else ''} | {row.low:g} to {row.high:g}"
        f"{', or 0' if row.off and row.low else ''} | {row.source} |"
        for row in USUAL
    ]


# -- two options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "told", "mended"), [
    ({"ppo": {"objective": "reinforce", "num_ppo_epochs": 10}},
     "ppo.objective: reinforce has no ratio, and all but the first of the 10 steps", {"ppo": {"tis_cap": 2}}),
    ({"reward": {"penalties": {"no_eos": 3.0}}}, "reward.penalties.no_eos: 3 is more than the largest reward, 1, ",
     {"reward": {"penalties": {"no_eos": 0.2}}}),
    ({"ppo": {"missing_eos_penalty": 10.0}, "reward": {"sources": {"label": 1.0, "format": 0.1}}},
     "ppo.missing_eos_penalty: 10 is more than the largest reward, 1.1, ", {"ppo": {"missing_eos_penalty": 0.2}}),
    ({"advantage": GROUPED | {"returns": "reward_to_go"}},
     "advantage.returns: reward_to_go adds up the credits of several turns, each of which holds those of later " "turns by reward.horizon: discounted_sum", {"advantage": GROUPED}),
    ({"advantage": GROUPED | {"returns": "reward_to_go"}, "reward": {"rules": ["last"]}},
     "advantage.returns: reward_to_go adds up the credits of several turns, each of which holds those of later " "turns by reward.rules: last", {"reward": {"rules": [{"last": {"to": "ends"}}]}}),
    ({"agents": SHARED, "reward": {"rules": OPPOSITE}}, "reward: label counts +1 for ann and -1 for bob, who speak by the weights of one",
     {"agents": BASE["agents"]}),
    ({"agents": SHARED, "reward": {"rules": ["own"], "charges": {"label": {"weight": 2.0, "roles": ["bob"]}}}},
     "reward: label counts +1 for ann and -1 for bob, who speak by the weights of one", {"agents": BASE["agents"]}),
])  # fmt: skip
def test_options_that_undo_each_other_are_told_and_the_advice_ends_it(changes, told, mended):
    (warning,) = said(**changes)
    assert warning.startswith(f"warning: {told}") and "; " in warning
    assert said(**merged(changes, mended)) == []


# -- learning rates that nobody set -----------------------------------------------------------------------------------


def test_a_rate_that_was_set_is_taken_for_everything_and_the_default_goes_by_what_is_trained():
    assert rate_of(None, PPOv2Config("unused").learning_rate, adapter=True) == 1e-4
    assert rate_of(None, PPOv2Config("unused").learning_rate, adapter=False) == 3e-6
    set_to_it = PPOv2Config("unused", learning_rate=3e-6).learning_rate
    assert rate_of(None, set_to_it, adapter=True) == 3e-6 and rate_of(2e-5, set_to_it, adapter=True) == 2e-5
    assert rate_of(0.0, None, adapter=True) == 0.0
    for kind in (PPOv2Config, MultiAgentPPOConfig):
        args = kind("unused", use_cpu=True)
        assert args.learning_rate == 3e-6 and json.loads(args.to_json_string())["learning_rate"] == 3e-6
    stage = SFTStage(train="sft", build="best_of")
    assert (stage.rate("ann"), stage.rate(None), SFTStage(train="sft", build="best_of", learning_rate=1e-3).rate("ann")) == (
        1e-4, 5e-6, 1e-3,
    )  # fmt: skip


@pytest.mark.parametrize(("adapter", "critic", "options", "rates"), [
    (False, "head", {}, [3e-6, 3e-6]),
    (True, "head", {}, [1e-4, 1e-4]),
    (True, "adapter", {}, [1e-4, 1e-4, 1e-4]),
    (True, "head", {"value_learning_rate": 2e-3}, [1e-4, 2e-3]),
    (True, "head", {"learning_rate": 3e-6}, [3e-6, 3e-6]),
    (False, "model", {}, [3e-6, 3e-6, 3e-6]),
])  # fmt: skip
def test_a_learner_steps_with_the_rate_of_what_it_trains(tiny, tmp_path, adapter, critic, options, rates):
    model, tokenizer = tiny("llama")
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    args = PPOv2Config(str(tmp_path), use_cpu=True, report_to=[], **options)
    learner = Learner(Policy("p", model, tokenizer), args, critic=critic)
    assert [group["lr"] for group in learner._parameter_groups()] == rates
    assert (learner.learning_rate, learner.value_learning_rate) == (rates[0], rates[-1])


def test_a_run_its_card_and_its_configuration_agree_on_a_rate_that_nobody_set(tmp_path):
    values = merged(BASE, {"output_dir": str(tmp_path / "run"), "updates": 1})
    values["agents"] = {"ann": {"tiny": TINY, "lora": {"r": 2}}, "bob": {"tiny": TINY}}
    trainer = build_trainer(from_dict(values), quiet=True)
    trainer.train()
    assert {name: learner.learning_rate for name, learner in trainer.learners.items()} == {"ann": 1e-4, "bob": 3e-6}
    for name, rate in (("ann", "0.0001"), ("bob", "3e-06")):
        card = (tmp_path / "run/final" / name / "README.md").read_text()
        assert f"at learning rate {rate}, " in card
    assert read_values(tmp_path / "run/config.yaml")["training"]["learning_rate"] is None
    assert deciding_options(trainer.args)["learning_rate"] is None
