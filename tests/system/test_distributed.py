"""Two processes train what one trains: replicated, under DeepSpeed ZeRO, and sharded. ``torchrun`` starts those of
which one dies."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fast_cases import some
from folders import ROOT
from launches import STRATEGIES, launch, skip_unless_here, trained
from safetensors.torch import load_file

from maporl.integrations.exporting.plain import export
from trl_ext.process import distributed
from trl_ext.sharding.choice import strategy_of
from trl_ext.sharding.fsdp import FSDP_TORCH
from trl_ext.sharding.holder import Holder
from trl_ext.sharding.shards import Shards

NEW_TORCH = pytest.mark.skipif(torch.__version__ < FSDP_TORCH, reason=f"FSDP2 needs torch {FSDP_TORCH}")

MARKS = {"Sharded": NEW_TORCH, "Zero-2": pytest.mark.slow, "Zero-3": pytest.mark.slow}
TRIED = [pytest.param(name, marks=MARKS.get(name, ())) for name in STRATEGIES]


class Trained(NamedTuple):
    weights: dict
    records: list
    run: Path


def assert_close(weights, expected, most=1e-5):
    """The same weights, and no number further away than ``most``."""
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, atol=most, rtol=0, msg=lambda text, key=key: f"{key}: {text}")


def assert_alike(records, expected, *names):
    """The same metrics of these names but for rounding."""
    for name in names:
        own, one = ([record[name] for record in part if name in record] for part in (records, expected))
        assert own and own == pytest.approx(one, abs=2e-5), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The result of training with one process."""
    folder = tmp_path_factory.mktemp("alone")
    return Trained(*trained(folder, 1), folder / "run")


@pytest.mark.parametrize("name", TRIED)
def test_two_processes_end_with_the_weights_of_one(alone, tmp_path, name):
    skip_unless_here(name)
    zero = name.startswith("Zero")  # accelerate drops DeepSpeed where use_cpu is set
    options = {"strategy": name.split("-")[0], "args": {"use_cpu": not zero}}
    weights, records = trained(tmp_path, 2, STRATEGIES[name], **options)
    assert_close(weights, alone.weights)
    means = ("ann/policy/approxkl_avg", "bob/loss/value_avg", "ann/objective/scores", "eval_accuracy/turn_2")
    assert_alike(records, alone.records, *means, "ann/grad_norm")
    dialogues = (tmp_path / "run/dialogues.jsonl").read_text().splitlines()
    assert len(dialogues) == 12 and {json.loads(line)["step"] for line in dialogues} == {1, 2, 3}
    final = sorted(p.name for p in (tmp_path / "final/ann").iterdir())
    assert "model.safetensors" in final and (tmp_path / "final/ann/critic/value_head.safetensors").is_file()


