"""``MultiAgentPPOTrainer(..., backend=RayBackend())`` is equal to a local run, to the bit.

Threads stand for processes.
"""

import shutil

import pytest
import ray_groups
import torch
from fast_cases import some
from notebook_runs import ALPHABET, DEBATE, HELD_OUT, READABLE, TASK, args, names
from peft import LoraConfig, get_peft_model
from ray_groups import assert_equal
from tiny_runs import config_of, end_of

from maporl import Agent, ClusterSection, GroupSection, LearnerPlaces, MultiAgentPPOTrainer, RayBackend, Team
from maporl.errors import ConfigError
from maporl.integrations.ray.group import GroupFailed
from maporl.runs.build import build_trainer
from maporl.team.loading import load_agents, load_tokenizers


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    ray_groups.use(monkeypatch)


def whole(tiny):
    """A llama with all weights trained, a frozen qwen3, and a smaller llama at its own rate."""
    sizes = {"hidden_size": 32, "layers": 1, "alphabet": ALPHABET}
    one, two, three = (tiny(kind, seed=n, **sizes) for n, kind in enumerate(("llama", "qwen3", "llama")))
    return [
        Agent("ann", *one),
        Agent("bob", *two, trainable=False),
        Agent("cleo", *three, learning_rate=1e-3, critic="none"),
    ]


