"""Weights in bfloat16 learn as float32 weights do: every strategy steps float32 master weights.

A weight of 0.02 has neighbours 1.2e-4 away in bfloat16. 50 steps of 1e-6 add up to 5e-5, so rounding after each step
loses all of them. ``docs/scaling.md`` has a table of the precision of everything.
"""

import importlib.util
import json
import os
import shutil

import half_precision
import pytest
import torch
from accelerate import Accelerator
from fast_cases import some
from folders import ROOT
from half_precision import learner_of, movement, rounding, rows_of, share, shares, take_steps, trained, weights
from launches import STRATEGIES, skip_unless_here, together
from one_policy import config
from safetensors.torch import load_file, save_file
from scripted_training import played
from transformers import LlamaConfig, LlamaForSequenceClassification

from maporl import Agent, Arithmetic, Team
from maporl.config.schema import WarmStartSection
from maporl.loops.sft import solutions, train_supervised
from maporl.loops.sft_options import SFTOptions
from maporl.playground.warm_start import warm_start
from maporl.protocols import build_protocol
from maporl.runs.build import build_player, build_trainer
from maporl.team.loading import load_agents, load_tokenizers
from maporl.types import Dialogue, Example, Grade, Utterance
from maporl.validation.load import from_dict
from maporl.verifier.cotraining import CoTraining
from maporl.verifier.model import Verifier
from maporl.verifier.section import VerifierSection
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.learning.checkpoint import Learners, load_checkpoint, load_learner, write_checkpoint
from trl_ext.learning.learner import Learner, check_mixed_precision
from trl_ext.learning.policy import Policy
from trl_ext.process import distributed
from trl_ext.sharding.holder import working_dtype
from trl_ext.sharding.master_weights import MasterAdamW


def write_whole_tensors(optimizer, folder, **more):
    """Write ``optimizer.safetensors`` and ``optimizer.json`` into ``folder``, which loses its folder ``optimizer``."""
    shutil.rmtree(folder / "optimizer")
    content, tensors, numbers = optimizer.state_dict(), {}, {}
    for index, entries in content["state"].items():
        for key, value in entries.items():
            where = tensors if isinstance(value, torch.Tensor) else numbers
            where[f"{index}.{key}"] = value
    save_file(tensors, folder / "optimizer.safetensors")
    record = {"numbers": numbers, "groups": content["param_groups"], **more}
    (folder / "optimizer.json").write_text(json.dumps(record))


HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
OPTIMIZERS = ["adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "paged_adamw_8bit"]
HALF = torch.bfloat16
TEAM = {
    "task": {"name": "toy_sum", "largest": 9}, "protocol": {"name": "debate", "turns": 2, "later": "{others};{question}", "quote": "{text}"},
    "ppo": {"response_length": 4, "kl_coef": 0.0}, "evaluation": {"questions": 0}, "reward": {"sources": {"near": 1.0}}, "updates": 3,
    "training": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "use_cpu": True, "learning_rate": 1e-6},
}  # fmt: skip


def base(tiny, folder, dtype=HALF):
    """A folder with a tiny model in ``dtype``, which a run loads in that dtype."""
    model, tokenizer = tiny(alphabet="0123456789+=;")
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# -- how far weights move -----------------------------------------------------------------------------------------


CASES = [("head", name) for name in OPTIMIZERS] + [(c, OPTIMIZERS[1]) for c in ("adapter", "model", "none")]
QUICK = {("adapter", OPTIMIZERS[1])}
"""The rest are left to ``make test-slow``."""


