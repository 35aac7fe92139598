"""``maporl compare`` and ``maporl sharing``: configurations that are trained over the same seeds and compared."""

import json

import pytest
import yaml
from folders import ROOT

from maporl.config.parse import to_yaml
from maporl.errors import ConfigError, RunError
from maporl.studies.comparing.command import compare_all
from maporl.studies.comparing.study import Measured, arms, page, train_all, write
from maporl.studies.sharing.command import both
from maporl.validation.load import from_dict, load

TEAM = {
    "output_dir": "runs/x", "updates": 16, "task": {"name": "toy_sum", "largest": 9}, "protocol": {"name": "debate", "turns": 2},
    "agents": {"ann": {"tiny": {"context": 512}}, "bob": {"tiny": {"context": 512}}, "ref": {"tiny": {"context": 512}, "trainable": False}},
    "ppo": {"response_length": 3}, "training": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "use_cpu": True},
    "evaluation": {"questions": 8},
}  # fmt: skip


def run(first, final, peak, **shares):
    return Measured({"first turn": first, "final turn": final, "peak": peak, "fall": peak - final}, shares)


def configurations(config, folder, seeds):
    return arms(both(config), folder, seeds, "sharing")


FOUND = {
    ("shared", 0): run(50.0, 80.0, 90.0, ann=0.75, bob=0.25),
    ("shared", 1): run(52.0, 84.0, 86.0, ann=0.65, bob=0.35),
    ("apart", 0): run(50.0, 70.0, 95.0),
    ("apart", 1): run(50.0, 78.0, 99.0),
}


def test_arms_differ_in_the_policies_of_those_who_learn(tmp_path):
    made = configurations(from_dict(TEAM), tmp_path, [3, 4])
    assert list(made) == [("shared", 3), ("shared", 4), ("apart", 3), ("apart", 4)]
    policies = {key: {name: agent.policy for name, agent in config.agents.items()} for key, config in made.items()}
    assert policies["shared", 3] == {"ann": "shared", "bob": "shared", "ref": None}
    assert policies["apart", 4] == {"ann": None, "bob": None, "ref": None}
    one = made["shared", 4]
    assert (one.seed, one.output_dir) == (4, str(tmp_path / "shared-4"))
    assert (one.training.eval_steps, one.training.role_gradients) == (2, 1)


def test_agents_that_cannot_share_are_named(tmp_path):
    message = "sharing: shared: agents: 'ann' and 'bob' share policy 'shared' but differ in"
    with pytest.raises(ConfigError, match=message):
        configurations(load(str(ROOT / "configs/ppo/quickstart.yaml")), tmp_path, [0])
    alone = TEAM | {"agents": {"ann": {"tiny": {"context": 512}}}}
    with pytest.raises(ConfigError, match=r"expected two agents or more that learn, got \['ann'\]"):
        configurations(from_dict(alone), tmp_path, [0])


def test_three_arms_are_each_compared_with_the_first_and_the_verdict_says_what_is_shown():
    """Differences of 8, 10 and 12 have a mean of 10 and half of an interval of 4.303 * 2 / sqrt(3) = 5.0; those of -1, 0
    and 1 a mean of 0 and half of an interval of 2.5."""
    found = {}
    for seed, lead in enumerate((8.0, 10.0, 12.0)):
        for arm, final in (("a", 60.0), ("b", 60.0 - lead), ("c", 59.0 + seed)):
            found[arm, seed] = Measured({"final turn": final, "score": final / 100}, {})
    text = page(found)
    assert "| final turn | 60.0 | 50.0 | +10.0 | +5.0 to +15.0 |" in text
    assert "| score | 0.600 | 0.600 | +0.000 | -0.025 to +0.025 |" in text
    assert "final turn: a minus b is +10.0 (+5.0 to +15.0), which shows a difference." in text
    assert text.endswith("final turn: a minus c is +0.0 (-2.5 to +2.5), which shows no difference.\n")
    games = page({key: Measured({"score": one.measures["score"]}, {}) for key, one in found.items()})
    assert "score: a minus b is +0.100 (+0.050 to +0.150), which shows a difference." in games


