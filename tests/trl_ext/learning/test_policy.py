"""A policy: which adapter of a shared base is on, and what learns then (trl_ext/learning/policy.py)."""

from peft import LoraConfig, get_peft_model

from trl_ext.learning.policy import Policy
from trl_ext.models.adapters import adapter_parameters


def test_what_is_frozen_or_learns_stays_so_when_another_policy_of_the_base_has_spoken(tiny):
    model, tokenizer = tiny()
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    shared = get_peft_model(model, lora, adapter_name="ann")
    shared.add_adapter("bob", lora)
    ann, bob = (Policy(name, shared, tokenizer, name) for name in ("ann", "bob"))
    frozen, *trained = ann.parameters().values()
    assert len(trained) == 3 and trained == list(adapter_parameters(shared, "ann").values())[1:]
    frozen.requires_grad_(False)
    ann.keep_frozen()
    ann.let_learn([*trained, head := next(iter(bob.parameters().values()))])
    for _ in range(2):
        with bob.active():
            assert not any(p.requires_grad for p in ann.parameters().values())
        with ann.active():
            assert [p.requires_grad for p in (frozen, *trained, head)] == [False, True, True, True, True]
