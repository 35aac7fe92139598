"""Weights that are not all there are refused, wherever a model, an adapter or a head is read."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from folders import ROOT
from peft import AdaLoraConfig, IA3Config, LoraConfig, VeraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from maporl.errors import ConfigError, UserError
from maporl.methods.fantom import SentenceEncoder
from maporl.schedules import OpponentPool
from maporl.tasks.base import TaskError
from maporl.team.agents import Agent
from maporl.team.loading import load_agents, load_tokenizers
from maporl.team.memory import shape_of
from maporl.team.past_policies import PastPolicies
from maporl.team.team import Team
from maporl.validation.load import from_dict
from maporl.verifier.model import Verifier, VerifierError
from maporl.verifier.section import VerifierSection
from trl_ext.files.manifest import CheckpointError
from trl_ext.learning.critics import ValueHead, load_head
from trl_ext.learning.policy import Policy, load_weights
from trl_ext.models.weights import WeightsError, check_adapter_source, read_adapter, read_model, read_pretrained

LAYER = "model.layers.1.mlp.up_proj.weight"
LORA = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


def edit(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def refuses_damage(file, name, read, error, where=""):
    """Check that ``read`` refuses each damage of a tensor in ``file``, and a file that is gone."""
    kept = file.read_bytes()
    read()
    for change, words in damages(name).values():
        file.write_bytes(kept)
        edit(file, change)
        with pytest.raises(error, match=where + words):
            read()
    file.unlink()
    with pytest.raises(error, match="could not be loaded"):
        read()


def damages(name):
    """Every way in which one tensor of a file can be wrong, and the words of the message for it."""

    def rename(tensors):
        tensors[f"{name}.old"] = tensors.pop(name)

    def shorten(tensors):
        tensors[name] = tensors[name][:3].contiguous()

    def spoil(tensors):
        tensors[name].view(-1)[7] = float("nan")

    def overflow(tensors):
        tensors[name].view(-1)[7] = float("-inf")

    return {
        "deleted": (lambda tensors: tensors.pop(name), "1 are missing"),
        "renamed": (rename, r"1 are missing .*; 1 belong to no part of this model \(.*\.old\)"),
        "another shape": (shorten, r"another shape|size mismatch for .* torch\.Size\(\[3, "),
        "NaN": (spoil, "1 hold NaN or infinite numbers"),
        "infinite": (overflow, "1 hold NaN or infinite numbers"),
    }


@pytest.fixture
def folder(tiny, tmp_path):
    """A model as ``save_pretrained`` writes it, with its tokenizer."""
    model, tokenizer = tiny()
    Policy("p", model, tokenizer).save(tmp_path / "model")
    return tmp_path / "model"


def config_of(**agent):
    return from_dict({"output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": agent}})


def load_agent(**agent):
    config = config_of(**agent)
    return load_agents(config, load_tokenizers(config))[0]


@pytest.mark.parametrize("damage", damages(LAYER))
def test_a_damaged_model_is_refused_by_the_names_of_its_tensors(tiny, folder, damage):
    change, words = damages(LAYER)[damage]
    edit(folder / "model.safetensors", change)
    with pytest.raises(ConfigError, match=rf"agents\.ann\.model: {folder}: .*{words}") as raised:
        load_agent(model=str(folder))
    assert LAYER in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(CheckpointError, match=words):
        load_weights(tiny()[0], None, folder)


def test_many_tensors_are_counted_and_the_first_are_named(folder):
    edit(
        folder / "model.safetensors",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name],
    )
    with pytest.raises(WeightsError, match=r"9 are missing \(model\.layers\.1\.input_layernorm.*, \.\.\.\)") as raised:
        read_model(AutoModelForCausalLM, folder)
    assert str(raised.value).count("model.layers") == 3


@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.write_text(file.read_text().replace('"hidden_size": 64', '"hidden_size": 64000'))])  # fmt: skip
def test_a_checkpoint_is_read_by_the_configuration_of_its_model(tiny, folder, change):
    """Without a ``config.json``, transformers would build a model of seven billion numbers."""
    change(folder / "config.json")
    model = tiny(seed=1)[0]
    load_weights(model, None, folder)
    assert torch.equal(model.state_dict()[LAYER], load_file(folder / "model.safetensors")[LAYER])


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("spoil", [cut, lambda file: file.write_bytes(b""), lambda file: file.write_bytes(b"\xff" * 64), Path.unlink])  # fmt: skip
def test_a_file_that_is_cut_or_empty_or_gone_is_refused(tiny, folder, spoil):
    spoil(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"agents\.ann\.model: '{folder}' could not be loaded \(\w+: .+\)") as raised:
        load_agent(model=str(folder))
    assert "\n" not in str(raised.value)
    with pytest.raises(CheckpointError, match="could not be loaded"):
        load_weights(tiny()[0], None, folder)


def in_shards(tiny, folder):
    shutil.rmtree(folder)
    model, tokenizer = tiny()
    model.save_pretrained(folder, max_shard_size="50KB")
    tokenizer.save_pretrained(folder)


def test_shards_are_read_and_a_missing_one_is_refused(tiny, folder):
    in_shards(tiny, folder)
    assert read_model(AutoModelForCausalLM, folder).num_parameters() == tiny()[0].num_parameters()
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    others = {name: file for name, file in listed["weight_map"].items() if name != LAYER}
    index.write_text(json.dumps({**listed, "weight_map": others}))
    with pytest.raises(WeightsError, match=r"1 are missing \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        read_model(AutoModelForCausalLM, folder)
    index.write_text(json.dumps(listed))
    (folder / listed["weight_map"][LAYER]).unlink()
    with pytest.raises(WeightsError, match=r"could not be loaded .*model-0000"):
        read_model(AutoModelForCausalLM, folder)


def test_pickled_weights_are_not_read(tiny, folder):
    (folder / "model.safetensors").unlink()
    torch.save(tiny()[0].state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"no file named model\.safetensors"):
        read_model(AutoModelForCausalLM, folder)


ABSURD = [
    ({"num_hidden_layers": 10**7}, r"sets num_hidden_layers=10000000; at most 1000 are built"),
    ({"text_config": {"num_hidden_layers": 1001}}, r"sets num_hidden_layers=1001; at most 1000"),
    ({"encoder": {"parts": [{"num_encoder_layers": 10**9}]}}, r"sets num_encoder_layers=1000000000; at most 1000"),
    ({"num_labels": 10**12}, "sets num_labels to 1,000,000,000,000, more than 100,000"),
    ({"id2label": {str(n): "x" for n in range(100_001)}}, "sets id2label to 100,001, more than 100,000"),
    ({"note": "x" * 2**24}, r"its config.json has 16,\d+,\d+ bytes; at most 16,777,216 are read"),
]


@pytest.mark.parametrize(("more", "message"), ABSURD, ids=lambda value: str(value)[:30])
def test_what_would_take_minutes_to_read_is_refused_before_transformers_reads_it(folder, more, message, monkeypatch):
    def never(*arguments, **named):
        raise AssertionError("transformers has read it")

    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    monkeypatch.setattr(PreTrainedConfig, "__init__", never)
    for kind in (AutoModelForCausalLM, LlamaForCausalLM, AutoConfig, AutoTokenizer):
        with pytest.raises(WeightsError, match=message) as caught:
            (read_pretrained if kind in (AutoConfig, AutoTokenizer) else read_model)(kind, folder)
        assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_large_and_odd_configurations_are_read(folder):
    file, plain = folder / "config.json", json.loads((folder / "config.json").read_text())
    for more in (
        {"num_labels": 1000},
        {"id2label": {str(n): f"label {n}" for n in range(20_000)}},
        {"vocab_size_per_layer_input": 262_144, "max_window_layers": 10**6, "layer_norm_epsilon": 1e-6},
        {"quantized": {"skipped": [f"model.layers.{n}.mlp" for n in range(50_000)]}},
        {"num_hidden_layers": plain["num_hidden_layers"], "n_layers_of_text": "two"},
    ):
        file.write_text(json.dumps(plain | more))
        assert read_pretrained(AutoConfig, folder).hidden_size == plain["hidden_size"]


def test_the_options_of_an_adapter_are_bounded(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "note": "x" * 2**24}))
    with pytest.raises(WeightsError, match=r"its adapter_config.json has 16,\d+,\d+ bytes; at most 16,777,216 are"):
        check_adapter_source(str(tmp_path))


def test_tied_embeddings_need_no_head_of_their_own(tiny, tmp_path):
    config = tiny()[0].config
    config.tie_word_embeddings = True
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = read_model(AutoModelForCausalLM, tmp_path)
    assert torch.equal(again.lm_head.weight, model.model.embed_tokens.weight)
    load_weights(model, None, tmp_path)
    edit(tmp_path / "model.safetensors", lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(WeightsError, match="are missing"):
        read_model(AutoModelForCausalLM, tmp_path)


# -- adapters -------------------------------------------------------------------------------------------------------


def with_adapters(model, *names, targets="all-linear"):
    for number, name in enumerate(names):
        lora = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
        if number:
            model.add_adapter(name, lora)
        else:
            model = get_peft_model(model, lora, adapter_name=name)
    return model


@pytest.fixture
def adapter(tiny, tmp_path):
    """A saved LoRA adapter of the model in ``folder``."""
    model, tokenizer = tiny()
    Policy("p", with_adapters(model, "cat"), tokenizer).save(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.parametrize("damage", damages(LORA))
def test_a_damaged_adapter_is_refused_wherever_it_is_read(tiny, folder, adapter, damage):
    change, words = damages(LORA)[damage]
    edit(adapter / "adapter_model.safetensors", change)
    with pytest.raises(ConfigError, match=rf"agents\.ann\.adapter: .*({words})") as raised:
        load_agent(model=str(folder), adapter=str(adapter))
    assert "layers.1.mlp.up_proj.lora_B" in str(raised.value) and "\n" not in str(raised.value)
    shared = with_adapters(tiny()[0], "ann", "bob")
    with pytest.raises(CheckpointError, match=words):
        load_weights(shared, "bob", adapter)
    with pytest.raises(WeightsError, match=words):
        read_adapter(shared, str(adapter), "cat", True)


def test_an_adapter_for_other_layers_is_refused(tiny, folder, tmp_path):
    model, tokenizer = tiny()
    Policy("p", with_adapters(model, "cat", targets=["q_proj"]), tokenizer).save(tmp_path / "few")
    with pytest.raises(CheckpointError, match="24 are missing"):
        load_weights(with_adapters(tiny()[0], "ann"), "ann", tmp_path / "few")
    assert load_agent(model=str(folder), adapter=str(tmp_path / "few")).adapter == "ann", "it brings its own layers"
    file = tmp_path / "few/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["k_proj"]}))
    with pytest.raises(ConfigError, match=r"4 are missing .*k_proj.*; 4 belong to no part of this model .*q_proj"):
        load_agent(model=str(folder), adapter=str(tmp_path / "few"))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_is_cut_or_gone_is_refused(folder, adapter, name):
    cut(adapter / name)
    with pytest.raises(ConfigError, match=r"agents\.ann\.adapter: .*could not be loaded") as raised:
        load_agent(model=str(folder), adapter=str(adapter))
    assert "\n" not in str(raised.value)
    (adapter / name).unlink()
    with pytest.raises(ConfigError, match=r"agents\.ann\.adapter: .*(could not be loaded|has no adapter_config\.json)"):
        load_agent(model=str(folder), adapter=str(adapter))


KINDS = {
    "LoRA": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "DoRA": LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM"),
    "with a whole layer": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
    "with embeddings": LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"),
    "with new tokens": LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2], task_type="CAUSAL_LM"),
    "VeRA": VeraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "AdaLoRA": AdaLoraConfig(init_r=2, target_r=2, total_step=9, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "IA3": IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_whole_adapters_of_every_kind_are_read(tiny, tmp_path, kind):
    """Some kinds have tensors that PEFT never saves, or that lie outside of the adapter."""
    model, tokenizer = tiny()
    saved = get_peft_model(model, KINDS[kind], adapter_name="cat")
    Policy("p", saved, tokenizer, "cat").save(tmp_path)
    read = read_adapter(tiny()[0], str(tmp_path), "ann", True).state_dict()
    assert all(torch.equal(value, read[name.replace(".cat", ".ann")]) for name, value in saved.state_dict().items())
    load_weights(saved, "cat", tmp_path)
    names = [name for name in load_file(tmp_path / "adapter_model.safetensors") if "q_proj" in name or "vera_" in name]
    edit(tmp_path / "adapter_model.safetensors", lambda tensors: tensors.pop(names[0]))
    with pytest.raises(CheckpointError, match=r"1 are missing|could not be loaded"):
        load_weights(saved, "cat", tmp_path)


def test_an_adapter_that_is_pickled_or_names_a_module_is_refused(folder, adapter):
    weights = load_file(adapter / "adapter_model.safetensors")
    file = adapter / "adapter_config.json"
    kept = file.read_text()
    file.write_text(json.dumps(json.loads(kept) | {"megatron_config": {"a": 1}, "megatron_core": "antigravity"}))
    with pytest.raises(ConfigError, match="names a module"):
        load_agent(model=str(folder), adapter=str(adapter))
    file.write_text(kept)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(weights, adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"could not be loaded .*adapter_model\.safetensors"):
        load_agent(model=str(folder), adapter=str(adapter))
    with pytest.raises(CheckpointError, match="could not be loaded"):
        load_weights(load_agent(model=str(folder), lora={}).model, "ann", adapter)


def test_adapters_of_one_base_come_back_each_with_its_own_weights(tiny, tmp_path):
    """Names that contain one another are told apart, and so are those of copies that serve as references."""
    names = ("ann", "anna", "ann_start", "b")
    model, tokenizer = tiny()
    shared = with_adapters(model, *names)
    for name in names:
        Policy("p", shared, tokenizer, name).save(tmp_path / name)
    kept = {name: value.clone() for name, value in shared.state_dict().items()}
    other = with_adapters(tiny()[0], *names)
    for name in names:
        load_weights(other, name, tmp_path / name)
    assert all(torch.equal(value, kept[name]) for name, value in other.state_dict().items())


# -- heads, past policies, verifiers, encoders -----------------------------------------------------------------------


def test_a_damaged_critic_head_is_refused(tmp_path):
    file = tmp_path / "value_head.safetensors"
    save_file(ValueHead(16, 4).state_dict(), file)
    refuses_damage(file, "linear.weight", lambda: load_head(ValueHead(16, 4), tmp_path), CheckpointError)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_damaged_past_policy_is_refused(tiny, tmp_path, adapted):
    def pool():
        model, tokenizer = tiny()
        agent = Agent("ann", model, tokenizer)
        if adapted:
            agent = Agent("ann", with_adapters(model, "ann"), tokenizer, adapter="ann")
        return PastPolicies(OpponentPool(agent="bob", of="ann"), Team([agent]), 0)

    first = pool()
    first.take_snapshot()
    first.take_snapshot()
    first.save(tmp_path)
    name, file = LORA if adapted else LAYER, tmp_path / "snapshot-0.safetensors"
    refuses_damage(file, name, lambda: pool().load(tmp_path), UserError, r"snapshot-0\.safetensors: .*")


@pytest.fixture
def verifier(folder, tmp_path):
    """A saved verifier, with a head of its own."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(tmp_path / "verifier")
    for file in [*folder.glob("token*"), *folder.glob("*.jinja")]:
        shutil.copy(file, tmp_path / "verifier")
    return tmp_path / "verifier"


