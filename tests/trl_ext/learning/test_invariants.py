"""No dropout, no noise: a first minibatch has ratio 1 and KL 0, or a run ends with the name of the layer that
differs."""

import copy

import pytest
import torch
from conformance import build
from fast_cases import some
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import dropout

from trl_ext import Learner, Policy, PPOv2Config, PPOv2Trainer
from trl_ext.learning.invariants import ForwardsDiffer
from trl_ext.models.randomness import evaluating, quiet, recomputes
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import Draw
from trl_ext.sampling.sample import generate
from trl_ext.trainer.ppov2 import Sampler


def reward(prompts, completions, completion_ids, **columns):
    return [sum(i % 5 for i in ids) / len(ids) for ids in completion_ids]


def trainer_of(model, tokenizer, tmp_path, sampler=None, value_model=None, **more):
    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "total_episodes": 8, "response_length": 6,
        "learning_rate": 0.0, "num_ppo_epochs": 1, "temperature": 1.0,
    }  # fmt: skip
    args = PPOv2Config(output_dir=str(tmp_path), report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, seed=3,
                       num_sample_generations=0, stop_token="none", **{**given, **more})  # fmt: skip
    rows = [{"prompt": f"{n}+1="} for n in range(8)]
    return PPOv2Trainer(
        args, tokenizer, model, train_dataset=rows, reward_funcs=reward, sampler=sampler, value_model=value_model
    )


RANDOM = {
    "llama": {"attention_dropout": 0.1},
    "seed_oss": {"residual_dropout": 0.1, "attention_dropout": 0.1},
    "gpt_bigcode": {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "bloom": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "falcon": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "phimoe": {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1},
    "opt": {"layerdrop": 0.5, "dropout": 0.1},
    "bart": {"decoder_layerdrop": 0.5, "dropout": 0.1, "activation_dropout": 0.1},
    "jamba": {"attention_dropout": 0.1},
    "gptj": {"attn_pdrop": 0.1, "resid_pdrop": 0.1},
}


@pytest.mark.parametrize("checkpointing", some([False, True], 1))
@pytest.mark.parametrize("kind", list(RANDOM))
def test_whatever_randomness_is_called_it_is_off_while_a_model_is_trained(kind, checkpointing, tmp_path, monkeypatch):
    monkeypatch.setitem(build.__globals__["MORE"], kind, {**build.__globals__["MORE"].get(kind, {}), **RANDOM[kind]})
    model, tokenizer = build(kind)
    options = {name: getattr(model.config, name) for name in RANDOM[kind]}
    trainer = trainer_of(model.train(), tokenizer, tmp_path, gradient_checkpointing=checkpointing, num_mini_batches=2)
    learner, seen = trainer.learners["policy"], []
    accumulate = learner.accumulate
    learner.accumulate = lambda *more: (seen.append(accumulate(*more)), seen[-1])[1]
    trainer.train()
    assert [measures["ratio"] for measures in seen] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert max(measures["approx_kl"] for measures in seen) < 1e-8
    assert recomputes(model) == checkpointing
    assert {name: getattr(model.config, name) for name in RANDOM[kind]} == options, "what is saved with the model stays"


def test_layers_recompute_in_training_mode_and_all_that_they_hold_is_in_evaluation_mode(tmp_path):
    model, tokenizer = build("llama")
    trainer_of(model, tokenizer, tmp_path, gradient_checkpointing=True)
    modes = {type(module).__name__: module.training for module in model.modules()}
    assert modes["LlamaDecoderLayer"] and not modes["LlamaAttention"] and not modes["LlamaMLP"] and not modes["Linear"]


def test_a_critics_own_adapter_has_no_dropout(tmp_path):
    model, tokenizer = build("llama")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, task_type="CAUSAL_LM"))
    args = PPOv2Config(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    Learner(Policy("p", model, tokenizer), args, critic="adapter")
    dropouts = {name: m for name, m in model.named_modules() if isinstance(m, nn.Dropout)}
    assert any("default_critic" in name for name in dropouts)
    assert all(m.p == 0.0 and not m.training for m in dropouts.values())


class Noisy(nn.Module):
    """A layer of a stranger's model that draws random numbers in evaluation mode too."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *arguments, **options):
        return dropout(self.inner(*arguments, **options), 0.2, training=True)


@pytest.mark.parametrize("rows", [4, 8])
def test_randomness_that_stays_on_ends_the_run_before_the_first_step_with_the_layers_name(rows, tmp_path):
    model, tokenizer = build("llama")
    model.model.layers[1].mlp = Noisy(model.model.layers[1].mlp)
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_of(model, tokenizer, tmp_path, learning_rate=1e-2, per_device_train_batch_size=rows,
                         gradient_accumulation_steps=8 // rows)  # fmt: skip
    sample = trainer._sampler.sample
    trainer._sampler.sample = lambda *given: [Sampled(row.ids, None) for row in sample(*given)]  # it tells nothing
    with pytest.raises(ForwardsDiffer, match=r"mean ratio .* expected 1 and 0 .*'model.layers.1.mlp' differs"):
        trainer.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Neighbours(nn.Module):
    """A layer whose output for a row depends on the other rows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden, *arguments, **options):
        output = self.inner(hidden, *arguments, **options)
        return output + (hidden.mean() if len(hidden) > 2 else 0.0)


