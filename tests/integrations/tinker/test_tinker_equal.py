"""Training on a service is training here: three updates of a two-policy team end with the same weights."""

import json

import pytest
from tinker_runs import difference, final_of, on, train_here, trainer_of, values_of

pytest_plugins = ["tinker_runs"]

PPO = {"num_ppo_epochs": 2, "num_mini_batches": 2, "cliprange": 0.05}
OBJECTIVES = {
    "clipped": {"ppo": PPO},
    "dis": {"ppo": {"objective": "dis", "ratio_to": "sampler", "num_ppo_epochs": 2}},
    "sequence ratio": {"ppo": {"ratio": "sequence", "aggregation": "sequence_mean", **PPO}},
    "reinforce": {"ppo": {"objective": "reinforce", "num_ppo_epochs": 1}},
    "kl in the loss": {"ppo": {"kl_coef": 0.2, "kl_in": "loss", "kl_estimator": "k3", **PPO}},
    "one each": {"agents": {
        "ann": {"algorithm": {"ppo": {"objective": "reinforce"}, "learning_rate": 3e-3}},
        "bob": {"algorithm": {"ppo": {"kl_coef": 0.1, **PPO}}},
    }},
}  # fmt: skip


def trained_twice(tmp_path, base, stub, recorded, **options):
    values = values_of(tmp_path / "there", base, **options)
    trainer = trainer_of(on(stub, values))
    trainer.train()
    train_here(values, stub, recorded, tmp_path)
    return final_of(tmp_path / "there"), final_of(tmp_path / "here")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_weights_are_those_of_training_here(tmp_path, base, served, recorded, name):
    sections = dict(OBJECTIVES[name])
    agents = sections.pop("agents", None)
    there, here = trained_twice(tmp_path, base, served(), recorded, sections=sections, agents=agents)
    assert difference(there, here) < 1e-5
    moved = max(float(v.abs().max()) for weights in there.values() for k, v in weights.items() if "lora_B" in k)
    assert moved > 1e-3