def test_a_damaged_verifier_is_refused(verifier, name=LAYER):
    file = verifier / "model.safetensors"
    refuses_damage(file, name, lambda: Verifier.load(str(verifier), device="cpu"), VerifierError)


def test_a_base_model_is_no_verifier_but_may_become_one(folder, verifier):
    from maporl.verifier.options import TrainOptions
    from maporl.verifier.train import load_base

    for source in (folder, verifier):  # a base model gets a new head, and a verifier keeps its own
        model, _ = load_base(TrainOptions(model=str(source)))
        assert model.config.num_labels == 1 and model.score.weight.shape == (1, 64)
    edit(folder / "model.safetensors", lambda tensors: tensors.pop(LAYER))
    with pytest.raises(VerifierError, match=rf"--model {folder}: .*1 are missing"):
        load_base(TrainOptions(model=str(folder)))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": {"0": "LABEL_0"}}))
    with pytest.raises(VerifierError, match=r"2 are missing \(model\.layers\.1\.mlp\.up_proj\.weight, score\.weight\)"):
        Verifier.load(str(folder), device="cpu")


def test_a_damaged_sentence_encoder_is_refused(folder, tmp_path):
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=32, **shape), add_pooling_layer=False)
    model.save_pretrained(tmp_path / "encoder")
    for file in [*folder.glob("token*"), *folder.glob("*.jinja")]:
        shutil.copy(file, tmp_path / "encoder")
    SentenceEncoder(str(tmp_path / "encoder"))  # without the pooler, which is not read
    edit(tmp_path / "encoder/model.safetensors", lambda tensors: tensors.pop("encoder.layer.0.output.dense.weight"))
    with pytest.raises(TaskError, match=r"task\.encoder: .*1 are missing \(encoder\.layer\.0\.output\.dense\.weight\)"):
        SentenceEncoder(str(tmp_path / "encoder"))
    assert read_model(AutoModel, folder, new="pooler").config.num_hidden_layers == 2, "the trunk of a whole model"


