"""What a run on a service has besides its losses: frozen agents, past opponents, sharing, programs, a critic,
distillation; what is refused; and what it costs."""

import json

import pytest
import torch
import yaml
from asked_programs import ask, assistant, user
from safetensors.torch import load_file
from tinker_runs import base, final_of, on, served, trainer_of, values_of  # noqa: F401  # two are fixtures
from tinker_stub import Stub
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from maporl.cli.main import app
from maporl.config import parse_config
from maporl.errors import ConfigError
from maporl.integrations.tinker.engine import _completion
from maporl.integrations.tinker.prices import Tokens
from maporl.integrations.tinker.section import PriceSection
from maporl.integrations.tinker.service import Row, ServiceFailure, pieces
from maporl.validation.load import from_dict
from maporl.validation.preflight import check_run
from trl_ext.sampling.request import Draw, TokenRequest


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_frozen_agents_past_opponents_and_shared_policies_speak(tmp_path, base, served):
    stub = served()
    agents = {
        "ann": {},
        "bob": {"policy": "both"},
        "dan": {"policy": "both"},
        "eve": {"trainable": False, "lora": None},
    }
    pool = {"opponent_pool": {"agent": "bob", "of": "ann", "every": 1, "probability": 1.0}}
    more = {"schedule": pool, "evaluation": {"questions": 2}}
    values = values_of(tmp_path / "run", base, sections=more, agents=agents)
    trainer = trainer_of(on(stub, values))
    trainer.train()
    assert set(trainer.learners) == {"ann", "both"} and set(final_of(tmp_path / "run")) == {"ann", "both"}
    lines = (tmp_path / "run/dialogues.jsonl").read_text().splitlines()
    spoken = {(u["agent"], u["policy"]) for line in lines for u in json.loads(line)["utterances"]}
    # no snapshot was there in the first update
    assert spoken == {("ann", "ann"), ("bob", "both"), ("bob", "ann-past"), ("dan", "both"), ("eve", "eve")}
    snapshots = json.loads((tmp_path / "run/checkpoint-3/others/opponents/snapshots.json").read_text())
    assert len(snapshots) == 3 == len(set(snapshots)) and all(path in stub.states for path in snapshots)
    gaps = [
        record["ann/policy/engine_gap"] for record in records_of(tmp_path / "run") if "ann/policy/engine_gap" in record
    ]
    assert len(gaps) == 3 and max(gaps) < 1e-5


def test_policies_are_on_the_services_and_in_the_sessions_that_are_named(tmp_path, base, served):
    one, other = served(), served()
    agents = {"ann": {}, "bob": {"tinker": {"base_url": other.url}}, "dan": {}, "eve": {}}
    values = values_of(tmp_path / "run", base, {"updates": 1}, agents, save_steps=0)
    section = {"base_url": one.url, "sessions": 2}
    trainer_of(values | {"cluster": {"backend": "tinker", "tinker": section}}).train()
    trained = [{name for kind, name in stub.log if kind == "step"} for stub in (one, other)]
    # the policies 0, 2 and 3 and two throw-away adapters, in two sessions; policy 1 and two throw-away adapters, in two
    assert [stub.calls["create_session"] for stub in (one, other)] == [2, 2]
    assert [len(names) for names in trained] == [3 + 1, 1 + 1]  # nothing is trained on the second throw-away adapter


def test_the_weights_before_training_are_those_of_the_base(tmp_path, base, served):
    trainer = trainer_of(on(served(), values_of(tmp_path / "run", base)))
    untrained = trainer.home.untrained(trainer.team, 8)
    model = AutoModelForCausalLM.from_pretrained(base)
    prompt, answer = [4, 5, 6], [7, 8]
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([prompt + answer])).logits[0], -1)
    expected = float(table[2, 7] + table[3, 8])
    assert untrained.logprobs("ann", [(prompt, answer)]) == [pytest.approx(expected, abs=1e-5)]
    (said,) = untrained.complete("ann", [prompt], 1)
    assert said == [int(table[2].argmax())]
    trainer.home.run_ended()


def talk(question, base_url):
    """Ann speaks, and bob after her."""
    asked = [user(question)]
    asked.append(assistant(ask(base_url, "ann", asked)))
    return assistant(ask(base_url, "bob", [user(asked[-1]["content"] + ";" + question)]))["content"]


def test_programs_and_distillation_train_through_it(tmp_path, base, served):
    program = {"protocol": {"name": "program", "run": "test_tinker_parts:talk"}, "updates": 1}
    trainer_of(on(served(), values_of(tmp_path / "program", base, sections=program, save_steps=0))).train()
    assert records_of(tmp_path / "program")[0]["program/failed"] == 0.0
    taught = {"reward": {"sources": {"tokens": 0.0}, "distill": {"teacher": "dialogue"}}, "updates": 1}
    taught["branching"] = {"group": 2}
    taught["advantage"] = {"returns": "token_gae", "baseline": "none", "scale": "none"}
    trainer_of(on(served(), values_of(tmp_path / "taught", base, sections=taught, save_steps=0))).train()
    assert records_of(tmp_path / "taught")[0]["ann/distill/share"] == 1.0


