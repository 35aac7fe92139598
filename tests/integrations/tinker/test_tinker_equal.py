"""Training on a service is training here: three updates of a two-policy team end with the same weights."""

import json

import pytest
from tinker_runs import base, difference, recorded, served, trained_twice  # noqa: F401  # three are fixtures

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


MEANS = {"kl in the loss": ("mean_sequence", "mean_step"), "clipped": ("mean_tokens",)}
DIVIDES = {(): "sum", MEANS["clipped"]: "tokens", MEANS["kl in the loss"]: "sequence and rows"}
FAST = ("kl in the loss", "one each")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES]
)
def test_weights_are_those_of_training_here(tmp_path, base, served, recorded, monkeypatch, name):
    sections = dict(OBJECTIVES[name])
    agents = sections.pop("agents", None)
    wrong = MEANS.get(name, ())
    monkeypatch.setattr("maporl.integrations.tinker.service.MOST_ROWS", 3)  # a step has several requests
    there, here = trained_twice(tmp_path, base, served(*wrong), recorded, sections=sections, agents=agents)
    assert difference(there, here) < 1e-5
    audit = json.loads((tmp_path / "there/audit.json").read_text())
    ((facts,),) = (bases.values() for bases in audit["built"]["service"].values())
    assert facts["divides"] == DIVIDES[wrong] and facts["clips"] is True
    moved = max(float(v.abs().max()) for weights in there.values() for k, v in weights.items() if "lora_B" in k)
    assert moved > 1e-3