def test_a_tokenizer_that_cannot_encode_is_refused_before_its_model_loads(folder):
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "model": whole["model"] | {"unk_token": "nowhere"}}))
    with pytest.raises(
        ConfigError, match=r"agents\.ann: its tokenizer cannot encode a chat \(WordLevel error: Missing \[UNK"
    ):
        load_tokenizers(config_of(model=str(folder)))


def test_a_trained_template_is_not_given_its_options_twice(tmp_path):
    """``read_team`` reads a whole model and its tokenizer from the trained folder, which has the options in it."""
    import yaml

    from maporl.team.saved import read_team

    agent = {"model": "org/base", "template_options": {"enable_thinking": False}}
    config = {"output_dir": "x", "task": {"name": "toy_sum"}, "agents": {"ann": agent}}
    (tmp_path / "final/ann").mkdir(parents=True)
    for file in ("config.json", "tokenizer_config.json"):
        (tmp_path / "final/ann" / file).write_text("{}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    read, _ = read_team(tmp_path)
    assert read.agents["ann"].template_options == {} and read.agents["ann"].model == str(tmp_path / "final/ann")


# -- code that comes with a model --------------------------------------------------------------------------------------


@pytest.fixture
def with_code(folder, tmp_path, monkeypatch):
    """A folder whose configuration, model and tokenizer name classes of its own, and a terminal that says yes."""
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').write('ran')\nclass Own: pass\n")
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoModelForSequenceClassification": "own.Own",
           "AutoModel": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}  # fmt: skip
    for name, more in (("config.json", {"model_type": "own"}), ("tokenizer_config.json", {"tokenizer_class": "Own"})):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | more | {"auto_map": own}))
    asked = []

    def answer(prompt=""):
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    yield folder
    assert not asked, "nobody is asked"
    assert not ran.exists() and not any(name.endswith(".own") for name in sys.modules), "no code ran"