ALGORITHMS = {
    "ann": {"ppo": {"num_ppo_epochs": 3, "kl_coef": 0.2, "lam": 0.5}, "critic": "head"},
    "bob": {
        "advantage": {"returns": "utterance", "baseline": "mean", "scale": "std", "key": ["agent", "turn"]},
        "ppo": {"kl_coef": 0.0, "objective": "reinforce", "num_ppo_epochs": 1, "num_mini_batches": 2}, "critic": "none",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_processes_make_the_same_steps_of_each_algorithm_and_under_the_same_masks(tmp_path, name):
    skip_unless_here(name)
    for part in ("one", "two"):
        (tmp_path / part).mkdir()
    # DeepSpeed counts the critic's first steps as steps of the policy too, which makes its later ones larger
    warmup = {} if name.startswith("Zero") else {"critic_warmup": 1}
    algorithms = ALGORITHMS | {"ann": ALGORITHMS["ann"] | warmup}
    held = {"algorithms": algorithms, "structured": "[0-9]{1,2}[+]?"}
    expected, one = trained(tmp_path / "one", 1, **held)
    options = {"strategy": name.split("-")[0], "args": {"use_cpu": not name.startswith("Zero")}}
    weights, two = trained(tmp_path / "two", 2, STRATEGIES[name], **options, **held)
    assert not any(key.startswith("head.bob") for key in weights)
    assert_close(weights, expected)
    of_ann = ("ann/loss/value_avg", "ann/objective/kl", "ann/policy/forced_tokens")
    assert_alike(two, one, *of_ann, "bob/reward_std", "bob/grad_norm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Holder", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Zero-2", "Zero-3", "Sharded"))]
)
def test_minibatches_are_those_of_one_process(name, tmp_path):
    """docs/scaling.md: with four steps in a pass, two and four processes end with the weights of one. Each of
    the four has two dialogues, so it has nothing in half of the minibatches."""
    skip_unless_here(name)
    args = {"num_mini_batches": 4, "total_episodes": 16}
    one, one_records = trained(tmp_path / "one", 1, args=args)
    for number in (2, 4) if name == "Holder" else (2,):
        more = args | {"use_cpu": not name.startswith("Zero")}
        weights, records = trained(tmp_path / str(number), number, STRATEGIES[name], args=more)
        means = ("ann/objective/scores", "ann/policy/approxkl_avg", "bob/loss/value_avg")
        assert_alike(records, one_records, *means, "ann/grad_norm")
        assert_close(weights, one)


@pytest.mark.slow
def test_weights_have_moved(alone, tmp_path):
    """The tests above compare weights that three updates have changed in every matrix."""
    untrained, _ = trained(tmp_path, 1, args={"learning_rate": 0.0, "value_learning_rate": 0.0})
    for key, value in alone.weights.items():
        if value.dim() == 2:
            assert (value - untrained[key]).abs().max() > 1e-4, key


@pytest.mark.parametrize("name", [pytest.param("Holder", marks=pytest.mark.slow), *TRIED[1:]])
def test_a_checkpoint_of_one_process_goes_on_in_two(alone, tmp_path, name):
    """A checkpoint does not depend on how weights and optimizer were distributed over processes."""
    skip_unless_here(name)
    checkpoint = alone.run / "checkpoint-2"
    args = {"use_cpu": not name.startswith("Zero"), "save_strategy": "no"}
    weights, records = trained(tmp_path, 2, STRATEGIES[name], resume=str(checkpoint), args=args)
    assert [r["step"] for r in records] == [3, 3], "an update and the evaluation"
    assert_close(weights, alone.weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Sharded", "Zero-3"])
def test_past_opponents_speak_with_whole_weights(tmp_path, name):
    """A snapshot of weights that are distributed over processes would hold this process's part only."""
    skip_unless_here(name)
    pool = {"agent": "bob", "of": "ann", "every": 1, "probability": 1.0}
    # the untrained weights that restate answers are the references, which are distributed too
    args = {"total_episodes": 16, "eval_questions": 2, "restate": "base_model"}
    one, _ = trained(tmp_path / "one", 1, pool=pool, args=args | {"use_cpu": True})
    args["use_cpu"] = not name.startswith("Zero")
    two, _ = trained(tmp_path / "two", 2, STRATEGIES[name], pool=pool, args=args)
    restated = []
    for part in ("one", "two"):
        said = [json.loads(line) for line in (tmp_path / part / "run/dialogues.jsonl").read_text().splitlines()]
        assert {u["policy"] for d in said if d["step"] == 2 for u in d["utterances"]} == {"ann", "ann-past"}
        restated.append([u["restated"] for d in said for u in d["utterances"]])
    assert restated[0] == restated[1] and any(restated[0])
    snapshots = [
        load_file(tmp_path / part / "run/checkpoint-2/others/opponents" / file)
        for file in ("snapshot-0.safetensors", "snapshot-1.safetensors")
        for part in ("one", "two")
    ]
    kept = [json.loads((tmp_path / f"two/snapshots{rank}").read_text()) for rank in (0, 1)]
    assert kept == [[len(snapshots[1]), len(snapshots[3])], [0, 0]], "only the main process keeps whole models"
    for expected, found in ((one, two), snapshots[:2], snapshots[2:]):
        assert_close(found, expected)


@pytest.mark.slow
def test_two_processes_go_on_from_an_older_checkpoint_and_one_of_them_sets_the_rest_aside(alone, tmp_path):
    args = {"save_steps": 1}
    trained(tmp_path, 2, args=args)
    weights, records = trained(tmp_path, 2, resume="checkpoint-1", args=args)
    assert_close(weights, alone.weights)
    assert [r["step"] for r in records] == [1, 2, 3, 3]
    aside = sorted(path.name for path in (tmp_path / "run").glob("*.abandoned*"))
    assert aside == [
        "checkpoint-2.abandoned", "checkpoint-3.abandoned", "dialogues.jsonl.abandoned", "evaluation_after.json.abandoned",
        "evaluation_after.jsonl.abandoned", "final.abandoned", "metrics.jsonl.abandoned",
    ]  # fmt: skip
    refused = launch(tmp_path, 2, resume="checkpoint-7", args=args)
    assert refused.returncode == 1 and "checkpoint-7: no MANIFEST.json" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Sharded", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Zero-2", "Zero-3"))])
def test_a_checkpoint_in_shards_goes_on_in_any_number_of_processes(alone, name, tmp_path):
    """Two processes write it while they learn. They resume to the bit, and so do one process and four to 1e-5."""
    skip_unless_here(name)
    own = STRATEGIES[name]
    args = {"use_cpu": not name.startswith("Zero"), "async_save": True, "save_steps": 1}
    whole, _ = trained(tmp_path / "two", 2, own, args=args)
    checkpoint = tmp_path / "two/run/checkpoint-2"
    files = sorted(path.name for path in (checkpoint / "policies/bob/shards").iterdir())
    assert files == ["process-0-0.safetensors", "process-1-0.safetensors"]
    assert not (checkpoint / "policies/bob/model.safetensors").exists()
    for number, environment in ((2, own), (1, {}), (4, own)):
        if number == 4 and name != "Sharded":
            continue
        again = args | {"save_strategy": "no", "use_cpu": args["use_cpu"] or number == 1}
        resumed, _ = trained(tmp_path / str(number), number, environment, resume=str(checkpoint), args=again)
        assert_close(resumed, *((whole, 0) if number == 2 else (alone.weights,)))
    exported = export(checkpoint, tmp_path / "exported")
    assert [path.name for path in exported] == ["ann", "bob"]
    team = Shards(checkpoint / "policies/bob/shards")
    for key, value in load_file(exported[1] / "model.safetensors").items():
        assert torch.equal(value, team.whole(f"models.policy.{key}", "weight", value.shape)), key


