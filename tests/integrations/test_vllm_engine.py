"""Rollouts by vLLM. The real server is tested where there is one: ``make test-vllm``, with MAPORL_TEST_VLLM_URL and the
folder of the model that it serves in MAPORL_TEST_VLLM_MODEL. The server needs ``--enable-lora --max-loras 2
--max-lora-rank 16 --logprobs-mode processed_logprobs --structured-outputs-config.backend guidance`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. vLLM in this process
is tested where it is installed beside maporl, with MAPORL_TEST_VLLM_MODEL alone (on CPUs also
VLLM_ENABLE_V1_MULTIPROCESSING=0 and VLLM_CPU_KVCACHE_SPACE=2).
"""

import importlib.machinery
import importlib.util
import os
from contextlib import nullcontext

import pytest
import torch
from vllm_engines import (
    fake,  # noqa: F401  # fixtures
    inform,
    team_of,
)

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection, Team
from maporl.decoding import StructuredOutput
from maporl.engines import choice
from maporl.engines.text import TextEngine
from maporl.errors import ConfigError, refuse
from maporl.integrations.vllm.engine import VLLMEngine
from maporl.integrations.vllm.section import ColocateSection, VLLMSection
from maporl.integrations.vllm.server import RemoteServer, VLLMFailure
from maporl.run import ResolvedRun
from maporl.team.loading import load_tokenizers
from maporl.validation.load import from_dict
from trl_ext.ppo import maths
from trl_ext.ppo.options import Grammar
from trl_ext.sampling.grammar import grammars_of
from trl_ext.sampling.request import Draw, TokenRequest

URL, MODEL = os.environ.get("MAPORL_TEST_VLLM_URL"), os.environ.get("MAPORL_TEST_VLLM_MODEL")


def config_of(agents):
    values = {"output_dir": "unused", "task": {"name": "toy_sum"}, "evaluation": {"questions": 0}}
    return from_dict(values | {"agents": agents})


# -- a server that plays its part: what is refused, and why --------------------------------------------------------


def test_adapters_travel_under_a_new_name_after_every_update(fake, tmp_path):
    server, engine, _ = fake
    engine = engine(tmp_path)
    inform(engine)
    engine.sync("bob")
    engine.sync("nobody of mine")
    commands = [(path, body["lora_name"].rsplit("-", 1)) for path, body in server.requests if "lora" in path]
    assert [(path.rsplit("/", 1)[1], name.split("-")[0], version) for path, (name, version) in commands] == [
        ("load_lora_adapter", "ann", "1"), ("load_lora_adapter", "bob", "2"),
        ("unload_lora_adapter", "bob", "2"), ("load_lora_adapter", "bob", "3"),
    ]  # fmt: skip
    assert not list(tmp_path.iterdir()), "what servers have read is removed"


@pytest.mark.parametrize(
    "says, message",
    [
        ({"version": "0.9.1"}, r"is vLLM 0.9.1, and 0.14 or newer is needed"),
        ({"tokens": [1, 2, 3]}, r"its tokenizer reads .* as \[1, 2, 3\]\.\.\., that of policy 'ann' as"),
        ({"logprob": lambda body: -30.0}, r"gives a token the log-probability -30.00, policy 'ann' here -\d.*serves other weights"),
        ({"refusal": "LoRA rank 64 is greater than max_lora_rank 16."}, r"policy 'ann' \(a LoRA of rank 4\).*max_lora_rank 16"),
        ({"models": []}, r"serves \[\], and agents.NAME.vllm.base is None"),
    ],
)  # fmt: skip
def test_a_server_that_is_not_what_is_needed_is_refused_at_start(fake, tmp_path, says, message):
    server, engine, _ = fake
    server.says |= says
    with pytest.raises(VLLMFailure, match=rf"http://127.0.0.1:{server.server_port}: .*{message}"):
        inform(engine(tmp_path))


