"""Saving a team: the loaded team gives the same logits, nothing is overwritten, and names are true."""

import shutil

import pytest
import torch
import yaml
from fast_cases import some
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from maporl import Agent, Team
from maporl.engines.scripted import ScriptedEngine
from maporl.errors import ConfigError
from maporl.storage.run_folder import RunExists
from maporl.team.saving import name_of

IDS = torch.tensor([[3, 4, 5, 6]])


def logits(team):
    found = {}
    for name, policy in team.policies.items():
        policy.model.eval()
        with torch.no_grad(), policy.active() as model:
            found[name] = model(IDS).logits
    return found


def assert_same(one, other):
    before, after = logits(one), logits(other)
    assert before.keys() == after.keys() and len(before)
    for name, own in before.items():
        assert torch.equal(own, after[name]), name
    assert {n: [p.name for p in own] for n, own in one.policies_of.items()} == {
        n: [p.name for p in own] for n, own in other.policies_of.items()
    }
    for name, agent in one.agents.items():
        loaded = other.agents[name]
        assert (loaded.role, loaded.system) == (agent.role, agent.system)
    for name, policy in one.policies.items():
        loaded = other.policies[name]
        assert (loaded.trainable, loaded.algorithm) == (
            policy.trainable, policy.algorithm,
        )  # fmt: skip
        assert loaded.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
        assert loaded.tokenizer.chat_template == policy.tokenizer.chat_template


def adapted(model, names, **options):
    """One base with a LoRA per name, whose weights are random."""
    options = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options})
    shared = get_peft_model(model, options, adapter_name=names[0])
    for name in names[1:]:
        shared.add_adapter(name, options)
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in shared.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return shared


def whole(tiny):
    (ann, one), (bob, two) = tiny("llama"), tiny("qwen3", seed=1, alphabet="ab?;=+*:9876543210 ")
    return [Agent("ann", ann, one, role="solver", system="Be brief."), Agent("bob", bob, two, trainable=False)]


def adapters(tiny):
    model, tokenizer = tiny()
    shared = adapted(model, ["ann", "bob"])
    return [Agent(n, shared, tokenizer, adapter=n, learning_rate=rate) for n, rate in (("ann", 1e-4), ("bob", None))]


def rank_stabilised(tiny):
    """Options of PEFT that a configuration's ``lora`` does not have."""
    model, tokenizer = tiny()
    shared = adapted(model, ["ann"], use_rslora=True, lora_dropout=0.1, target_modules=["up_proj"])
    return [Agent("ann", shared, tokenizer)]


def one_policy(tiny):
    model, tokenizer = tiny()
    return [Agent("ann", model, tokenizer, policy="both"), Agent("bob", policy="both", role="critic")]


def by_turn(tiny):
    model, tokenizer = tiny()
    shared = adapted(model, ["opening", "reply"])
    turns = tuple(Agent(name, shared, tokenizer, adapter=name) for name in ("opening", "reply"))
    other, _ = tiny(seed=5)
    return [Agent("ann", by_turn=turns), Agent("bob", other, tokenizer)]


def whole_by_turn(tiny):
    (one, tokenizer), (two, _) = tiny(), tiny(seed=3)
    return [Agent("ann", by_turn=(Agent("a1", one, tokenizer), Agent("a2", two, tokenizer)))]


def with_a_person(tiny):
    return [*whole(tiny), Agent("me", engine="human", role="teacher")]


KINDS = (whole, adapters, rank_stabilised, one_policy, by_turn, whole_by_turn, with_a_person)


@pytest.mark.parametrize("kind", some(KINDS, 1, 4))
def test_a_saved_team_gives_the_same_logits_also_from_another_place(tiny, tmp_path, monkeypatch, kind):
    team = Team(kind(tiny))
    team.save(tmp_path / "team")
    assert_same(team, Team.from_pretrained(tmp_path / "team"))
    shutil.move(tmp_path / "team", tmp_path / "moved")
    assert_same(team, Team.from_pretrained(tmp_path / "moved"))
    monkeypatch.chdir(tmp_path)
    again = Team.from_pretrained("moved")
    assert_same(team, again)
    again.save("again")  # what was loaded can be saved
    shutil.rmtree("moved")
    assert_same(team, Team.from_pretrained("again"))


