"""Teams that cannot be: the agents, and the words of the refusal."""

import peft
import pytest
from peft import LoraConfig, get_peft_model

from maporl import Agent, Team

LORA = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def beside(model, tokenizer):
    """Two adapters of one base, of which the first has tokens of its own."""
    shared = get_peft_model(model, LoraConfig(trainable_token_indices=[3], **LORA), adapter_name="ann")
    shared.add_adapter("bob", LoraConfig(**LORA))
    return [Agent(name, shared, tokenizer, adapter=name) for name in ("ann", "bob")]


def without_template(model, tokenizer):
    tokenizer.chat_template = None
    return [Agent("ann", model, tokenizer)]


REFUSED = {
    "a name twice": (lambda m, t, o: [Agent("ann", m, t), Agent("ann", m, t)], "agents with different names"),
    "a model twice": (lambda m, t, o: [Agent("ann", m, t), Agent("bob", m, t)], "bring the same weights; give their agents one policy name"),
    # get_peft_model changes the base, so the base would speak with the adapter, and would not be trained
    "an adapter and its base": (lambda m, t, o: [Agent("ann", m, t), Agent("bob", get_peft_model(m, LoraConfig(**LORA)), t)],
     "policy 'ann' and policy 'bob' have the same weights; load the model once"),
    "no model": (lambda m, t, o: [Agent("ann")], "agent 'ann': pass a model and its tokenizer"),
    "no template": (lambda m, t, o: without_template(m, t), "agent 'ann': the tokenizer has no chat template"),
    "no adapter": (lambda m, t, o: [Agent("ann", m, t, adapter="ann")], "agent 'ann': no adapter 'ann'; the model has none: pass a PeftModel"),
    "mixed adapters": (lambda m, t, o: [Agent("ann", peft.PeftMixedModel(m, LoraConfig(**LORA)), t)], "mixed adapters are not supported"),
    "adapters that cannot be saved": (lambda m, t, o: beside(m, t), "adapter 'bob' could not be saved beside 'ann': PEFT asks for"),
    "turns with two tokenizers": (lambda m, t, o: [Agent("ann", by_turn=(Agent("a", m, t), Agent("b", *o)))], "the very same tokenizer"),
    **{name: (lambda m, t, o, name=name: [Agent("ann", None, None, policy=name)], "its name holds a slash") for name in ("x/..", "/elsewhere/x", "org/model")},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_team_that_cannot_be_is_refused(tiny, case):
    agents, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Team(agents(*tiny(), tiny(seed=1)))


def test_adapters_of_two_loads_of_a_model_are_a_team(tiny):
    adapted, tokenizer = tiny(seed=1)
    Team([Agent("ann", *tiny()), Agent("bob", get_peft_model(adapted, LoraConfig(**LORA)), tokenizer)])