@pytest.mark.slow
def test_agents_that_call_tools_train_through_it(tmp_path):
    alphabet = "0123456789+= :;?<>/acltuor"
    tiny = {"alphabet": alphabet, "hidden_size": 64, "layers": 2, "context": 160}
    texts = {"intro": "", "line": "", "tags": "", "returned": "={text}", "failed": "?", "limit": ";"}
    tools = {"tools": ["calculator"], "call_format": "tags", "call_texts": texts}
    sections = {
        "tools": {"calculator": {"use": "calculator"}}, "protocol": {"name": "debate", "turns": 1},
        "ppo": {"response_length": 36}, "branching": {"group": 2},
    }  # fmt: skip
    warm = {"steps": 60, "batch_size": 32, "learning_rate": 1e-2, "calls": 1.0}
    values = values_of(tmp_path / "warm", None, sections=sections, save_steps=0)
    values |= {"agent_defaults": {"tiny": tiny, **tools}, "warm_start": warm, "updates": 1}
    trainer_of(values).train()  # a base that has learnt to call
    base = str(tmp_path / "warm/final/ann")
    stub = Stub(base)
    values = values_of(tmp_path / "run", base, sections=sections, save_steps=0) | {"updates": 2}
    values["agent_defaults"] |= tools
    trainer_of(on(stub, values)).train()
    stub.close()
    records = records_of(tmp_path / "run")
    called, failed = (sum(one[f"tools/calculator/{what}"] for one in records) for what in ("calls", "failed"))
    assert called > 8 and failed < called / 2


def test_a_critic_of_a_small_local_model_learns_here(tmp_path, base, served):
    sections = {"advantage": {"returns": "token_gae", "baseline": "critic"}, "updates": 2}
    agents = {
        "ann": {"critic": "model", "tinker": {"critic": base}},
        "bob": {"algorithm": {"advantage": {"baseline": "none"}}},
    }
    values = values_of(tmp_path / "run", base, sections, agents)
    trainer = trainer_of(on(served(), values))
    before = {name: p.clone() for name, p in trainer.learners["ann"].critic.model.named_parameters()}
    trainer.train()
    after = trainer.learners["ann"].critic.model.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    saved = load_file(tmp_path / "run/checkpoint-2/policies/ann/critic/model.safetensors")
    assert saved and not (tmp_path / "run/checkpoint-2/policies/bob/critic").exists()


# -- what does not fit -------------------------------------------------------------------------------------------------

CASES = {
    "agents.ann.tiny: a model that is built here": {"agents": {"ann": {"model": None, "lora": None, "tiny": {}}}},
    "agents.ann.lora: the service trains LoRAs": {"agents": {"ann": {"lora": None}}},
    "agents.ann.lora.alpha: the service scales": {"agents": {"ann": {"lora": {"r": 4, "alpha": 8}}}},
    "agents.ann.lora.target_modules: ": {"agents": {"ann": {"lora": {"r": 4, "target_modules": ["q_proj"]}}}},
    "agents.ann.load_in_4bit: ": {"agents": {"ann": {"load_in_4bit": True}}},
    "training.critic: 'head' reads": {"advantage": {"returns": "token_gae", "baseline": "critic"}, "training": {"critic": "head"}},
    "agents.ann.tinker.critic: ": {"advantage": {"returns": "token_gae", "baseline": "critic"}, "training": {"critic": "model"}},
    "ppo.entropy_coef: ": {"ppo": {"entropy_coef": 0.1}},
    "ppo.temperature: the service computes": {"ppo": {"temperature": 0.7}},
    "agents.ann.sampling.temperature: ": {"agents": {"ann": {"sampling": {"temperature": 0.7}}}},
    "agents.ann.structured_output: ": {"agents": {"ann": {"structured_output": {"regex": "[0-9]"}}}},
    "warm_start.steps: ": {"warm_start": {"steps": 2}},
    "cluster.groups: a service has no groups": {"cluster": {"groups": {"one": {"policies": ["ann"]}}}},
    "cluster.tinker.key_variable: the environment has no": {"cluster": {"tinker": {}}},
    "training.role_gradients: ": {"training": {"role_gradients": 1}, "agents": {"bob": {"policy": "ann"}}},
}  # fmt: skip


def merged(values, more):
    """The values with others in their place, section by section."""
    return {
        key: merged(values.get(key) or {}, more[key])
        if isinstance(more.get(key), dict)
        else more.get(key, values.get(key))
        for key in [*values, *(key for key in more if key not in values)]
    }


