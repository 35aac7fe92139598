"""The configurations of published tables: what they hold, and two updates of each with tiny stand-ins."""

import functools
import json

import pytest
from fast_cases import some
from played_games import full_grids, shortest
from recipe_runs import FOLDER, small, stand_ins, tiny_values  # noqa: F401  # a fixture
from scripted_training import played, recipe_values, rows, scripted_trainer

from maporl.errors import ConfigError
from maporl.runs.build import build_trainer
from maporl.runs.train import train
from maporl.tasks import TaskError, build_task
from maporl.team.loading import load_tokenizers
from maporl.validation.load import from_dict, load
from trl_ext.chat.encoding import encode_prompt

FILES = sorted(FOLDER.glob("*.yaml"))


OTHERS = [path for path in FILES if not path.stem.startswith("maporl")]


@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=pytest.mark.slow if n else (), id=p.stem) for n, p in enumerate(OTHERS)]
)
def test_two_updates_with_tiny_stand_ins(path, tmp_path, monkeypatch):
    values = tiny_values(path.stem, str(tmp_path / "run"), monkeypatch)
    del values["warm_start"]
    values["training"] |= {"eval_steps": 0, "save_steps": 0}
    train(from_dict(values | {"updates": 2}), resume=False, quiet=True)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_two_updates_of_maporl_with_a_tiny_verifier(stand_ins, tmp_path):
    train(small(FOLDER / "maporl_gsm8k.yaml", stand_ins, tmp_path), resume=False, quiet=True)
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


def solved_sokoban(text):
    """A plan that solves the level in the text."""
    cells = {(r, c): sign for r, line in enumerate(text.splitlines()) for c, sign in enumerate(line)}
    of = lambda signs: frozenset(cell for cell, sign in cells.items() if sign in signs)  # noqa: E731
    (player,) = of("@+")
    return " ".join(shortest((player, of("$*")), of(" @$.*+"), of(".*+")))


def solved_sudoku(text):
    """The completed grid of the text."""
    signs = text.split()
    return next(g for g in full_grids() if all(s in (".", str(n)) for s, n in zip(signs, g, strict=True)))


@pytest.mark.parametrize("game, solve", some([("sokoban", solved_sokoban), ("sudoku", solved_sudoku)], 0))
def test_the_candidate_that_solves_a_puzzle_is_the_one_that_is_reinforced(game, solve, tmp_path, monkeypatch):
    """Of three candidates of each agent the first solves the puzzle, and the others give no plan and are paid -2.

    Of the four groups of each agent two are trained on.
    """
    monkeypatch.setattr("scripted_training.tiny_version", lambda name, folder: tiny_values(name, folder, monkeypatch))
    monkeypatch.setattr("scripted_training.recipe_file", lambda name: FOLDER / f"{name}.yaml")
    known = functools.cache(solve)

    def script(request):
        shown = request.ask.tags["state"].partition(": ")[2].partition("\nProposed")[0]
        return f"#### {known(shown)}" if request.label.endswith(".0") else "#### none"

    batch = played(scripted_trainer(recipe_values(f"at_grpo_{game}", tmp_path), script))
    got = rows(batch)
    assert {row.utterance.agent for row in got} == {"tool", "planner"} and len(got) == 2 * 2 * 3
    for row in got:
        paid, first = row.utterance.rewards["env"], row.utterance.tags["action"] is not None
        assert round(row.advantage, 3) == (1.155 if first else -0.577)
        assert paid >= (2 if row.utterance.agent == "planner" else 1) if first else paid == -2
    assert all(u.turn == 0 and u.grade.correct for d in batch.dialogues for u in d.utterances if d.rollout == 0)


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}(-){% endif %}"
)
"""A chat template that asks for thinking unless it is switched off, as Qwen3's does."""


def test_thinking_is_switched_off_in_the_prompts_that_are_trained_on(tmp_path, monkeypatch):
    assert load(FOLDER / "at_grpo_plan_path.yaml").agents["planner"].template_options == {"enable_thinking": False}
    values = tiny_values("dr_mas_math", str(tmp_path / "run"), monkeypatch)
    options = load(FOLDER / "dr_mas_math.yaml").agents["solver"].template_options
    values["agent_defaults"] |= {"chat_template": THINKS, "template_options": options}
    del values["warm_start"]
    trainer = build_trainer(from_dict(values), quiet=True)
    tokenizer = trainer.team.policies["solver"].tokenizer
    prompts = [tokenizer.decode(u.prompt_ids) for d in trainer.collected().dialogues for u in d.utterances]
    assert prompts and all(prompt.endswith("(-)") for prompt in prompts)
    again = type(tokenizer).from_pretrained(tokenizer.save_pretrained(tmp_path / "saved") and tmp_path / "saved")
    assert encode_prompt(again, [{"role": "user", "content": "2"}]) == tokenizer.encode("2(-)"), "it is saved too"


