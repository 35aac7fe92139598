"""Playing ahead of training, and learners on separate devices."""

import threading
import time

import pytest
import torch
from accelerate import Accelerator
from fast_cases import some
from notebook_runs import odd, trainer_of

from maporl import Arithmetic, MultiAgentPPOConfig
from maporl.config.schema import TinySection
from maporl.errors import ConfigError
from maporl.rewards import RewardSource
from maporl.team.loading import base_owners, load_agents, split
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.learning.trained import NonFiniteError


def weights(trainer):
    return torch.cat(
        [p.detach().flatten() for learner in trainer.learners.values() for p in learner.model.parameters()]
    )


def test_depth_1_plays_with_the_weights_of_one_update_before(tiny, tmp_path):
    exact, ahead = (trainer_of(tiny, tmp_path / str(d), True, async_depth=d, engine_tis_cap=2.0) for d in (0, 1))
    exact.train()
    ahead.train()
    assert len(exact.engines["vllm"].tokens.digests) == 5 and len(ahead.engines["vllm"].tokens.digests) == 4, (
        "the second plays with the first's"
    )
    one, other = exact.run.read_metrics(), ahead.run.read_metrics()
    assert len(other) == 5
    assert one[0]["ann/policy/engine_gap"] == other[0]["ann/policy/engine_gap"] < 1e-5, "the first update is on-policy"
    assert all(r["ann/policy/engine_gap"] > 1e-3 for r in other[1:]), "and the others' distance is measured"
    questions = [(tmp_path / str(d) / "dialogues.jsonl").read_text().count('"step": 3') for d in (0, 1)]
    assert questions[0] == questions[1] > 0
    assert not torch.equal(weights(exact), weights(ahead))


def test_playing_ahead_with_weights_that_change_is_refused(tiny, tmp_path):
    message = (
        r"engine 'transformers' answers with those weights; use cluster.backend: ray or engine: vllm, or async_depth"
    )
    with pytest.raises(ValueError, match=message):
        trainer_of(tiny, tmp_path, False, async_depth=1, engine_tis_cap=2.0)


class RecordsTasks(RewardSource):
    """Records the task of each update's dialogues."""

    def __init__(self):
        self.tasks = []

    def __call__(self, dialogues, task):
        return odd(dialogues, task)

    def after_update(self, update, dialogues, task):
        assert {d.example.question for d in dialogues} <= {e.question for e in task}
        self.tasks.append((update, task.largest))
        return {}


@pytest.mark.parametrize("depth", some([0, 1], 1))
def test_a_source_that_learns_is_told_the_task_of_the_update_and_not_of_the_batch_that_is_played(tiny, tmp_path, depth):
    """With async_depth 1 the next batch, of the curriculum's next task, is played while this update ends."""
    source = RecordsTasks()
    more = {"source": source, "curriculum": [(3, Arithmetic(largest=40))]}
    trainer = trainer_of(tiny, tmp_path, True, async_depth=depth, engine_tis_cap=2.0, **more)
    trainer.train()
    assert source.tasks == [(1, 9), (2, 9), (3, 40), (4, 40), (5, 40)]


def test_a_small_budget_for_kept_states_changes_no_dialogue_and_is_logged(tiny, tmp_path):
    whole, small = (
        trainer_of(tiny, tmp_path / str(g), False, total_episodes=8, keep_states_gib=g) for g in (None, 2e-5)
    )
    said = []
    for trainer in (whole, small):
        trainer.train()
        said.append([(u["agent"], u["text"]) for d in trainer.run.read_dialogues() for u in d["utterances"]])
    assert said[0] == said[1] and len(said[0]) > 8
    [all_kept], [some_kept] = whole.run.read_metrics(), small.run.read_metrics()
    assert all_kept["kv_cache/forgotten"] == 0 and all_kept["kv_cache/gib"] > 2e-5 >= some_kept["kv_cache/gib"] > 0
    assert some_kept["kv_cache/forgotten"] > 0
    with pytest.raises(ValueError, match="keep_states_gib: expected a number above 0, got 0; keep_states: false keeps"):
        MultiAgentPPOConfig(output_dir="unused", keep_states_gib=0)


# -- placement ----------------------------------------------------------------------------------------------------


