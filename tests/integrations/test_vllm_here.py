"""vLLM in the trainer's process, with a real vLLM on a CPU or a GPU: tiny models start in seconds, and no server is
needed.

``make test-vllm`` runs these tests where vLLM is installed beside maporl.
"""

import importlib.util

import pytest
import torch
from peft import LoraConfig, get_peft_model
from vllm_engines import (
    EXACT,
    HERE,
    move,
    saved,  # noqa: F401  # fixtures
)

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection, Team
from maporl.engines.text import TextEngine
from maporl.integrations.vllm.checks import PROBE
from maporl.integrations.vllm.engine import VLLMEngine
from maporl.integrations.vllm.section import VLLMSection
from maporl.integrations.vllm.server import VLLMFailure
from trl_ext.ppo import maths
from trl_ext.sampling.request import Draw, TokenRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment"),
]
SECTION = VLLMSection(colocate=HERE, seeds=False)  # the CPU build of vLLM crashes on requests with seeds


def started(team, tmp_path):
    team.find_stop_ids(MultiAgentPPOConfig(output_dir="unused", report_to=[]))
    engine = VLLMEngine(team.policies, dict.fromkeys(team.policies, SECTION), 0.8, tmp_path / "adapters")
    for name in team.policies:
        engine.sync(name, 0)
    return engine


def gap(engine, name):
    """The largest distance in nats between vLLM's log-probabilities of its own completion and those of the policy
    here."""
    policy = engine.policies[name]
    prompt = policy.tokenizer.encode(PROBE, add_special_tokens=False)  # longer than a block of cached prefixes
    [sampled] = engine.sample([TokenRequest(name, prompt, Draw(24, 0.8))])
    ids = torch.tensor([prompt + sampled.ids])
    with torch.no_grad(), policy.active() as own:
        logits = own(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    here = maths.token_logprobs(logits, ids[0, len(prompt) :], 0.8)
    return float((here - torch.tensor(sampled.logprobs)).abs().max())


@pytest.mark.parametrize("tie", [False, True])
def test_whole_weights_arrive_and_old_prefixes_are_forgotten(saved, tmp_path, tie):
    team = Team([Agent("ann", *saved(0, tie), engine="vllm")])
    engine = started(team, tmp_path)
    assert gap(engine, "ann") < EXACT and gap(engine, "ann") < EXACT  # the second time from the cached prefix
    for number in (1, 2):
        move(team.policies["ann"].model, number)
        assert gap(engine, "ann") > 0.5, "without sync, vLLM answers with the old weights"
        engine.sync("ann", 1)
        assert gap(engine, "ann") < EXACT


def test_agents_with_bases_of_their_own_and_adapters_on_one_base_have_their_own_weights(saved, tmp_path):
    base, tokenizer = saved(3)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    shared = get_peft_model(base, lora, adapter_name="cat", autocast_adapter_dtype=False)
    shared.add_adapter("dan", lora, autocast_adapter_dtype=False)
    whole = [Agent(name, *saved(seed), engine="vllm") for seed, name in enumerate(("ann", "bob"))]
    team = Team([*whole, *(Agent(name, shared, tokenizer, adapter=name, engine="vllm") for name in ("cat", "dan"))])
    engine = started(team, tmp_path)
    assert {name: gap(engine, name) < EXACT for name in team.policies} == dict.fromkeys(team.policies, True)
    for number, policy in enumerate(team.policies.values()):
        trained = [
            p for n, p in policy.model.named_parameters() if policy.adapter is None or f".{policy.adapter}." in n
        ]
        move(torch.nn.ParameterList(trained), 10 + number)
        engine.sync(policy.name, 1)
    assert {name: gap(engine, name) < EXACT for name in team.policies} == dict.fromkeys(team.policies, True)


def test_a_vllm_that_keeps_the_old_weights_is_found_out(saved, tmp_path, monkeypatch):
    team = Team([Agent("ann", *saved(0), engine="vllm")])
    engine = started(team, tmp_path)
    [(server, _)] = engine._here
    monkeypatch.setattr(server._llm, "collective_rpc", lambda *arguments, **options: [None])
    with torch.no_grad():
        team.policies["ann"].model.get_input_embeddings().weight[5, 0] += 1e-6
    with pytest.raises(VLLMFailure, match=r"weights of policy 'ann', and holds other ones: model.embed_tokens"):
        engine.sync("ann", 1)


def test_short_completions_are_there_before_long_ones(saved, tmp_path):
    """Requests join while others run, so that a dialogue does not wait for the slowest of its turn."""
    team = Team([Agent("ann", *saved(0), engine="vllm")])
    engine = started(team, tmp_path)
    prompt = team.policies["ann"].tokenizer.encode("1+1", add_special_tokens=False)
    [long] = engine.submit([TokenRequest("ann", prompt, Draw(40))])
    engine.advance()
    short = engine.sample([TokenRequest("ann", prompt, Draw(2))])
    assert len(short[0].ids) <= 2 and not long.done()
    while engine.advance():
        pass
    assert 2 < len(long.result().ids) <= 40
    engine.submit([TokenRequest("ann", prompt, Draw(2))])
    engine.release()
    assert not engine.advance(), "what is left is given up"


def test_a_team_trains_all_its_weights_with_vllm_in_its_process(saved, tmp_path):
    team = Team([Agent(name, *saved(seed), engine="vllm") for seed, name in enumerate(("ann", "bob"))])
    args = MultiAgentPPOConfig(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=8, gradient_accumulation_steps=1, total_episodes=24,
        response_length=8, learning_rate=3e-3, temperature=0.8, report_to=[], save_strategy="no", disable_tqdm=True,
        lr_scheduler_type="constant",
    )  # fmt: skip
    engine = VLLMEngine(team.policies, dict.fromkeys(team.policies, SECTION), 0.8, tmp_path / "adapters")
    task = Arithmetic(operation="sum", largest=9, template="{a}+{b}=")
    odd = {"label": lambda dialogues, task: [[float(len(u.text) % 2) for u in d.utterances] for d in dialogues]}
    before = {name: [p.detach().clone() for p in policy.model.parameters()] for name, policy in team.policies.items()}
    own = {"sources": odd, "engines": {"vllm": TextEngine(team.policies, engine, 8)}}
    trainer = MultiAgentPPOTrainer(args, team, task, Debate(turns=1), None, RewardSection(), **own)
    trainer.train()
    records = trainer.run.read_metrics()
    assert len(records) == 3
    for name, policy in team.policies.items():
        moved = [
            float((a - b).detach().abs().max()) for a, b in zip(policy.model.parameters(), before[name], strict=True)
        ]
        assert max(moved) > 1e-3
        assert all(record[f"{name}/policy/engine_gap"] < EXACT for record in records)