@pytest.mark.parametrize("options", [{"enable_thought": False}, {"enable-thinking": False}], ids=str)
def test_an_option_that_the_chat_template_does_not_use_is_refused(options, tmp_path, monkeypatch):
    values = tiny_values("dr_mas_math", str(tmp_path / "run"), monkeypatch)
    values["agent_defaults"] |= {"chat_template": THINKS, "template_options": options}
    with pytest.raises(ConfigError, match=r"agents\.solver\.template_options: its chat template does not use"):
        load_tokenizers(from_dict(values))


def test_hard_questions_are_chosen_by_level(tmp_path):
    levels = [5, "Level 5", 3, None, "Level 1", 5]
    rows = [{"question": f"q{n}", "answer": "1", "level": level} for n, level in enumerate(levels)]
    file = tmp_path / "math.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"name": "math", "source": str(file), "eval_source": str(file)}

    def asked(split="train", **options):
        return [example.question for example in build_task(section | options, split, 0)]

    assert asked() == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert asked(levels=[5]) == ["q0", "q1", "q5"] and asked(levels=[5], limit=2) == ["q0", "q1"]
    assert asked(levels=[1, 3]) == ["q2", "q4"]
    assert len(asked("eval", levels=[5])) == 6, "held-out questions are not chosen by level"
    with pytest.raises(TaskError, match=r"has no row of the levels \[2\]; change task\.levels"):
        asked(levels=[2])


POLARIS = [
    {"problem": "2+2=", "answer": "4", "difficulty": "8/8"},
    {"problem": "7*8=", "answer": "56", "difficulty": "3/8"},
    {"problem": "How many primes?", "answer": "25", "difficulty": "0/8"},
    {"problem": "What is x?", "answer": r"\frac{1}{2}", "difficulty": None},
]
ASKS = "Let's think step by step and output the final answer within \\boxed{}."
DAPO_FILTER = {
    "prompt": [{"role": "user", "content": "Find x if 2x = 6. " + ASKS}],
    "reward_model": {"ground_truth": "3", "style": "rule"},
    "ability": "MATH",
}


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_polaris_and_deepscaler_are_read_by_their_own_columns(tmp_path):
    section = {"name": "math", "source": written(tmp_path / "p.jsonl", POLARIS), "question_column": "problem"}

    def asked(**options):
        return [example.question for example in build_task(section | options, "train", 0)]

    assert asked() == ["2+2=", "7*8=", "How many primes?", "What is x?"]
    by_rate = {"level_column": "difficulty"}
    assert asked(**by_rate, levels=[1, 2, 3, 4, 5, 6, 7]) == ["7*8="] and asked(**by_rate, levels=[0, 8]) == [
        "2+2=",
        "How many primes?",
    ]
    deepscaler = [{"problem": "1+1=", "answer": "2", "solution": "It is 2."}]
    task = build_task(section | {"source": written(tmp_path / "d.jsonl", deepscaler)}, "train", 0)
    assert task.grade(task[0], r"So \boxed{2}").correct and not task.grade(task[0], r"So \boxed{3}").correct


def test_dr_mas_reads_its_training_data_without_their_instruction_and_other_columns_to_evaluate(tmp_path):
    config = load(FOLDER / "dr_mas_math.yaml")
    files = {
        "source": written(tmp_path / "train.jsonl", [DAPO_FILTER]),
        "eval_source": written(tmp_path / "eval.jsonl", [{"problem": "1+1=", "answer": "2"}]),
    }
    train_task, held_out = (build_task(config.task | files, split, 0) for split in ("train", "eval"))
    assert [(e.question, e.answer) for e in train_task] == [("Find x if 2x = 6.", "3")]
    assert [(e.question, e.answer) for e in held_out] == [("1+1=", "2")]
    with pytest.raises(TaskError, match=r"train\.jsonl: row 1 \(0\) has no answer"):
        len(build_task(config.task | files | {"answer_column": "reward_model.truth"}, "train", 0))
    with pytest.raises(ConfigError, match=r"remove: '\(' is not a regular expression"):
        build_task(config.task | files | {"remove": "("}, "train", 0)
