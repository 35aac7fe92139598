"""Every recipe that trains by PPO makes an update in groups of processes, in ``flow``, and it is that of a local run.

With Ray all recipes are tried, on one cluster. Threads in the place of processes try some of them in seconds.
"""

import json
import shutil
from importlib.util import find_spec

import pytest
import ray_groups
from recipe_runs import BRIEF, LONGER
from safetensors.torch import load_file

from maporl import ClusterSection, RayBackend
from maporl.config.recipes import recipe_files
from maporl.methods.tiny_versions import tiny_version
from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run

SECTION = ClusterSection(backend="ray", batching="flow")
LOOPS = {name for name in recipe_files() if "loop" in tiny_version(name, "run")}
RECIPES = sorted(set(recipe_files()) - LOOPS)
QUICK = (
    "dr_mas_search",
    "dr_mas_search with PPO",
    "dr_mas with an expression",
    pytest.param("maporl", marks=pytest.mark.slow),
)
"""With tools, with an agent that learns in another way than the others, with one whose answers are held to an
expression, and with a critic for each turn."""
PPO = {
    "advantage": {"returns": "token_gae", "baseline": "critic", "scale": "std", "key": ["agent", "turn"], "singleton": "error"},
    "ppo": {"num_ppo_epochs": 2, "kl_coef": 0.1}, "critic": "head", "learning_rate": 1e-3,
}  # fmt: skip


def config_of(name, folder, backend="local"):
    brief = {"warm_start": BRIEF | LONGER.get(name, {}), "updates": 1, "evaluation": {"questions": 0}}
    own = {"cluster": {"backend": "ray", "batching": "flow"}} if backend == "ray" else {}
    recipe, _, other = name.partition(" with ")
    values = tiny_version(recipe, str(folder))
    if other:
        first = next(iter(values["agents"]))
        more = {"algorithm": PPO} if other == "PPO" else {"structured_output": {"regex": "[0-9]{1,2}[+]?"}}
        values["agents"] |= {first: (values["agents"][first] or {}) | more}
    return from_dict(values | brief | own, name)


def final(folder):
    return {str(p.relative_to(folder)): load_file(p) for p in sorted((folder / "final").rglob("*.safetensors"))}


def dialogues(folder):
    return [json.loads(line) for line in (folder / "dialogues.jsonl").read_text().splitlines()]


def alike(one, other):
    """Whether two records are the same, where numbers may differ by rounding, and calls may take other times."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(v, other[k]) for k, v in one.items() if k != "seconds")
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == (pytest.approx(other, abs=2e-4, nan_ok=True) if isinstance(one, float) else other)


def assert_an_update_is_that_of_a_local_run(name, backend, folder):
    """The same answers, and weights to 1e-5, from the same warm start."""
    local, there = folder / "local", folder / "ray"
    build_trainer(config_of(name, local), quiet=True).train()
    shutil.copytree(local / "initial", there / "initial")
    config = config_of(name, there, "ray")
    assert check_run(config)
    build_trainer(config, quiet=True, backend=backend).train()
    spoken, said = dialogues(local), dialogues(there)
    assert spoken and alike(said, spoken)
    one, other = final(local), final(there)
    assert one.keys() == other.keys() and one
    changes = [
        float((other[file][key] - value).abs().max()) for file, tensors in one.items() for key, value in tensors.items()
    ]
    assert max(changes) < 1e-5


@pytest.mark.parametrize("name", QUICK)
def test_an_update_in_threads_is_that_of_a_local_run(name, tmp_path, monkeypatch):
    ray_groups.use(monkeypatch)
    assert_an_update_is_that_of_a_local_run(name, RayBackend(SECTION), tmp_path)


@pytest.fixture(scope="session")
def backend():
    with RayBackend(SECTION) as shared:
        yield shared


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray is not installed")
@pytest.mark.parametrize("name", [*RECIPES, "dr_mas_search with PPO", "dr_mas with an expression"])
def test_an_update_on_ray_is_that_of_a_local_run(name, backend, tmp_path):
    assert_an_update_is_that_of_a_local_run(name, backend, tmp_path)