def test_every_base_has_a_device_or_the_run_is_refused():
    devices = [torch.device("cuda", number) for number in range(3)]
    assert split(["ann", "bob"], False, devices) == devices[:2]
    with pytest.raises(ValueError, match=r"2 base models \(of policies ann, bob\), and there is 1 \(cuda:0\)"):
        split(["ann", "bob"], False, devices[:1])


def split_trainer(tiny, folder, monkeypatch, **options):
    """A trainer whose two learners are on two devices, for which the CPU stands."""
    monkeypatch.setattr(
        "maporl.team.loading.split", lambda owners, use_cpu: [torch.device("cpu", n) for n in range(len(owners))]
    )
    return trainer_of(tiny, folder, False, placement="split", **options)


@pytest.mark.slow
def test_split_learners_train_as_shared_ones(tiny, tmp_path, monkeypatch):
    """The test is about placement, and about statistics over all devices."""
    shared = trainer_of(tiny, tmp_path / "shared", False)
    shared.train()
    apart = split_trainer(tiny, tmp_path / "split", monkeypatch)
    assert [learner.device for learner in apart.learners.values()] == [torch.device("cpu", 0), torch.device("cpu", 1)]
    apart.train()
    assert torch.equal(weights(shared), weights(apart))


KINDS = [
    {"kl_coef": 0.05, "critic": "model", "num_mini_batches": 2, "bf16": True},
    {"logits_chunk": 3, "entropy_coef": 0.01},
    {"gradient_checkpointing": True, "target_kl": 1e-3},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=lambda own: next(iter(own)))
def test_learners_on_two_threads_end_as_one_after_the_other(tiny, tmp_path, monkeypatch, options):
    """Weights, metrics and the random state of the process are the same bits."""
    ends = []
    for name in ("serial", "threads"):
        if name == "serial":
            monkeypatch.setattr(
                "trl_ext.learning.learners.Learning._on_all_devices",
                lambda self, names, work: {name: work(name) for name in names},
            )
        torch.manual_seed(7)
        trainer = split_trainer(tiny, tmp_path / name, monkeypatch, total_episodes=16, **options)
        trainer.train()
        records = [
            {k: v for k, v in r.items() if "/" in k and not k.startswith(("time/", "memory/"))}
            for r in trainer.run.read_metrics()
        ]
        ends.append((weights(trainer), records, torch.get_rng_state()))
        monkeypatch.undo()
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] and len(ends[0][1]) == 2
    assert torch.equal(ends[0][2], ends[1][2])


@pytest.mark.parametrize("method", ["annotate", "accumulate", "step"])
def test_devices_work_at_the_same_time(tiny, tmp_path, monkeypatch, method):
    """Each learner waits in ``method`` until the other has come there too, which one after the other never does."""
    trainer = split_trainer(tiny, tmp_path, monkeypatch, total_episodes=8)
    meeting = threading.Barrier(2, timeout=60)
    inner = getattr(Learner, method)
    monkeypatch.setattr(Learner, method, lambda *args: (meeting.wait(), inner(*args))[1])
    trainer.train()
    assert not meeting.broken


def test_learners_of_one_device_or_with_a_central_critic_take_turns(tiny, tmp_path, monkeypatch):
    threads = set()
    inner = Learner.accumulate
    monkeypatch.setattr(Learner, "accumulate", lambda *args: (threads.add(threading.current_thread()), inner(*args))[1])
    trainer_of(tiny, tmp_path / "one", False, total_episodes=8).train()
    apart = split_trainer(tiny, tmp_path / "central", monkeypatch, total_episodes=8)
    apart.learning.central = type("Central", (), {"step": lambda self: 0.0, "trained": apart.learners["ann"].trained})()
    monkeypatch.setattr(apart, "checkpoint_others", dict)
    apart.train()
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize("failing", ["ann", "bob"])
def test_an_error_on_one_device_stops_the_run_after_the_others_have_ended(tiny, tmp_path, monkeypatch, failing):
    trainer = split_trainer(tiny, tmp_path, monkeypatch, total_episodes=8)
    inner, ended = Learner.accumulate, []

    def accumulate(learner, *args):
        if learner.name == failing:
            raise NonFiniteError(f"policy {failing!r}: on purpose")
        time.sleep(0.05)
        found = inner(learner, *args)
        ended.append(learner.name)
        return found

    monkeypatch.setattr(Learner, "accumulate", accumulate)
    with pytest.raises(NonFiniteError, match=f"policy '{failing}': on purpose"):
        trainer.train()
    assert ended == [{"ann": "bob", "bob": "ann"}[failing]]