def test_raw_log_probabilities_are_told_from_other_weights(fake, tmp_path):
    server, engine, team = fake
    model, ids = team.policies["ann"].model, server.says["tokens"]
    with torch.no_grad():
        head = model.get_base_model().lm_head.weight
        head.mul_(40)  # a model that is sure of itself, so that the temperature shows
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1:]
    token = int(logits.argmin())
    server.says |= {
        "token": token,
        "logprob": lambda body: float(maths.token_logprobs(logits, torch.tensor([token]), 1.0)),
    }
    with pytest.raises(VLLMFailure, match="start it with --logprobs-mode processed_logprobs"):
        inform(engine(tmp_path))


def test_a_server_that_hangs_or_is_not_there_is_named(fake, tmp_path):
    server, engine, _ = fake
    server.says["hangs"] = "/tokenize"
    with pytest.raises(VLLMFailure, match=f":{server.server_port}: tokenising: no whole answer within 0.5 s"):
        inform(engine(tmp_path, timeout=0.5))
    with pytest.raises(VLLMFailure, match=r"http://127.0.0.1:9: .*cannot be reached .ConnectError"):
        inform(engine(tmp_path, urls=["http://127.0.0.1:9"]))


REQUEST = TokenRequest("ann", [3, 4], Draw(1, 0.7), label="question 1")


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_a_completion_that_is_not_whole_is_asked_for_again(fake, reason):
    server, _, _ = fake
    reasons = [reason, "length"]
    server.says["ends"] = lambda: reasons.pop(0)
    url = f"http://127.0.0.1:{server.server_port}"
    [sampled] = RemoteServer(url, VLLMSection(urls=[url], retries=1)).submit([REQUEST])
    assert sampled.result().ids == [5] and reasons == []
    server.says["ends"] = lambda: reason
    [sampled] = RemoteServer(url, VLLMSection(urls=[url], retries=0)).submit([REQUEST])
    with pytest.raises(VLLMFailure, match=rf"question 1, model 'ann': its completion ended for the reason {reason!r}"):
        sampled.result()


def test_a_server_that_takes_no_whole_weights_is_named_with_the_flags_that_it_needs(fake, tmp_path, tiny, monkeypatch):
    """The package vllm is missing here too, which is said before the server is asked."""
    server, _, _ = fake
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    team = Team([Agent("ann", *tiny(), engine="vllm")])
    url = f"http://127.0.0.1:{server.server_port}"
    engine = VLLMEngine(team.policies, {"ann": VLLMSection(urls=[url])}, 1.0, tmp_path)
    expected = rf"{url}: did not take the weights of policy 'ann' .*VLLM_SERVER_DEV_MODE=1 vllm serve .*--weight-transfer-config"
    with pytest.raises(VLLMFailure, match=expected):
        inform(engine)


def test_servers_of_whole_weights_meet_the_trainer_at_ports_of_their_own(tiny, tmp_path, monkeypatch):
    opened, sent = [], []

    class Sender:
        def __init__(self, server, port, device):
            opened.append((server.url, port, str(device)))

        def send(self, weights):
            sent.append(weights)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("maporl.integrations.vllm.engine.WeightSender", Sender)
    monkeypatch.setattr(VLLMEngine, "_introduce", lambda *arguments: None)
    team = Team([Agent(n, *tiny(seed=s), engine="vllm") for s, n in enumerate(("ann", "bob"))])
    sections = {"ann": VLLMSection(urls=["http://a:1", "http://b:1"]), "bob": VLLMSection(urls=["http://c:1"])}
    engine = VLLMEngine(team.policies, sections, 1.0, tmp_path)
    inform(engine)
    inform(engine)
    assert opened == [("http://a:1", 51216, "cpu"), ("http://b:1", 51217, "cpu"), ("http://c:1", 51218, "cpu")]
    assert len(sent) == 6 and list(sent[0]) == [name for name, _ in team.policies["ann"].model.named_parameters()]
    assert sent[0]["model.embed_tokens.weight"] is team.policies["ann"].model.model.embed_tokens.weight


