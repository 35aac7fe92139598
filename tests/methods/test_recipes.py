"""Every recipe parses, passes the check, and trains three updates with tiny models."""

import ast
import dataclasses
import json
import math
import re
import shutil
from functools import cache

import pytest
from folders import ROOT, file_of
from processes import maporl
from recipe_runs import BRIEF, LONGER

from maporl.config import parse
from maporl.config.parse import recipe_folder
from maporl.config.recipes import NEEDS, axes_of, by_axis, card_of, find, index_page, recipe_files
from maporl.errors import ConfigError
from maporl.methods.tiny_versions import tiny_version
from maporl.run import ResolvedRun
from maporl.runs import train as run
from maporl.runs.build import build_trainer
from maporl.training.doubts import doubts
from maporl.validation.load import from_dict, load
from maporl.validation.preflight import check_run

NAMES = sorted(recipe_files())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_parses_says_where_it_comes_from_and_fits_a_screen(name):
    config = load(name)
    assert config == load(recipe_files()[name])
    card = card_of(name)
    assert card.url.startswith("https://") and card.exact.endswith(".")
    assert card.corrected == "" or re.fullmatch(r"Until \d+ [A-Z][a-z]+ 20\d\d, .*\.", card.corrected)
    assert len(recipe_files()[name].read_text().splitlines()) <= 50


QUICK = {"cory", "mac_spgg", "c3", "spiral"}
"""Recipes of several kinds.

``make test-slow`` tries the others, which are checked through their trainers' steps by the tests on their cards.
"""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_a_recipe_trains_three_updates_with_tiny_models(name, tmp_path):
    tiny, brief = tiny_version(name, str(tmp_path / "run")), {"warm_start": BRIEF | LONGER.get(name, {})}
    config = from_dict(tiny | ({} if "loop" in tiny else brief), name)
    assert config.advantage == load(name).advantage and config.protocol["name"] == load(name).protocol["name"]
    assert check_run(config)
    _, after = run.train(config, resume=False, quiet=True)
    assert after is not None and 0 < after.questions <= 4
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    if config.loop.stages:
        assert_rounds_trained(config, metrics, tmp_path / "run")
        return
    updates = [m for m in metrics if any(key.endswith("loss/policy_avg") for key in m)]
    assert metrics[-1]["step"] == 3 and updates
    norms = [value for m in updates for key, value in m.items() if key.endswith("grad_norm")]
    assert all(norm == norm for norm in norms) and any(norm > 1e-6 for norm in norms), "less is rounding"
    dialogues = [json.loads(line) for line in (tmp_path / "run/dialogues.jsonl").read_text().splitlines()]
    assert dialogues


def assert_rounds_trained(config, metrics, folder):
    """Every stage of every round trained some policy, with a loss that is finite, and a person can look at the run."""
    assert [record["step"] for record in metrics] == list(range(1, config.loop.rounds + 1))
    for record in metrics:
        for number in range(1, len(config.loop.stages) + 1):
            losses = [value for key, value in record.items() if key.endswith(f"/stage_{number}/loss")]
            updates = [key for key in record if key.endswith(f"/stage_{number}/dialogues")]
            assert (losses or updates) and all(map(math.isfinite, losses))
    assert (folder / "report.html").exists() and (folder / "dialogues.jsonl").read_text()


def test_the_index_of_papers_is_up_to_date():
    assert (ROOT / "docs/recipes.md").read_text() == index_page()


def test_the_costs_on_the_cards_are_those_that_were_counted():
    """A recipe whose cost has not been counted says so, and a variant does not take that of the recipe that it
    extends."""
    counted = json.loads((ROOT / "benchmarks/results/recipe_costs.json").read_text())
    assert {name: card_of(name).cost for name in NAMES if card_of(name).cost is not None} == counted