def test_numbers_that_depend_on_the_rows_beside_are_an_error_that_says_so(tmp_path):
    model, tokenizer = build("llama")
    model.model.layers[1].mlp = Neighbours(model.model.layers[1].mlp)
    trainer = trainer_of(model, tokenizer, tmp_path, num_mini_batches=4)
    sample = trainer._sampler.sample
    trainer._sampler.sample = lambda *given: [Sampled(row.ids, None) for row in sample(*given)]
    with pytest.raises(ForwardsDiffer, match=r"numbers of a row depend on .*per_device_train_batch_size: 1"):
        trainer.train()


class Elsewhere(Sampler):
    """Samples from a model that is not the one that is trained, and says so honestly."""

    def attach(self, learner, args):
        self.other = copy.deepcopy(learner.model)
        with torch.no_grad():
            self.other.get_output_embeddings().weight.mul_(3)

    def submit(self, requests):
        from trl_ext.sampling.sample import sample

        return list(map(Ready, sample(self.other, requests)))


def test_samples_of_another_policy_end_the_first_update_with_its_name(tmp_path):
    model, tokenizer = build("llama")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), adapter_name="ann")
    with pytest.raises(ForwardsDiffer, match=r"policy 'policy', adapter 'ann': before any update, .* at most 0.1"):
        trainer_of(model, tokenizer, tmp_path, Elsewhere()).train()


def detach_states(model):
    plain = model.model.forward

    def cut(*arguments, **options):
        output = plain(*arguments, **options)
        output.last_hidden_state = output.last_hidden_state.detach()
        return output

    model.model.forward = cut


@pytest.mark.parametrize("warmup", [0, 1])
def test_most_parameters_without_a_gradient_are_an_error_once_the_policy_learns(tmp_path, warmup):
    model, tokenizer = build("llama")
    detach_states(model)
    trainer = trainer_of(model, tokenizer, tmp_path, critic_warmup=warmup, total_episodes=16)
    with pytest.raises(ForwardsDiffer, match=r"\d+ of \d+ parameters got no gradient"):
        trainer.train()
    assert trainer.state.global_step == warmup


def test_some_parameters_without_a_gradient_are_named(tmp_path, caplog):
    model, tokenizer = build("llama")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj", "k_proj"], task_type="CAUSAL_LM"))
    for layer in model.base_model.model.model.layers:  # as some Mambas do, it reads a weight past its layer
        layer.self_attn.k_proj.forward = layer.self_attn.k_proj.base_layer.forward
    trainer_of(model, tokenizer, tmp_path).train()
    assert "4 of 12 parameters got no gradient in the first minibatch" in caplog.text and "k_proj" in caplog.text


# -- what the user has set stays ----------------------------------------------------------------------------------


def test_sampling_gives_every_module_its_own_mode_back():
    model, _ = build("llama")
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    generate(model, [[3, 4]], Draw(2, 0.0))
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(RuntimeError, match="inside"), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_options_of_recomputation_stay_through_sampling(reentrant, tmp_path):
    model, tokenizer = build("llama")
    trainer = trainer_of(model, tokenizer, tmp_path, gradient_checkpointing=True,
                         gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # fmt: skip
    trainer.train()
    assert model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": reentrant}


def test_a_user_who_turned_recomputation_on_by_hand_keeps_it(tmp_path):
    model, tokenizer = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    called = []
    checkpoint = model.model.layers[0]._gradient_checkpointing_func
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = lambda *given: (called.append(1), checkpoint(*given))[1]
    trainer_of(model, tokenizer, tmp_path).train()
    assert called


def test_quiet_counts_probabilities_that_are_no_fractions():
    model = nn.Sequential(nn.Dropout(1), nn.Linear(2, 2))
    model[1].droppath_rate, model[1].drop_last, model[1].jitter_noise = 0.5, True, 0.01
    quiet(model)
    assert (model[0].p, model[1].droppath_rate, model[1].drop_last) == (0.0, 0.0, True)
    assert model[1].jitter_noise == 0.01, "in evaluation mode routers compare with it, without drawing"


def test_experts_that_a_small_minibatch_does_not_reach_are_no_fault(tmp_path, caplog):
    model, tokenizer = build("llama")
    model.model.layers[0].mlp.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(200))  # no row reaches one
    trainer_of(model, tokenizer, tmp_path).train()
    assert "400 of 421 parameters got no gradient" in caplog.text


def test_a_critic_whose_context_is_short_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    model, tokenizer = build("llama")
    short = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                        max_position_embeddings=6, num_labels=1, pad_token_id=0)  # fmt: skip
    with pytest.raises(ValueError, match="a row has 10 tokens, and it reads at most 6"):
        trainer_of(model, tokenizer, tmp_path, value_model=LlamaForSequenceClassification(short)).train()