def adapted(tiny):
    """Two adapters of one base without a name. The first one has been trained, and the second one is new."""
    torch.manual_seed(3)
    base, tokenizer = tiny("llama", hidden_size=32, layers=1, alphabet=ALPHABET)
    options = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, options, adapter_name="first")
    model.add_adapter("second", options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.first" in name:
                parameter.normal_(std=0.1)
    return [
        Agent("ann", model, tokenizer, adapter="first", policy="first", critic="adapter"),
        Agent("bob", model, tokenizer, adapter="second"),
    ]


def trainer_of(folder, agents, backend=None, **options):
    more = {"save_strategy": "steps", "save_steps": 1, "kl_coef": 0.05, **options}
    return MultiAgentPPOTrainer(
        args(folder, 2, **more), Team(agents), TASK, DEBATE, HELD_OUT, READABLE, backend=backend
    )


@pytest.mark.parametrize("team", some([whole, adapted], 0))
def test_a_team_made_in_python_trains_as_without_ray(tiny, team, tmp_path):
    """Final weights, checkpoints with optimizers, metrics, dialogues, and what the folder says of the run."""
    local, folder = tmp_path / "local/run", tmp_path / "ray/run"
    trainer_of(local, team(tiny)).train()
    agents = team(tiny)
    trainer = trainer_of(folder, agents, RayBackend())
    parameters = [p for agent in agents for p in agent.model.parameters()]
    assert parameters and all(p.is_meta for p in parameters), "the processes have them"
    assert ray_groups.Cluster.running == 1
    trainer.train()
    assert ray_groups.Cluster.running == 0 and all(m.ended for g in trainer.home.pools.values() for m in g._members)
    assert_equal(end_of(folder, 2), end_of(local, 2))
    assert set(names(folder)) == set(names(local))
    assert (folder / "config.yaml").read_text() == (local / "config.yaml").read_text().replace(str(local), str(folder))
    assert trainer.after.to_json()["turns"]


@pytest.mark.slow
def test_a_run_is_resumed_from_the_weights_with_which_it_began(tiny, tmp_path):
    """The second team has other first weights. Its reference is nevertheless that of the run."""
    folder, calm = tmp_path / "run", tmp_path / "calm"
    trainer_of(calm, whole(tiny)).train()
    trainer_of(folder, whole(tiny), RayBackend()).train()
    for name in ("final", "checkpoint-2"):
        shutil.rmtree(folder / name)
    others = [tiny(kind, seed=7, hidden_size=32, layers=1, alphabet=ALPHABET) for kind in ("llama", "qwen3", "llama")]
    agents = [
        Agent(agent.name, *made, trainable=agent.trainable, learning_rate=agent.learning_rate, critic=agent.critic)
        for agent, made in zip(whole(tiny), others, strict=True)
    ]
    trainer_of(folder, agents, RayBackend()).train(resume_from_checkpoint=True)
    assert_equal(end_of(folder, 2), end_of(calm, 2))


@pytest.mark.slow
def test_weights_that_a_killed_process_has_left_are_not_taken_for_those_of_a_new_run(tiny, tmp_path):
    folder = tmp_path / "run"
    (folder / "initial/ann").mkdir(parents=True)
    (folder / "initial/ann/model.safetensors").write_text("of another team")
    trainer = trainer_of(folder, whole(tiny), RayBackend())
    trainer.train()
    assert [p.name for p in folder.glob("initial*")] and (folder / "final/ann").is_dir()
    aside = [path for path in folder.iterdir() if path.name.startswith("initial") and path.name != "initial"]
    assert [(path / "ann/model.safetensors").read_text() for path in aside] == ["of another team"]


@pytest.mark.slow
def test_processes_stay_in_a_block_and_another_run_takes_their_place(tiny, tmp_path):
    with RayBackend() as backend:
        first = trainer_of(tmp_path / "one", whole(tiny), backend)
        first.train()
        assert first.measure().questions == 4 and first.measure().to_json() == first.after.to_json()
        second = trainer_of(tmp_path / "two", whole(tiny), backend)
        second.train()
        assert ray_groups.Cluster.running == 1
        alive = [member for member in backend.cluster.started if not member.ended]
        assert len(alive) == 5 and len(backend.cluster.started) == 10, "three sample and two train"
    assert ray_groups.Cluster.running == 0 and all(member.ended for member in alive)
    with pytest.raises(GroupFailed, match=r"have ended.* train in a block 'with RayBackend\(\) as backend:'"):
        second.measure()


@pytest.mark.slow
def test_processes_end_if_the_trainer_cannot_be_built_or_its_run_fails(tiny, tmp_path, monkeypatch):
    backend = RayBackend()
    with monkeypatch.context() as patch:
        patch.setattr(RayBackend, "engines", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer_of(tmp_path / "run", whole(tiny), backend)
    assert ray_groups.Cluster.running == 0
    trainer = trainer_of(tmp_path / "run", whole(tiny), backend)
    monkeypatch.setattr(type(trainer), "score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert ray_groups.Cluster.running == 0
    assert [name for name in names(tmp_path / "run") if name != "metrics.jsonl"] == []


def test_what_cannot_be_in_groups_is_refused_before_anything_is_saved(tiny, tmp_path):
    def refused(message, agents=None, backend=None, error=ConfigError, **options):
        with pytest.raises(error, match=message):
            trainer_of(tmp_path / "run", agents or whole(tiny), backend or RayBackend(), **options)
        assert not (tmp_path / "run").exists() and ray_groups.Cluster.running == 0

    written = r"expected an object, got the class RayBackend; write RayBackend\(\.\.\.\)"
    refused(written, backend=RayBackend, error=ValueError)
    ann = whole(tiny)[0]
    later = Agent("later", ann.model.__class__(ann.model.config), ann.tokenizer, trainable=False)
    turns = [Agent("ann", by_turn=(ann, later))]
    refused("by_turn: policies ann, later of different models or options cannot be described", turns)
    with pytest.raises(ConfigError, match=r"cluster\.backend is 'local'; pass ClusterSection\(backend='ray', \.\.\.\)"):
        RayBackend(ClusterSection())


def test_groups_are_those_of_the_section(tiny, tmp_path):
    places = {"all": GroupSection(["ann", "bob", "cleo"], LearnerPlaces(devices=1))}
    trainer = trainer_of(tmp_path / "run", whole(tiny), RayBackend(ClusterSection(backend="ray", groups=places)))
    assert list(trainer.home.pools) == ["all"] and trainer.home.learner_groups["all"].spec.trained == ("ann", "cleo")
    trainer.train()


@pytest.mark.slow
def test_tiny_models_below_adapters_are_those_of_a_local_run(tmp_path):
    """They are random, and every process draws all of them, so that those of the second group are the same."""
    agents = {"agents": {"ann": {"lora": {}}, "bob": {"lora": {}}}, "warm_start": {"steps": 0}}
    ends = []
    for backend in ("local", "ray"):
        config = config_of(tmp_path / backend, 2, {**agents, "cluster": {"backend": backend}})
        build_trainer(config, quiet=True).train()
        ends.append(end_of(tmp_path / backend, 2))
    assert_equal(ends[1], ends[0])


def test_a_model_without_weights_ends_completions_where_the_loaded_one_does(tiny, tmp_path):
    """Many models name a second end of sequence in their generation config alone."""
    model, tokenizer = tiny()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 7]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = config_of(tmp_path / "run", 2, {"agent_defaults": {"model": str(tmp_path / "model")}})
    agents = [load_agents(config, load_tokenizers(config), only=only) for only in (None, ())]
    assert [own[0].model.device.type for own in agents] == ["cpu", "meta"]
    for own in map(Team, agents):
        own.find_stop_ids(config.ppo)
        assert own.policies["ann"].stop_ids == {tokenizer.eos_token_id, 7}