def test_nothing_is_overwritten(tiny, tmp_path):
    team = Team(whole(tiny))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunExists, match="not empty; nothing was overwritten"):
        team.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_turns_of_different_models_cannot_be_described(tiny, tmp_path):
    (one, tokenizer), (two, _) = tiny("llama"), tiny("qwen3")
    team = Team([Agent("ann", by_turn=(Agent("a1", one, tokenizer), Agent("a2", two, tokenizer)))])
    with pytest.raises(ConfigError, match=r"agents\.ann\.by_turn: policies a1, a2 .*save_pretrained"):
        team.save(tmp_path / "team")
    assert not (tmp_path / "team").exists()


def test_an_engine_that_was_passed_in_python_is_passed_again(tiny, tmp_path):
    team = Team([*whole(tiny), Agent("oracle", engine="mine")])
    team.save(tmp_path / "team")
    loaded = Team.from_pretrained(tmp_path / "team")
    assert loaded.agents["oracle"].engine == "python" and set(loaded.policies) == {"ann", "bob"}
    written = yaml.safe_load((tmp_path / "team/config.yaml").read_text())
    assert written["only_in_python"] == {"engines.oracle": "engine 'mine'"}


# -- names --------------------------------------------------------------------------------------------------------


@pytest.fixture
def named(tiny, tmp_path):
    """A folder with a saved model, and the model as loaded from it."""
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path / "named")
    tokenizer.save_pretrained(tmp_path / "named")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "named"), AutoTokenizer.from_pretrained(tmp_path / "named")


def policy_of(model, tokenizer):
    return Team([Agent("ann", model, tokenizer)]).policies["ann"]


def test_a_model_has_the_name_of_the_folder_that_has_its_weights(named, tmp_path):
    model, tokenizer = named
    assert name_of(policy_of(model, tokenizer)) == str(tmp_path / "named")
    assert name_of(policy_of(model.to(torch.bfloat16), tokenizer)) == str(tmp_path / "named")
    assert name_of(policy_of(adapted(model, ["ann"]), tokenizer)) == str(tmp_path / "named")


@pytest.mark.parametrize("how", ["built from its configuration", "trained", "resized", "moved away", "without a name"])
def test_a_model_that_differs_from_its_folder_has_no_name(named, tmp_path, how):
    model, tokenizer = named
    if how == "built from its configuration":
        model = type(model)(model.config)
        assert model.config._name_or_path == str(tmp_path / "named")
    elif how == "trained":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight += 1e-3
    elif how == "resized":
        model.resize_token_embeddings(40)
    elif how == "moved away":
        shutil.move(tmp_path / "named", tmp_path / "elsewhere")
    else:
        model.config._name_or_path = ""
    assert name_of(policy_of(model, tokenizer)) is None


def test_a_base_with_a_name_is_not_copied_and_a_changed_one_is(named, tmp_path):
    model, tokenizer = named
    team = Team([Agent("ann", adapted(model, ["ann"]), tokenizer)])
    team.save(tmp_path / "light")
    assert not (tmp_path / "light/ann/base").exists()
    assert_same(team, Team.from_pretrained(tmp_path / "light"))
    with torch.no_grad():
        model.model.embed_tokens.weight += 0.5
    team.save(tmp_path / "whole")
    assert (tmp_path / "whole/ann/base/model.safetensors").is_file()
    assert_same(team, Team.from_pretrained(tmp_path / "whole"))


def test_a_tokenizer_that_was_changed_in_memory_is_kept(named, tmp_path):
    model, tokenizer = named
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    tokenizer.pad_token = tokenizer.eos_token
    Team([Agent("ann", model, tokenizer)]).save(tmp_path / "team")
    loaded = Team.from_pretrained(tmp_path / "team").policies["ann"].tokenizer
    assert loaded.chat_template == tokenizer.chat_template and loaded.pad_token == loaded.eos_token


def test_a_scripted_agent_speaks_again_once_its_engine_is_passed(tiny, tmp_path):
    engine = ScriptedEngine(lambda request: "1")
    team = Team([*whole(tiny), Agent("oracle", engine="mine")])
    team.save(tmp_path / "team")
    from notebook_runs import DEBATE, TASK, config

    from maporl import MultiAgentPPOTrainer

    loaded = Team.from_pretrained(tmp_path / "team")
    with pytest.raises(ConfigError, match=r"engine 'python' of oracle: was passed in Python"):
        MultiAgentPPOTrainer(config(tmp_path / "no"), loaded, TASK, DEBATE)
    trainer = MultiAgentPPOTrainer(config(tmp_path / "run"), loaded, TASK, DEBATE, engines={"python": engine})
    batch = trainer.collect(trainer.next_batch())
    assert {u.text for d in batch.dialogues for u in d.utterances if u.agent == "oracle"} == {"1"}