@pytest.mark.parametrize(
    "agents, message",
    [
        ({"ann": {"model": "org/m", "engine": "vllm"}}, "agents.ann.engine: vllm needs agents.ann.vllm, for example vllm: {urls: "),
        ({"ann": {"model": "org/m", "engine": "vllm", "vllm": {"urls": []}}}, r"expected either urls or colocate, got urls \[\]"),
        ({"ann": {"model": "org/m", "engine": "vllm", "vllm": {"urls": ["localhost:8000"]}}}, "expected http://HOST:PORT, got 'localhost:8000'"),
        ({"ann": {"tiny": {}, "engine": "vllm", "vllm": {"urls": ["http://h"]}}}, "a tiny model has no folder that vllm could serve"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be_served_are_refused(agents, message):
    with pytest.raises(ConfigError, match=message):
        config_of(agents)


# -- importance weights -------------------------------------------------------------------------------------------


def test_tokens_are_weighed_by_the_trainers_over_the_engines_probability():
    from trl_ext.ppo.batch import Completion, build_token_batch
    from trl_ext.ppo.losses import engine_gap, engine_weights

    answers = [
        Completion([5], [6, 7, 8], True, "a", sampled_logprobs=[-1.0, -2.0, -3.0]),
        Completion([5], [6], True, "b"),
    ]
    rows = build_token_batch(answers, "cpu")
    rows.old_logprobs = torch.tensor([[0, -1.0, -1.0, -3.5], [0, -4.0, 0, 0]])
    expected = [[1, 1, 2.0, 0.60653], [1, 1, 1, 1]]  # e^0, e^1 cut at 2, e^-0.5; the second row's engine is silent
    torch.testing.assert_close(engine_weights(rows, 2.0), torch.tensor(expected), atol=1e-5, rtol=0)
    assert engine_gap(rows) == pytest.approx([1.5, -0.5, 3.0])  # |0| + |1| + |-0.5|; 0 - 1 + 0.5


# -- the real server ----------------------------------------------------------------------------------------------


@pytest.fixture
def loaded():
    from transformers import AutoModelForCausalLM

    tokenizers = load_tokenizers(config_of({"ann": {"model": MODEL}}))
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16), tokenizers["ann"]


HAS_VLLM = importlib.util.find_spec("vllm") is not None
SERVED = pytest.param("server", marks=pytest.mark.skipif(not URL, reason="MAPORL_TEST_VLLM_URL names no vLLM server"))
COLOCATED = pytest.param(
    "colocated",
    marks=pytest.mark.skipif(
        not (HAS_VLLM and MODEL), reason="needs vLLM in this environment, and MAPORL_TEST_VLLM_MODEL"
    ),
)


NUMBER = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["number"],
    "additionalProperties": False,
}


@pytest.mark.vllm
@pytest.mark.skipif(not URL, reason="MAPORL_TEST_VLLM_URL names no vLLM server")
@pytest.mark.parametrize("form", [
    {"json_schema": NUMBER}, {"regex": "[0-9]{1,3} (apples|pears)[.]"}, {"grammar": 'start: "I say " /[0-9]/ ("," /[0-9]/)*'},
], ids=str)  # fmt: skip
def test_a_server_holds_completions_to_the_grammars_of_training(loaded, form):
    """With ``--structured-outputs-config.backend guidance``."""
    model, tokenizer = loaded
    grammar = Grammar(StructuredOutput(**form).text, (tokenizer.eos_token_id,))
    server = RemoteServer(URL, VLLMSection(urls=[URL]))
    prompt = tokenizer.encode("What is 3*4? Answer:", add_special_tokens=False)
    draw = Draw(24, 0.8, stop_ids=frozenset(grammar.stop_ids), grammar=grammar)
    held, free = [], []
    for said in server.sample([TokenRequest(server.base, prompt, draw, (number,)) for number in range(8)]):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + said.ids])).logits[0, len(prompt) - 1 : -1].float()
        masks = grammars_of(tokenizer, logits.shape[1]).replay([grammar], [said.ids])
        ids, there = torch.tensor(said.ids), torch.tensor(said.logprobs)
        held.append((maths.token_logprobs(logits, ids, 0.8, masks) - there).abs().mean())
        free.append((maths.token_logprobs(logits, ids, 0.8) - there).abs().mean())
    assert torch.stack(held).mean() < 0.1 and torch.stack(free).mean() > 1.0, "bfloat16 here and there"