def test_a_new_variant_is_one_file(tmp_path, monkeypatch):
    """It appears in the lists and in the index with the method of the recipe that it extends, and its cost as not
    counted."""
    shutil.copytree(recipe_folder(), tmp_path / "recipes")
    variant = "extends: iac.yaml\nrecipe: {title: Late IAC}\nadvantage: {gamma: 0.8}\n"
    (tmp_path / "recipes/iac_late.yaml").write_text(variant)
    monkeypatch.setattr(parse, "recipe_folder", lambda: tmp_path / "recipes")
    card, page = card_of("iac_late"), index_page()
    assert card.title == "Late IAC" and card.cost is None and card.paper == card_of("iac").paper
    assert "[`iac_late`](#iac_late) | exact | not counted | critic, turn_gae | on-policy | debate |" in page
    assert "A variant of [`iac`](#iac), which its file extends." in page.split("## `iac_late`")[1].split("## ")[0]
    assert load("iac_late").advantage == dataclasses.replace(load("iac").advantage, gamma=0.8)


def test_recipes_are_listed_by_what_their_files_choose():
    for axis in ("need", "credit", "loop", "protocol"):
        listed = [name for names in by_axis(axis).values() for name in names]
        assert sorted(listed) == NAMES and list(by_axis(axis)) == sorted(by_axis(axis))
    one_policy = {"need": "one policy", "credit": "group mean by prompt", "loop": "on-policy", "protocol": "debate"}
    assert axes_of("gdpo") == one_policy
    team = {"need": "labels", "credit": "critic, token_gae", "loop": "on-policy, swap", "protocol": "chain"}
    assert axes_of("cory") == team
    assert axes_of("reinforce_pp")["credit"] == "no baseline"
    assert by_axis("protocol")["orchestrate"] == ["flow_grpo", "puppeteer"]


def test_each_need_has_a_recipe_to_start_with():
    """That is one whose formulas were read."""
    assert set(by_axis("need")) == set(NEEDS)
    for need, (_, start) in NEEDS.items():
        assert axes_of(start)["need"] == need
        assert card_of(start).status == "exact"
    needs = {"arenarl": "a judge", "comas": "no labels", "spice": "a proposer", "oni": "a game", "marlhf": "rows", "reseek": "tools"}  # fmt: skip
    assert {name: axes_of(name)["need"] for name in needs} == needs


@pytest.mark.slow
def test_recipes_are_found_by_words_in_any_of_their_forms():
    found = find("planner coder tests")
    assert [(one.name, one.words) for one in found[:2]] == [
        ("flow_grpo", ("planner", "coder", "tests")), ("at_grpo_code", ("coder", "tests")),
    ]  # fmt: skip
    assert find("PLANS, code & tested") != [] and find("planner coder tests") == found, "the same at every call"
    assert find("debate no labels")[0].name == "debate_majority" and find("cory")[0].name == "cory"
    counts = [len(one.words) for one in found]
    assert counts == sorted(counts, reverse=True) and all(one.score > 0 for one in found)
    without = find("no labels")
    assert {one.name for one in without} == {"co_rl", "comas", "debate_majority", "multi_agent_evolve"}
    assert {one.words for one in without} == {("without-labels",)} and find("without any labels") == without
    assert "grpo" in {one.name for one in find("labels")} and "grpo" in {one.name for one in find("without a critic")}
    with pytest.raises(ConfigError, match="no recipe has a word of 'zebra'"):
        find("zebra")


def test_the_commands_list_show_and_refuse():
    listed = maporl("recipes", "list").stdout
    assert "cory" in listed and "reconstructed" in listed
    by_loop = maporl("recipes", "list", "--by", "loop").stdout
    assert by_loop.index("on-policy, swap") < by_loop.index("cory") < by_loop.index("on-policy, train_first_turn")
    assert "'credit'" in maporl("recipes", "list", "--by", "paper").stderr
    shown = maporl("recipes", "show", "cory").stdout
    assert "status:   exact" in shown and "rules: [sum]" in shown and "differs:" in shown
    assert "recipes/common.yaml:" in shown and "response_length: 512" in shown, "what the recipe does not say itself"
    unknown = maporl("recipes", "show", "corry")
    assert unknown.returncode == 2 and "unknown 'corry'; did you mean 'cory'" in unknown.stderr


