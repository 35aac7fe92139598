"""What cannot be saved is refused before anything is sampled, and not at the first checkpoint."""

import pytest
from peft import LoraConfig, get_peft_model

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team
from trl_ext import PPOv2Config, PPOv2Trainer

OPTIONS = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "total_episodes": 4, "response_length": 3}


def ppo(tiny, folder, before=lambda model, tokenizer: None, value=None, lora=False):
    model, tokenizer = tiny(hidden_size=32, layers=1)
    before(model, tokenizer)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")) if lora else model
    args = PPOv2Config(output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=1, **OPTIONS)
    rows = [{"prompt": f"{i}+1="} for i in range(4)]
    parts = {"train_dataset": rows, "reward_funcs": lambda completions: [1.0] * 4, "value_model": value}
    return PPOv2Trainer(args, tokenizer, model, **parts)


def warm(model, tokenizer=None):
    model.config.temperature = 0.6


def greedy(model, tokenizer=None):
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.6
    return model


def unsavable(model, tokenizer):
    def fail(*arguments, **options):
        raise NotImplementedError("this tokenizer has no files")

    tokenizer.save_pretrained = fail


CASES = {
    "a policy's config": (r"policy 'policy' cannot be saved, .* generation parameters are set in the model config", warm, False),
    "a policy's generation": (r"^model: its generation configuration could not be saved .*temperature", greedy, False),
    "a tokenizer": (r"policy 'policy' cannot be saved, .* this tokenizer has no files; correct its config", unsavable, False),
    "a tokenizer of an adapter": (r"policy 'policy' cannot be saved, .* this tokenizer has no files", unsavable, True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_policy_that_cannot_be_saved_is_refused(name, tiny, tmp_path):
    message, before, lora = CASES[name]
    with pytest.raises(ValueError, match=message):
        ppo(tiny, tmp_path / "run", before, lora=lora)


def test_a_value_model_that_cannot_be_saved_is_refused_and_a_plain_one_is_saved(tiny, tmp_path):
    message = r"^the value model of policy 'policy' cannot be saved, .* `temperature`.*; correct .* generation_config"
    with pytest.raises(ValueError, match=message):
        ppo(tiny, tmp_path / "run", value=greedy(tiny("qwen3", hidden_size=32, layers=1)[0]))
    trainer = ppo(tiny, tmp_path / "run", value=tiny("qwen3", hidden_size=32, layers=1)[0])
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved/critic").is_dir()


def test_the_base_of_an_adapter_is_not_saved_and_may_be_as_it_is(tiny, tmp_path):
    ppo(tiny, tmp_path / "run", warm, lora=True).train()


def test_an_agent_that_cannot_be_saved_is_refused_by_its_name(tiny, tmp_path):
    model, tokenizer = tiny(hidden_size=32, layers=1)
    warm(model)
    team = Team([Agent("ann", *tiny(seed=1, hidden_size=32, layers=1)), Agent("bob", model, tokenizer)])
    args = MultiAgentPPOConfig(output_dir=str(tmp_path / "run"), per_device_train_batch_size=2, **OPTIONS)
    with pytest.raises(ValueError, match=r"^policy 'bob' cannot be saved, so the first checkpoint would fail: "):
        MultiAgentPPOTrainer(args, team, Arithmetic(largest=9), Debate(turns=1))