@pytest.mark.vllm
@pytest.mark.parametrize("where", [SERVED, COLOCATED])
def test_two_adapters_train_and_vllm_has_the_trained_ones(loaded, tmp_path, where):
    model, tokenizer = loaded
    team = team_of(model, tokenizer)
    args = MultiAgentPPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, gradient_accumulation_steps=1, total_episodes=24,
        response_length=24, learning_rate=2e-3, value_learning_rate=1e-3, temperature=0.8, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, engine_tis_cap=2.0, lr_scheduler_type="constant",
    )  # fmt: skip
    policies = team.policies
    here = ColocateSection(max_model_len=1024, options={"enforce_eager": True})
    section = VLLMSection(urls=[URL], seeds=False) if where == "server" else VLLMSection(colocate=here, seeds=False)
    engine = VLLMEngine(policies, dict.fromkeys(policies, section), 0.8, tmp_path / "adapters")
    task = Arithmetic(operation="times", largest=9, template="What is {a}*{b}? Answer with just the number.")
    odd = {"label": lambda dialogues, task: [[float(len(u.text) % 2) for u in d.utterances] for d in dialogues]}
    own = {"sources": odd, "engines": {"vllm": TextEngine(policies, engine, 24)}}
    trainer = MultiAgentPPOTrainer(args, team, task, Debate(turns=2), None, RewardSection(), **own)
    trainer.train()
    records = trainer.run.read_metrics()
    assert len(records) == 3
    for record in records:
        for name in ("ann", "bob"):  # bfloat16 on both sides: kernels differ, weights do not
            assert 0 < record[f"{name}/policy/engine_gap"] < 0.2 and abs(record[f"{name}/policy/engine_kl"]) < 0.05
    print({k: v for k, v in records[-1].items() if "engine" in k or "time" in k})

    moved = {n: p.detach().abs().max() for n, p in team.policies["ann"].model.named_parameters() if "lora_B" in n}
    assert min(float(v) for v in moved.values()) > 1e-3, "both adapters have learned"
    prompt = tokenizer.encode("What is 3*4?", add_special_tokens=False)
    sampled = {}
    for name, policy in policies.items():
        server = engine._servers[engine._places[name][0]]
        [sampled[name]] = server.sample([TokenRequest(engine._model(name, server), prompt, Draw(16, 0.8))])
        ids = torch.tensor([prompt + sampled[name].ids])
        with torch.no_grad(), policy.active() as own:
            logits = own(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            here = maths.token_logprobs(logits, ids[0, len(prompt) :], 0.8)
            with policy.model.disable_adapter():
                untrained = own(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
            base = maths.token_logprobs(untrained, ids[0, len(prompt) :], 0.8)
        there = torch.tensor(sampled[name].logprobs)
        assert (here - there).abs().mean() < 0.1 < (base - there).abs().mean(), (
            "the trained adapter answers, not the base"
        )
    assert sampled["ann"].ids != sampled["bob"].ids


@pytest.mark.parametrize(
    "agent, gpu, package, message",
    [
        ({}, False, True, r"ann trains all its weights, which travel to http://127.0.0.1:1 .*this process has no GPU; give it a LoRA"),
        ({}, True, False, r"this process lacks the package vllm \(.*\); give it a LoRA \(agents.ann.lora\)"),
        ({}, True, True, None),
        ({"lora": {}}, False, False, None),
        ({"trainable": False}, False, False, None),
    ],
)  # fmt: skip
def test_whole_weights_that_cannot_travel_are_refused_before_a_model_loads(monkeypatch, agent, gpu, package, message):
    """The GPU and the package are pretended: neither is here."""
    section = {"model": "org/model", "engine": "vllm", "vllm": {"urls": ["http://127.0.0.1:1"]}, **agent}
    config = config_of({"ann": section, "bob": {"tiny": {}}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr("maporl.engines.choice.find_spec", lambda name: package or None)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        refuse(choice.check(ResolvedRun(config)))