@pytest.mark.parametrize("told", CASES)
def test_what_does_not_fit_is_refused_by_check(tmp_path, base, monkeypatch, told):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    values = values_of(tmp_path / "run", base) | {
        "cluster": {"backend": "tinker", "tinker": {"base_url": "http://127.0.0.1:1"}}
    }
    changed = merged(values, CASES[told])
    if told.startswith("cluster.tinker"):
        changed["cluster"]["tinker"] = {}
    with pytest.raises(ConfigError) as refused:
        check_run(from_dict(changed), ask_servers=False)
    said = [str(refused.value), *getattr(refused.value, "__notes__", ())]
    (sentence,) = [line for line in said if told in line][:1]
    assert "; " in sentence  # what to do


def test_the_sections_of_a_service_go_with_its_backend(tmp_path, base):
    values = values_of(tmp_path / "run", base, agents={"ann": {"tinker": {"critic": base}}, "bob": {}})
    with pytest.raises(ConfigError, match=r"agents.ann.tinker: cluster.backend is local; set cluster.backend: tinker"):
        check_run(parse_config(values), ask_servers=False)


# -- what is asked, and what it costs ----------------------------------------------------------------------------------


def test_rows_are_cut_into_requests():
    rows = [Row(range(length + 1), 1) for length in (60_000, 50_000, 100_000, *[1] * 300)]
    assert [len(part) for part in pieces(rows)] == [1, 1, 1, 256, 44]
    assert pieces(rows[:2], ["a", "b"]) == [["a"], ["b"]]


class Answer:
    def __init__(self, tokens, logprobs, stop_reason):
        self.sequences = [self]
        self.tokens, self.logprobs, self.stop_reason = tokens, logprobs, stop_reason


@pytest.mark.parametrize(
    "answer, lacks",
    [(Answer([], [], "length"), "tokens"), (Answer([4], None, "length"), "log-probabilities"),
     (Answer([4], [-1.0], "stop"), "the token that ended it")],
)  # fmt: skip
def test_an_answer_that_lacks_something_is_no_answer(answer, lacks):
    asked = TokenRequest("ann", [3], Draw(2, stop_ids=frozenset({2})), label="ann, turn 1")
    with pytest.raises(ServiceFailure, match=f"ann, turn 1: the service's answer lacks {lacks}"):
        _completion(asked, answer, 0)
    assert _completion(asked, Answer([4, 2], [-1.0, -2.0], "stop"), 7).ids == [4, 2]


def test_an_update_has_a_price(tmp_path, base):
    ppo = {"kl_coef": 0.1, "num_ppo_epochs": 2, "num_mini_batches": 2}
    own = parse_config(values_of(tmp_path / "run", base, sections={"ppo": ppo}))
    # the prompt; then the row before the update, by the base, and before three of four steps of half of it
    tokens = Tokens.of(100, 50, own, learns=True)
    assert tokens == Tokens(read=100 + 150 * (1 + 1 + 1.5), sampled=50, trained=300)
    assert Tokens.of(100, 50, own, learns=False) == Tokens(100, 50, 0)
    price = PriceSection(read=1.0, sampled=2.0, trained=10.0)
    assert tokens.dollars(price) == pytest.approx((625 + 100 + 3000) / 1e6)


def test_check_says_what_an_update_costs(tmp_path, base):
    values = values_of(tmp_path / "run", base, sections={"ppo": {"num_ppo_epochs": 1}})
    section = {"base_url": "http://127.0.0.1:1"}
    lines = check_run(parse_config(values | {"cluster": {"backend": "tinker", "tinker": section}}), ask_servers=False)
    assert f"service: no price of {base}; cluster.tinker.prices gives them" in lines
    section["prices"] = {base: {"sampled": 1e6}}
    lines = check_run(parse_config(values | {"cluster": {"backend": "tinker", "tinker": section}}), ask_servers=False)
    # four questions, two turns, answers of at most three tokens, at a dollar each, in three updates of two policies
    assert any(line.startswith(f"service: ann on {base}: an update takes at most 24 tokens sampled") for line in lines)
    assert any(line.startswith("service: 3 updates cost at most $144,") for line in lines)


def test_plan_says_what_an_update_costs(tmp_path, base):
    section = {"base_url": "http://127.0.0.1:1", "prices": {base: {"sampled": 1e6}}}
    file = tmp_path / "team.yaml"
    file.write_text(
        yaml.safe_dump(values_of(tmp_path / "run", base) | {"cluster": {"backend": "tinker", "tinker": section}})
    )
    result = CliRunner().invoke(app, ["plan", str(file), "--dialogues", "10", "--answer", "2", "--question", "5"])
    # ten dialogues of two turns, in which two agents say two tokens
    assert f"service: ann, bob on {base}: an update takes 80 tokens sampled" in result.output
    assert "service: 3 updates cost $240," in result.output