@pytest.mark.slow
def test_the_command_tries_a_recipe_with_other_values(tmp_path):
    values = ["updates=1", "branching.group=2", "reward.sources.format=0.1", f"output_dir={tmp_path}/run"]
    tried = maporl("recipes", "try", "grpo", *values)
    assert tried.returncode == 0 and "score: label + near + 0.1 x format" in tried.stdout, tried.stderr
    assert "update 1: " in tried.stdout and "update 2: " not in tried.stdout
    assert "run: 1 updates of 4 questions, 2 dialogues for each (8 in an update)" in tried.stdout
    assert tried.stdout.endswith(f"{tmp_path}/run/report.html\n")
    refused = maporl("recipes", "try", "grpo", "updates")
    assert refused.returncode == 2 and "--set updates: expected key=value" in refused.stderr


def test_a_tiny_version_is_not_warned_of_agents_that_the_recipe_freezes(tmp_path):
    flow = ResolvedRun(from_dict(tiny_version("flow_grpo", str(tmp_path))))
    assert flow.config.schedule.plan(10**6).frozen == {"searcher", "thinker", "verifier", "generator"}
    assert not [fault for fault in doubts(flow) if fault.key == "schedule"]


def test_who_types_loop_gets_train():
    assert maporl("loop", "malt", "--dry-run").stdout == maporl("train", "malt", "--dry-run").stdout != ""


def test_one_line_changes_one_axis_and_another_kind_of_section_begins_anew():
    config = load("grpo", ["advantage.key=[prompt, agent]", "advantage.unit=row"])
    assert config.advantage.key == ("prompt", "agent") and config.protocol == load("grpo").protocol
    other = load("spiral", ["protocol={name: debate, turns: 1}", "task.name=gsm8k", "reward.sources={label: 1}", "advantage.key=[agent]"])  # fmt: skip
    assert other.protocol == {"name": "debate", "turns": 1} and other.task == {"name": "gsm8k"}


PROTOCOLS = {
    "debate": {"name": "debate", "turns": 1},
    "chain": {"name": "chain"},
    "collaboration": {"name": "collaboration"},
    "refine": {"name": "refine", "rounds": 1},
    "forum": {"name": "forum", "rounds": 2},
    "call_return": {"name": "call_return", "calls": 1},
    "game": {"name": "game", "game": "signals"},
}
ADVANTAGES = {
    "ppo": {},
    "token chain": {"returns": "token_chain_gae", "key": ["agent"]},
    "turn gae": {"returns": "turn_gae", "key": ["agent"], "singleton": "zero"},
    "chain gae": {"returns": "chain_gae", "scale": "agent_std", "key": ["agent"], "singleton": "zero"},
    "grpo": {"returns": "utterance", "baseline": "mean", "key": ["prompt"]},
    "dr mas": {"returns": "utterance", "baseline": "mean", "key": ["prompt", "agent"], "singleton": "zero"},
    "rloo to go": {"returns": "reward_to_go", "baseline": "loo", "scale": "none", "key": ["prompt", "agent"], "singleton": "zero"},
    "remax": {"returns": "utterance", "baseline": "max", "scale": "batch_std", "key": ["prompt"]},
    "ema": {"returns": "utterance", "baseline": "ema", "scale": "none", "key": ["agent"]},
    "tree": {"returns": "tree", "baseline": "batch_mean", "scale": "batch_std", "key": []},
    "cumulative kl": {"returns": "utterance", "baseline": "none", "scale": "agent_std", "key": ["agent"], "post": ["cumulative_kl"]},
    "aligned": {"returns": "utterance", "baseline": "mean", "key": ["prompt"], "post": [{"align": {"how": "drop", "to": 1}}, "drop_zeros"], "singleton": "zero"},
    "callees": {"returns": "utterance", "baseline": "mean", "key": ["prompt"], "unit": "rollout", "post": ["broadcast_to_callees"]},
    "by game": {"returns": "reward_to_go", "baseline": "mean", "scale": "none", "key": ["game", "role"], "singleton": "zero"},
    "bi-level": {"returns": "bi_level_gae", "gamma": 0.9, "scale": "batch_std"},
}  # fmt: skip
REFUSED = {
    **{(protocol, "callees"): "caller" for protocol in PROTOCOLS if protocol != "call_return"},
    **{(protocol, "by game"): "game" for protocol in PROTOCOLS if protocol != "game"},
}