@pytest.mark.parametrize("read", [
    lambda folder: load_tokenizers(config_of(model=folder)),
    lambda folder: load_agents(config_of(model=folder), {"ann": None}),
    lambda folder: load_agents(config_of(model=folder), {"ann": None}, weights=False),
    lambda folder: shape_of(config_of(model=folder).agents["ann"]),
    lambda folder: Verifier.load(folder, device="cpu"),
    lambda folder: SentenceEncoder(folder),
    lambda folder: verifier_client(folder),
    lambda folder: verifier_base(folder),
])  # fmt: skip
def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(with_code, read):
    with pytest.raises(UserError, match="needs code from its own folder, and such code is never run here") as raised:
        read(str(with_code))
    assert "\n" not in str(raised.value)


def verifier_client(folder):
    from maporl.verifier.client import VLLM

    VLLM(VerifierSection(model=folder, urls=("http://127.0.0.1:1",), api="vllm"))


def verifier_base(folder):
    from maporl.verifier.options import TrainOptions
    from maporl.verifier.train import load_base

    load_base(TrainOptions(model=folder))


def test_every_reading_names_its_trust_in_code():
    """A call of ``from_pretrained`` outside of ``trl_ext.models.weights`` would ask on the terminal, if it can read
    code at all."""
    only_json = ("LoraConfig.from_pretrained", "GenerationConfig.from_pretrained")
    files = [path for package in ("maporl", "trl_ext", "reward_server") for path in (ROOT / package).rglob("*.py")]
    calls = [
        (path.name, line.strip())
        for path in files
        for line in path.read_text().splitlines()
        if ".from_pretrained(" in line and not any(name in line for name in only_json)
    ]
    code = [call for call in calls if call[0] != "weights.py" and '"' not in call[1]]
    assert len(files) > 100 and not code, code