@pytest.mark.slow
def test_adapters_of_one_base_train_in_two_processes_and_are_not_cut_up(tmp_path):
    one, _ = trained(tmp_path / "one", 1, lora="shared")
    two, _ = trained(tmp_path / "two", 2, lora="shared")
    assert_close(two, one)
    assert any("lora_B" in key and value.abs().max() > 1e-3 for key, value in one.items())


@NEW_TORCH
def test_adapters_of_one_base_are_not_sharded_once_for_each(tmp_path):
    refused = launch(tmp_path / "cut", 2, STRATEGIES["Sharded"], lora="shared")
    assert refused.returncode != 0
    assert "'ann' and 'bob' are adapters of one base, which Sharded would shard once for each" in refused.stderr


@pytest.mark.slow
def test_running_means_are_those_of_all_processes(tmp_path):
    advantage = {"returns": "utterance", "baseline": "ema", "scale": "none", "key": ["agent"]}
    one, _ = trained(tmp_path / "one", 1, advantage=advantage)
    two, _ = trained(tmp_path / "two", 2, advantage=advantage)
    assert_close(two, one)
    states = [
        json.loads((tmp_path / n / "run/checkpoint-3/state.json").read_text())["baselines"] for n in ("one", "two")
    ]
    assert states[0] == pytest.approx(states[1]) and len(states[0]) == 2


@pytest.mark.parametrize(
    "args",
    some([{"aggregation": "per_main_rollout"}, {"critic": "central", "critic_context": "joint"}], 1),
    ids=["rollouts", "critic"],
)
def test_rollouts_and_a_central_critic_are_those_of_all_processes(args, tmp_path):
    one, _ = trained(tmp_path / "one", 1, args=args)
    two, _ = trained(tmp_path / "two", 2, args=args)
    assert_close(two, one)


@pytest.mark.parametrize(
    "name", [TRIED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "Holder")]
)
def test_a_process_that_fails_saves_with_the_others_what_was_trained(alone, tmp_path, name):
    """It is not lost that a reward fails in one of two processes: both save the last update, and go on from it."""
    skip_unless_here(name)
    args = {"save_steps": 100, "use_cpu": not name.startswith("Zero")}
    failed = launch(tmp_path, 2, STRATEGIES[name], args=args, fails=1)
    assert failed.returncode != 0 and "saved in " in failed.stderr, failed.stderr
    weights, _ = trained(tmp_path, 2, STRATEGIES[name], resume=True, args=args)
    assert_close(weights, alone.weights)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others(tmp_path):
    done = launch(tmp_path, 2, die=1, torchrun=True)
    assert done.returncode != 0
    assert "this rank dies on purpose" in done.stderr


def test_processes_that_do_not_train_together_are_an_error():
    distributed.check_launcher({})
    with pytest.raises(distributed.WorldError, match=r"4 processes were started .* but 1 train together"):
        distributed.check_launcher({"WORLD_SIZE": "4"})
    with pytest.raises(distributed.WorldError, match="asked for several processes and started one"):
        distributed.check_launcher({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"})


@pytest.mark.slow
def test_accelerates_silent_single_process_is_refused(tmp_path):
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "train_multi_agent.py",
        "--config", "configs/ppo/quickstart.yaml", "--set", f"output_dir={tmp_path / 'run'}", "--set", "warm_start.steps=0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode != 0
    assert "asked for several processes and started one" in " ".join(done.stderr.split())
    assert not any((tmp_path / "run").iterdir()), "a corrected start may have the folder"


def test_fsdp_is_refused_where_torch_would_train_other_weights(monkeypatch):
    wanted = STRATEGIES["Sharded"]
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.0+cpu"))
    with pytest.raises(distributed.WorldError, match=r"FSDP2 needs torch 2\.13 or newer, got 2\.8\.0"):
        strategy_of(None, wanted)
    assert strategy_of(None, {}) is Holder


@pytest.mark.slow
def test_deepspeed_that_accelerate_would_drop_is_refused(tmp_path):
    refused = launch(tmp_path, 2, STRATEGIES["Zero-2"] | {"ACCELERATE_USE_CPU": "true"})
    assert refused.returncode != 0 and "which accelerate turns off with use_cpu: true" in refused.stderr