@pytest.mark.parametrize(
    "critic, optim",
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_small_steps_add_up_for_every_critic_and_optimizer(tmp_path, critic, optim):
    if optim.endswith("8bit") and not HAS_BITSANDBYTES:
        pytest.skip("needs bitsandbytes: pip install -e '.[dev]'")
    whole = movement(learner_of(torch.float32, critic, tmp_path, optim=optim), steps=20)
    learner = learner_of(HALF, critic, tmp_path, optim=optim)
    for part, found in shares(movement(learner, steps=20), whole).items():
        assert 0.8 < found < 1.2, part
    kept = rounding(learner)
    assert kept["wrong"] == [], "weights in memory are the rounded master weights"
    for part in ("model", "value_model") if critic == "model" else ("model",):
        assert kept["dtypes"][part] == ["bfloat16"]
    assert kept["dtypes"].get("head", ["float32"]) == ["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_small_steps_add_up_and_are_resumed_under_every_strategy(tmp_path, name):
    skip_unless_here(name)
    variables = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "HALF_STEPS": "10"}
    worker = [half_precision.__file__, "head,adapter,model", tmp_path]
    done = together(worker, {**os.environ, **variables, **STRATEGIES[name]}, limit=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    for critic, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found["strategy"] == name.split("-")[0]
        for part, value in found["shares"].items():
            assert 0.8 < value < 1.2, (critic, part)
        assert found["wrong"] == []
        first, second = found["states"]
        assert first > 0 and (second == 0 if name == "Holder" else second == pytest.approx(first, rel=0.1)), (
            "each process writes what it holds of the optimizer's state"
        )
        for after in found["nan"]:
            assert "no step was taken" in after["refused"] and after["changed"] == [], critic
        assert found["lost"] == [], "a resumed run goes on with the master weights"
        assert found["dtypes"]["model"] == ["bfloat16"]
        assert found["dtypes"]["head"] == ["bfloat16" if name == "Zero-3" else "float32"]


def test_a_team_of_bfloat16_models_learns_by_the_trainers_own_steps(tiny, tmp_path):
    """Playing, scoring and updating move bfloat16 weights as far as float32 weights, which move one rate a step."""
    values = TEAM | {"output_dir": str(tmp_path / "run"), "agents": {"ann": {"model": base(tiny, tmp_path / "base")}}}
    trainer = build_trainer(from_dict(values, "test"), quiet=True)
    learner = trainer.learners["ann"]
    before = weights(learner)
    trainer.train()
    moved = torch.cat(
        [
            (after.float() - before[n].float()).flatten()
            for n, after in trained(learner).items()
            if n.startswith("model")
        ]
    )
    # the rate falls linearly: 4 steps of 1e-6, 4 of 2/3e-6, 4 of 1/3e-6
    assert 0.5 * 8e-6 < float(moved.abs().mean()) < 1.1 * 8e-6
    assert rounding(learner)["wrong"] == []
    trainer.save_model(str(tmp_path / "final"))
    assert {value.dtype for value in load_file(tmp_path / "final/ann/model.safetensors").values()} == {HALF}


@pytest.mark.parametrize("dtype", [HALF, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_adapters_answer_after_they_were_loaded_as_in_the_run_that_trained_them(tiny, tmp_path, dtype):
    """PEFT reads adapters in float32, and a run computes with them in their base's dtype."""
    folder, ids = base(tiny, tmp_path / "base", dtype), torch.tensor([[3, 4, 5, 6]])
    agents = {name: {"model": folder, "lora": {"r": 4}} for name in ("ann", "bob")}
    training = {**TEAM["training"], "learning_rate": 1e-2}
    config = from_dict(TEAM | {"output_dir": str(tmp_path / "run"), "agents": agents, "training": training}, "test")
    trainer = build_trainer(config, quiet=True)
    trainer.train()

    def logits(team):
        found = []
        for policy in team.policies.values():
            policy.model.eval()
            with torch.no_grad(), policy.active() as model:
                found.append(model(ids).logits)
        return torch.stack(found)

    measured = logits(trainer.parts.team)
    untrained = build_player(config).team
    assert not torch.equal(logits(untrained), measured)
    for loaded in (build_player(config, tmp_path / "run/final").team, Team.from_pretrained(tmp_path / "run")):
        assert torch.equal(logits(loaded), measured)
        loaded.save(tmp_path / "again")  # and what was loaded can be saved
        assert torch.equal(logits(Team.from_pretrained(tmp_path / "again")), measured)
        shutil.rmtree(tmp_path / "again")


def test_gradients_of_micro_batches_add_up_in_float32(tmp_path):
    learner = learner_of(HALF, "head", tmp_path)
    rows = rows_of(learner)
    learner.accumulate(rows, torch.arange(4))  # two micro-batches
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    together = [master.grad.clone() for master in learner.optimizer.masters.values()]
    assert {gradient.dtype for gradient in together} == {torch.float32}
    again = learner_of(HALF, "head", tmp_path, per_device_train_batch_size=4)
    again.accumulate(rows_of(again), torch.arange(4))
    own, other = (
        torch.cat([g.flatten() for g in found])
        for found in (together, [m.grad for m in again.optimizer.masters.values()])
    )
    assert float((own - other).norm() / other.norm()) < 0.02


def test_a_warm_starts_gradients_do_not_enter_the_first_step(tiny, tmp_path):
    model, tokenizer = tiny()
    model.to(HALF)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    args = PPOv2Config(output_dir=str(tmp_path), use_cpu=True, report_to=[], kl_coef=0.0)
    learner = Learner(Policy("policy", model, tokenizer), args)
    learner.prepare(Accelerator(cpu=True), 1)
    assert learner.step() == 0.0


def test_an_optimizer_that_is_passed_steps_master_weights_too(tiny, tmp_path):
    model, tokenizer = tiny(alphabet="0123456789+=;")
    optimizer = torch.optim.AdamW(model.to(HALF).parameters(), lr=1e-6)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    # the trainer makes a value head itself, which this optimizer could not step
    args = config(tmp_path, total_episodes=8, gradient_accumulation_steps=1, critic="none")
    questions = [{"prompt": f"{a}+1="} for a in range(8)]
    parts = (args, tokenizer, model)
    data = {"train_dataset": questions, "reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    trainer = PPOv2Trainer(*parts, **data, optimizers=(optimizer, schedule))
    assert {p.dtype for group in trainer.optimizer.param_groups for p in group["params"]} == {torch.float32}
    used = torch.optim.Adagrad(model.parameters(), lr=1e-6)
    with pytest.raises(ValueError, match=r"has made steps already, or keeps a state from its start"):
        PPOv2Trainer(*parts, **data, optimizers=(used, None))


# -- everything else that trains weights --------------------------------------------------------------------------


def moved_by(train, tiny):
    """The movement of a tiny model's weights by ``train(model, tokenizer)``, as float32 and as bfloat16 weights."""
    found = []
    for dtype in (torch.float32, HALF):
        torch.manual_seed(0)
        model, tokenizer = tiny(alphabet="0123456789+=;")
        model.to(dtype)
        before = {name: value.detach().float().clone() for name, value in model.named_parameters()}
        train(model, tokenizer)
        assert {value.dtype for value in model.parameters()} == {dtype}
        found.append({name: value.detach().float() - before[name] for name, value in model.named_parameters()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", ["supervised", "warm start"])
def test_supervised_training_and_a_warm_start_move_bfloat16_weights_as_far(tiny, tmp_path, how):
    """100 steps of up to 1e-5; bfloat16 weights that are stepped themselves moved 26%."""
    task, protocol = Arithmetic(largest=9), build_protocol(TEAM["protocol"], ("ann",))

    def train(model, tokenizer):
        team = Team([Agent("ann", model, tokenizer)])
        if how == "warm start":
            section = WarmStartSection(steps=100, batch_size=8, learning_rate=1e-5)
            warm_start(team, task, protocol, section, seed=0, quiet=True)
        else:
            config = from_dict(TEAM | {"output_dir": "x", "agents": {"ann": {"tiny": {}}}})
            options = SFTOptions(epochs=8, batch_size=8, learning_rate=1e-5)
            rows = solutions(team, task, "{question}", 100)
            train_supervised(config, team, rows, tmp_path / str(model.dtype), options, quiet=True)

    whole, half = moved_by(train, tiny)
    assert 0.8 < share(half, whole) < 1.2


def adamw_steps(dtype, steps, kind=MasterAdamW, resumed_at=None):
    """Weights and optimizer after ``steps`` with random gradients, or with a new optimizer after ``resumed_at``."""
    weight, options = torch.nn.Parameter(torch.full((64,), 0.1, dtype=dtype)), {"lr": 1e-5, "weight_decay": 0.0}
    optimizer, generator = kind([weight], **options), torch.Generator().manual_seed(0)
    for step in range(steps):
        if step == resumed_at:
            state = optimizer.state_dict()
            optimizer = kind([weight], **options)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        weight.grad = (0.2 + torch.randn(64, generator=generator)).to(dtype)
        optimizer.step()
    return weight.detach().float() - torch.full((64,), 0.1, dtype=dtype).float(), optimizer.state_dict()["state"][0]


def test_master_adamw_steps_as_adamw_does_and_resumes_bit_by_bit():
    """200 steps of 1e-5 around 0.1, where bfloat16 numbers are 4.9e-4 apart: AdamW itself does not move them at all."""
    plain, _ = adamw_steps(torch.float32, 200, torch.optim.AdamW)
    assert torch.equal(adamw_steps(torch.float32, 200)[0], plain)
    assert float(adamw_steps(HALF, 200, torch.optim.AdamW)[0].abs().max()) == 0.0
    _, whole = adamw_steps(HALF, 200)
    assert torch.allclose(whole["master"] - torch.tensor(0.1, dtype=HALF).float(), plain, atol=2e-5)
    _, resumed = adamw_steps(HALF, 200, resumed_at=77)
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items()) and len(whole) == 4


def test_a_bfloat16_verifier_that_keeps_learning_steps_master_weights_and_resumes_with_them(tiny, tmp_path):
    _, tokenizer = tiny(alphabet="0123456789+=")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    answers = [
        Utterance(n, "ann", "ann", 0, 0, [], text, grade=Grade(text, right, ""))
        for n, (text, right) in enumerate([("4", True), ("7", False)])
    ]
    dialogue = Dialogue(Example("a", "2+2=", "4"), answers)
    ends, section = [], VerifierSection("here", learn_every=1, learning_rate=1e-5)
    for dtype, interrupted in ((torch.float32, ""), (HALF, ""), (HALF, "now"), (HALF, "before")):
        torch.manual_seed(0)
        learning = CoTraining(Verifier(LlamaForSequenceClassification(config).to(dtype), tokenizer, "here"), section)
        for update in range(20):
            if interrupted and update == 10:
                learning.save(tmp_path / interrupted)
                if interrupted == "before":
                    record = {key: getattr(learning, key) for key in ("pairs", "rounds", "round", "new")}
                    write_whole_tensors(learning.optimizer, tmp_path / interrupted, **record)
                learning = CoTraining(
                    Verifier(LlamaForSequenceClassification(config).to(dtype), tokenizer, "here"), section
                )
                learning.load(tmp_path / interrupted)
            learning.after_update(update, [dialogue], Arithmetic(largest=4))
        stepped = [p for group in learning.optimizer.param_groups for p in group["params"]]
        assert {p.dtype for p in learning.verifier.model.parameters()} == {dtype}
        ends.append(torch.cat([p.detach().flatten() for p in stepped]))
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in LlamaForSequenceClassification(config).parameters()])
    moved = {"whole": ends[0] - start}, {"whole": ends[1] - start.to(HALF).float()}
    assert 0.8 < share(moved[1], moved[0]) < 1.2
    assert torch.equal(ends[1], ends[2]) and torch.equal(ends[1], ends[3]), "also from whole tensors of older versions"


def test_a_small_adapter_of_a_bfloat16_base_speaks_in_rollouts(tiny, tmp_path):
    """Added to the weights it would vanish: the neighbours of 1 are 0.004 away, and each weight moves by 0.0015.

    The hidden states are about 1 everywhere, so the 64 small changes of a token's weights add up to 0.096 in its logit.
    """
    model, tokenizer = tiny(alphabet="0123456789+=;")
    with torch.no_grad():
        model.model.embed_tokens.weight += 3.0
        model.lm_head.weight.fill_(1.0)[:, ::2] = -1.0
    folder = str(tmp_path / "base")
    model.to(HALF).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    agent = {"model": folder, "lora": {"r": 1, "alpha": 1, "target_modules": ["lm_head"]}}
    values = TEAM | {"output_dir": str(tmp_path / "run"), "agents": {"ann": agent}}
    trainer = build_trainer(from_dict(values), quiet=True)
    lora = trainer.team.policies["ann"].model.get_base_model().lm_head
    with torch.no_grad():
        lora.lora_A["ann"].weight.fill_(1.0)
        lora.lora_B["ann"].weight.fill_(0.0015)[::2] *= -1.0
    (rows,) = played(trainer).token_batches.values()
    sampled, learned = (logprobs[rows.sampled_mask] for logprobs in (rows.sampler_logprobs, rows.old_logprobs))
    base = trainer.learners["ann"].reference_logprobs(rows)
    assert float((learned - base).abs().mean()) > 0.06, "the adapter changes the probabilities"
    assert float((sampled - learned).abs().mean()) < 0.02


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_tiny_models_have_the_precision_that_is_asked_for(architecture):
    tiny_section = {"architecture": architecture, "hidden_size": 32, "layers": 1}
    found = {}
    for dtype in ("auto", "float32", "bfloat16", "float16"):
        config = from_dict(TEAM | {"output_dir": "x", "agents": {"ann": {"tiny": tiny_section, "dtype": dtype}}})
        torch.manual_seed(0)
        [agent] = load_agents(config, load_tokenizers(config))
        found[dtype] = dict(agent.model.named_parameters())
        assert {buffer.dtype for buffer in agent.model.buffers() if buffer.is_floating_point()} == {torch.float32}
    for name, exact in found["auto"].items():
        assert torch.equal(exact, found["float32"][name]) and exact.dtype == torch.float32
        for dtype in ("bfloat16", "float16"):
            assert torch.equal(found[dtype][name], exact.to(getattr(torch, dtype))), name


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", some(["head", "adapter", "model"], 1))
def test_a_resumed_run_is_bit_identical(tmp_path, critic):
    ends = []
    for interrupted in (False, True):
        learner = learner_of(HALF, critic, tmp_path)
        take_steps(learner, 3)
        if interrupted:
            write_checkpoint(tmp_path / "checkpoint-1", Learners(policy=learner), {})
            learner = learner_of(HALF, critic, tmp_path)
            load_checkpoint(tmp_path / "checkpoint-1", Learners(policy=learner))
        take_steps(learner, 3)
        ends.append(trained(learner))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items()) and len(ends[0]) > 4


@pytest.mark.parametrize("critic", ["head", "adapter", "model", "none"])
def test_a_policys_folder_has_no_weights_but_its_own(tmp_path, critic):
    """vLLM loads all of these files beside a model's ``config.json``, and refuses tensors that the model lacks."""
    learner = learner_of(HALF, critic, tmp_path)
    take_steps(learner, 1)
    write_checkpoint(tmp_path / "checkpoint-1", Learners(policy=learner), {})
    learner.save(tmp_path / "final")
    for folder in (tmp_path / "checkpoint-1/policies/policy", tmp_path / "final"):
        weights = [path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pth")]
        assert weights == ["adapter_model.safetensors" if critic == "adapter" else "model.safetensors"]
        assert (folder / "critic").is_dir() == (critic != "none")


@pytest.mark.parametrize("dtype", some([torch.float32, HALF], 1))
@pytest.mark.parametrize("critic", ["adapter", "model"])
def test_whole_tensors_of_an_older_optimizer_are_read(tmp_path, critic, dtype):
    """Versions before wrote the state by the index of its parameter, into the policy's folder ``optimizer``."""
    learner = learner_of(dtype, critic, tmp_path)
    take_steps(learner, 2)
    write_checkpoint(tmp_path / "checkpoint-1", Learners(policy=learner), {})
    folder = tmp_path / "checkpoint-1/policies/policy"
    write_whole_tensors(learner.optimizer, folder, scheduler=learner.scheduler.state_dict())
    (folder / "optimizer").mkdir()
    for name in ("optimizer.json", "optimizer.safetensors"):
        (folder / name).rename(folder / "optimizer" / name)
    other = learner_of(dtype, critic, tmp_path)
    load_learner(other, folder)
    ends = []
    for goes_on in (learner, other):
        take_steps(goes_on, 2)
        ends.append(trained(goes_on))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items()) and len(ends[0]) > 4


def test_a_checkpoint_without_master_weights_goes_on_from_its_weights(tmp_path):
    """Before there were shards, bfloat16 weights were stepped without copies in float32."""
    learner = learner_of(HALF, "model", tmp_path, value_learning_rate=3e-6)
    take_steps(learner, 2)
    write_checkpoint(tmp_path / "checkpoint-1", Learners(policy=learner), {})
    folder = tmp_path / "checkpoint-1/policies/policy"
    write_whole_tensors(learner.optimizer, folder, scheduler=learner.scheduler.state_dict())
    tensors = load_file(folder / "optimizer.safetensors")
    save_file(
        {n: v.to(HALF) if v.dim() else v for n, v in tensors.items() if not n.endswith(".master")},
        folder / "optimizer.safetensors",
    )
    other = learner_of(HALF, "model", tmp_path, value_learning_rate=3e-6)
    load_learner(other, folder)
    for name, exact in trained(other).items():
        assert torch.equal(exact, weights(learner)[name].float()), name
    moments = [v for entries in other.optimizer.state.values() for key, v in entries.items() if key != "step"]
    assert {value.dtype for value in moments} == {torch.float32}
    assert [group["lr"] for group in other.optimizer.param_groups] == [1e-6, 3e-6, 3e-6]
    assert other.scheduler.base_lrs == [1e-6, 3e-6, 3e-6]
    take_steps(other, 1)


# -- mixed precision ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mixed_precision_computes_in_bfloat16_when_sampling_and_training(tiny, tmp_path):
    values = TEAM | {
        "output_dir": str(tmp_path / "run"),
        "agents": {"ann": {"model": base(tiny, tmp_path / "base", torch.float32)}},
    }
    values["training"] = values["training"] | {"bf16": True}
    trainer = build_trainer(from_dict(values, "test"), quiet=True)
    learner, seen = trainer.learners["ann"], {}
    head = learner.model.get_output_embeddings()
    head.register_forward_hook(
        lambda module, inputs, output: seen.setdefault(torch.is_grad_enabled(), set()).add(output.dtype)
    )
    trainer.train()
    assert seen == {False: {HALF}, True: {HALF}}, "without gradients it samples, with gradients it trains"
    assert {value.dtype for value in weights(learner).values()} == {torch.float32}
    assert learner.optimizer.masters == {}


@pytest.mark.parametrize("given", ["fp16", "fp8"])
def test_other_mixed_precision_is_refused(given):
    assert check_mixed_precision("bf16") and not check_mixed_precision("no")
    with pytest.raises(ValueError, match=f"mixed_precision: expected 'no' or 'bf16', got '{given}'"):
        check_mixed_precision(given)


def test_dtypes_that_cannot_be_sharded_are_refused():
    half, whole, sixteen = (torch.nn.Parameter(torch.ones(2, dtype=d)) for d in (HALF, torch.float32, torch.float16))
    head = torch.nn.Linear(2, 1)
    assert working_dtype(head, [half, *head.parameters()]) == HALF
    assert working_dtype(None, [whole]) == torch.float32
    for parameters, names in ([[half, whole], "bfloat16 and float32"], [[sixteen], "float16"]):
        with pytest.raises(distributed.WorldError, match=f"the trained weights are in {names}; with DeepSpeed or FSDP"):
            working_dtype(head, [*parameters, *head.parameters()])


def test_a_second_learner_of_the_same_weights_learns_too(tmp_path):
    """A warm start and a run, or two runs of a script, train the same model one after the other."""
    first = learner_of(HALF, "none", tmp_path)
    take_steps(first, 1)
    second = Learner(Policy("policy", first.model, first.tokenizer), first.args, critic="none")
    second.prepare(Accelerator(cpu=True), 1)
    before = trained(second)
    take_steps(second, 1)
    assert all(not torch.equal(value, before[name]) for name, value in trained(second).items())