def test_what_cannot_be_compared_is_refused_before_anything_is_trained(tmp_path):
    for names, changes, told in (
        (["quickstart", "toy_sum"], ["evaluation.questions=0"], "compare: quickstart: evaluation.questions is 0"),
        (["quickstart"], [], r"compare: expected two configurations or more, got \['quickstart'\]"),
    ):
        settings = {name: load(str(ROOT / f"configs/ppo/{name}.yaml"), changes) for name in names}
        with pytest.raises(ConfigError, match=told):
            compare_all(settings, tmp_path / "out", range(2), "compare")
    assert not (tmp_path / "out").exists()


def test_the_page_has_every_run_and_the_shares_of_roles(tmp_path):
    """Final turn: 10 and 6, mean 8, deviation 2.828, half of the interval 12.706 * 2.828 / sqrt(2) = 25.4."""
    text = page(FOUND)
    assert "| final turn | 82.0 | 74.0 | +8.0 | -17.4 to +33.4 |" in text
    assert "| fall | apart | 25.0 | 21.0 |" in text
    assert "Share of each role in the gradients of the shared policy: ann 70%, bob 30%." in text
    assert text.endswith("so this comparison proves nothing about how they were trained.\n"), "two seeds"
    files = write(tmp_path, FOUND, "sharing")
    assert files[1].read_text() == text
    assert text.endswith(json.loads(files[0].read_text())["proves_nothing"] + "\n")
    assert json.loads(files[0].read_text())["runs"]["shared-1"]["shares"] == {"ann": 0.65, "bob": 0.35}


@pytest.mark.parametrize(
    "seeds, right, told",
    [
        (3, (0.0, 0.0), "No answer was ever right, so this comparison proves nothing."),
        (3, (50.0, 50.0), "All results are equal, so this comparison proves nothing."),
        (3, (50.0, 60.0), ""),
        (1, (50.0, 60.0), "With 1 seed of each, chance in training may explain any difference, so this comparison"),
    ],
)
def test_arms_that_cannot_be_told_apart_say_so(seeds, right, told):
    arms = zip(("shared", "apart"), right, strict=True)
    said = page({(arm, seed): run(value, value, value) for arm, value in arms for seed in range(seeds)})
    assert told in said and ("proves nothing" in said) is bool(told)


def test_a_finished_run_of_another_configuration_is_not_taken_for_one_of_this(tmp_path):
    """With the same configuration it is, and so nothing is trained here."""
    folder = tmp_path / "shared-0"
    folder.mkdir()
    runs, others = (configurations(from_dict(TEAM | {"updates": n}), tmp_path, [0]) for n in (16, 8))
    (folder / "config.yaml").write_text(to_yaml(others["shared", 0]))
    (folder / "evaluation_after.json").write_text("{}")
    with pytest.raises(RunError, match=r"shared-0: has a run of another configuration \(updates was 8 and is 16"):
        next(train_all(runs))
    assert [path.name for path in tmp_path.iterdir()] == ["shared-0"], "nothing was trained"


@pytest.mark.slow
def test_runs_are_trained_once(tmp_path):
    """Real runs in processes of their own. What is finished is not trained again."""
    team = TEAM | {"updates": 2, "agents": {name: TEAM["agents"][name] for name in ("ann", "bob")}}
    runs = configurations(from_dict(yaml.safe_load(yaml.safe_dump(team))), tmp_path, [0])
    cut_off = tmp_path / "shared-0"
    cut_off.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):  # of a run that was killed before its first checkpoint
        (cut_off / name).write_text(to_yaml(runs["shared", 0]) if name == "config.yaml" else "")
    first = list(train_all(runs))
    assert [(arm, seed) for arm, seed, _ in first] == [("shared", 0), ("apart", 0)]
    shares = first[0][2].shares
    assert shares.keys() <= {"ann", "bob"} and sum(shares.values()) == pytest.approx(1.0 if shares else 0.0)
    assert sorted(folder.name for folder in (tmp_path / "shared-0/final").iterdir() if folder.is_dir()) == ["shared"]
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("metrics.jsonl")}
    assert list(train_all(runs)) == first
    assert {file: file.stat().st_mtime_ns for file in times} == times