PAIRS = [((p, a), i + j) for i, p in enumerate(PROTOCOLS) for j, a in enumerate(ADVANTAGES)]
"""``make test`` tries every seventh diagonal, and so every advantage once and every protocol; ``make test-slow`` tries
the others. Of the seven it is the one with the advantage that only calls can have, with calls."""


@pytest.mark.parametrize(
    ("protocol", "advantage"),
    [pytest.param(*pair, marks=() if n % 7 == 3 else pytest.mark.slow, id="-".join(pair)) for pair, n in PAIRS],
)
def test_every_protocol_goes_with_every_advantage_or_says_why_not(protocol, advantage, tmp_path):
    values = tiny_version("grpo", str(tmp_path / "run")) | {
        "protocol": PROTOCOLS[protocol], "advantage": ADVANTAGES[advantage], "branching": {"group": 2}, "updates": 1,
        "reward": {"sources": {"near": 1.0, "format": 1.0}, "rules": ["last"]}, "evaluation": {"questions": 0},
        # models that know nothing all lose their games, and none of them answers a call in the asked form
        "warm_start": BRIEF if protocol in ("game", "call_return") else {"steps": 0},
    }  # fmt: skip
    values["ppo"] |= {"kl_in": "reward", "missing_eos_penalty": 0.5, "response_length": 3}
    if ADVANTAGES[advantage].get("scale", "std") == "std":  # no KL is divided by the spread of a question's answers
        values["ppo"] |= {"kl_in": "loss", "kl_estimator": "k3"}
    values["training"]["per_device_train_batch_size"] = 3
    if protocol == "game":
        values |= {"task": {"name": "episodes"}, "reward": {"sources": {"env": 1.0}, "rules": ["own"]}}
    if (protocol, advantage) in REFUSED:
        message = f"names the column '{REFUSED[protocol, advantage]}', which is not recorded; there"
        with pytest.raises(ConfigError, match=message):
            from_dict(values)
        return
    trainer = build_trainer(from_dict(values), quiet=True)
    trainer.train()
    assert trainer.state.global_step == 1
    logged = [(name, value) for record in trainer.state.log_history for name, value in record.items()]
    found = [value for name, value in logged if name.endswith(("grad_norm", "loss/policy_avg"))]
    assert all(map(math.isfinite, found)), found
    assert any(found) or advantage == "aligned", "only alignment may leave no answer to learn from"


@cache
def sources_in(file):
    """The source of each function of a file with its decorators, by its name."""
    text = file.read_text()
    lines, functions = text.splitlines(), [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    firsts = [min([f.lineno, *(decorator.lineno for decorator in f.decorator_list)]) for f in functions]
    return {f.name: "\n".join(lines[n - 1 : f.end_lineno]) for f, n in zip(functions, firsts, strict=True)}


def source_of(test):
    """Return the source of a test function with its decorators, and fail if the test does not exist."""
    return sources_in(file_of(test))[test]


def mentions(source, name):
    """Whether a test names a recipe, or the method of which the recipe is a variant: agentpo for agentpo_hint."""
    parts = name.split("_")
    stems = {"_".join(parts[:count]) for count in range(1, len(parts) + 1)} - {"at", "mac", "m", "g", "dr"}
    words = re.sub(r"[^a-z0-9]+", "_", source.lower())
    return any(f"_{stem}_" in f"_{words}_" for stem in stems)


@pytest.mark.parametrize("name", NAMES)
def test_every_card_names_tests_that_exist_and_are_about_the_recipe(name):
    assert card_of(name).checked_by
    for test in card_of(name).checked_by:
        assert mentions(source_of(test), name), f"{test} does not mention {name}"