def values_of(folder, agents, **more):
    return {
        "output_dir": str(folder / "run"), "task": {"name": "toy_sum"}, "agents": agents, "evaluation": {"questions": 0},
        "protocol": {"name": "debate", "turns": 2}, "training": {"use_cpu": True, "placement": "split"}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("agents, more, owners", [
    ({"ann": {"tiny": {}}, "bob": {"tiny": {}, "policy": "ann"}}, {}, ["ann"]),
    ({"ann": {"tiny": {}, "policy_per": "turn"}}, {}, ["ann-turn1", "ann-turn2"]),
    ({"ann": {"tiny": {}}, "bob": {"tiny": {}}}, {"schedule": {"opponent_pool": {"agent": "bob", "of": "ann"}}}, ["ann", "bob", "ann-past"]),
    ({"ann": {"model": "m", "lora": {}}, "bob": {"model": "m", "lora": {}}}, {"schedule": {"opponent_pool": {"agent": "bob", "of": "ann"}}}, ["ann"]),
    ({"ann": {"model": "m", "lora": {}}, "bob": {"model": "m", "lora": {}, "dtype": "float32"}}, {}, ["ann", "bob"]),
])  # fmt: skip
def test_every_copy_of_a_model_counts_for_placement_split(tmp_path, agents, more, owners):
    assert list(base_owners(from_dict(values_of(tmp_path, agents, **more))).values()) == owners


@pytest.mark.parametrize(("agent", "more", "message"), [
    ({"tiny": {}}, {}, "placement: split needs a device for each of 2 base models"),
    ({"tiny": {}, "policy": "one"}, {"schedule": {"opponent_pool": {"agent": "bob", "of": "ann"}}},
     r"2 base models \(of policies one, one-past\), and there is 1"),
])  # fmt: skip
def test_a_model_or_a_past_opponent_without_a_device_is_named_before_a_model_loads(tmp_path, agent, more, message):
    with pytest.raises(ConfigError, match=message):
        check_run(from_dict(values_of(tmp_path, {"ann": agent, "bob": agent}, **more)))


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_quantised_bases_are_loaded_on_the_device_that_they_are_placed_on(tmp_path, monkeypatch, bits):
    """They cannot move later. The CPU stands for every device, so the test looks at what is asked of transformers."""
    asked = {}

    class Loaded(Exception):
        """Ends the loading of the second base."""

    def read(kind, source, **options):
        asked[source] = options["device_map"]
        if len(asked) == 2:
            raise Loaded
        return build_tiny_model(TinySection(), build_tiny_tokenizer(TinySection()))

    monkeypatch.setattr("maporl.team.loading.read_model", read)
    monkeypatch.setattr(
        "maporl.team.loading.split", lambda owners, use_cpu: [torch.device("cuda", n) for n in range(len(owners))]
    )
    monkeypatch.setattr("maporl.config.agents.find_spec", lambda name: object())
    agents = {name: {"model": f"org/{name}", "lora": {}, bits: True} for name in ("ann", "bob")}
    config = from_dict(values_of(tmp_path, agents))
    with pytest.raises(Loaded):
        load_agents(config, dict.fromkeys(agents, build_tiny_tokenizer(TinySection())))
    assert asked == {"org/ann": {"": torch.device("cuda", 0)}, "org/bob": {"": torch.device("cuda", 1)}}
    asked.clear()
    config.training.placement = "shared"
    with pytest.raises(Loaded):
        load_agents(config, dict.fromkeys(agents, build_tiny_tokenizer(TinySection())))
    assert asked == {f"org/{name}": {"": torch.device("cpu")} for name in agents}, "use_cpu, also where there is a GPU"


def test_quantised_weights_on_another_device_are_refused(tiny, tmp_path):
    model, tokenizer = tiny()
    model.is_quantized = True
    learner = Learner(
        Policy("ann", model, tokenizer), MultiAgentPPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    )
    with pytest.raises(ValueError, match=r"policy 'ann': .* on cpu .* trained on meta; .*device_map={'': 'meta'}"):
        learner.prepare(Accelerator(cpu=True), 1, device=torch.device("meta"))
