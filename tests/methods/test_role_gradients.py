"""How much of what moves a shared policy comes from each role, through the trainer's own steps."""

import pytest
import torch
from scripted_training import played

from maporl.errors import ConfigError
from maporl.methods.role_gradients import RoleGradients
from maporl.methods.tiny_versions import tiny_version
from maporl.report.audit import metric_counts
from maporl.runs.build import build_trainer
from maporl.validation.load import from_dict
from trl_ext.ppo.losses import Totals


def values_of(folder, **training):
    """Two agents with one policy. The answers of one are worth more than those of the other."""
    values = tiny_version("grpo", str(folder))
    values["agents"] = {"ann": {"policy": "one"}, "bob": {"policy": "one"}}
    values["branching"] = {"group": 2}
    values["training"] |= training
    values["warm_start"] |= {"steps": 20}
    return values


def numbers(trainer):
    left_out = ("time/", "memory/", "tokens_per_second", "tools/", "role/")
    return [
        {k: v for k, v in record.items() if not any(part in k for part in left_out)}
        for record in trainer.state.log_history
    ]


def gradient(learner, rows, index, totals):
    learner.accumulate(rows, index, totals=totals)
    parts = [p.grad.flatten().clone() for p in learner.policy.parameters().values() if p.grad is not None]
    learner.optimizer.zero_grad(set_to_none=True)
    return torch.cat(parts)


def with_advantages(trainer):
    """An update's batch with advantages of the test's own, three times as large for ann."""
    batch = played(trainer)
    (rows,) = batch.token_batches.values()
    agents = [batch.samples["one"][n].utterance.agent for n in rows.sample.tolist()]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(rows.advantages.shape, generator=generator) * rows.sampled_mask
    rows.advantages = drawn * torch.tensor([3.0 if agent == "ann" else 1.0 for agent in agents]).unsqueeze(1)
    return batch, rows, torch.tensor([agent == "bob" for agent in agents]).long()


def test_the_gradients_of_roles_add_up_to_the_gradient_of_the_policy(tmp_path):
    trainer = build_trainer(from_dict(values_of(tmp_path)), quiet=True)
    batch, rows, part = with_advantages(trainer)
    (learner,) = trainer.learners.values()
    index = trainer.learning.minibatches("one", rows, 0, 0)[0]
    totals = Totals.of(rows, index, trainer.args)
    whole = gradient(learner, rows, index, totals)
    parts = [gradient(learner, rows, index[part[index] == number], totals) for number in (0, 1)]
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-4)
    norms = [float(part.norm()) for part in parts]
    assert trainer.learning.gradient_norms("one", rows, part, 0) == pytest.approx(norms, rel=1e-4)
    measured = RoleGradients(1, "none").measure(batch, trainer.learning)["one"]
    assert measured == {
        "role/ann/grad_norm": pytest.approx(norms[0], rel=1e-4),
        "role/bob/grad_norm": pytest.approx(norms[1], rel=1e-4),
        "role/ann/grad_share": pytest.approx(norms[0] / sum(norms), rel=1e-4),
        "role/bob/grad_share": pytest.approx(norms[1] / sum(norms), rel=1e-4),
    }
    assert norms[0] > 2 * norms[1], "ann's advantages are three times as large"
    assert all(p.grad is None for p in learner.policy.parameters().values())


def test_balanced_roles_have_gradients_of_one_norm(tmp_path):
    trainer = build_trainer(from_dict(values_of(tmp_path)), quiet=True)
    batch, rows, part = with_advantages(trainer)
    balanced = RoleGradients(0, "role").measure(batch, trainer.learning)["one"]
    ann, bob = (balanced[f"role/{name}/weight"] for name in ("ann", "bob"))
    assert ann < 1 < bob
    assert rows.weight.tolist() == pytest.approx([bob if number else ann for number in part.tolist()])
    norms = trainer.learning.gradient_norms("one", rows, part, 0)
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.slow
def test_measuring_changes_no_number_and_balancing_does(tmp_path):
    runs = []
    for name, training in (("off", {}), ("on", {"role_gradients": 2}), ("balanced", {"balance": "role"})):
        trainer = build_trainer(from_dict(values_of(tmp_path / name, **training)), quiet=True)
        trainer.train()
        runs.append(trainer)
    off, on, balanced = map(numbers, runs)
    assert off == on and off != balanced
    shares = [[k for k in record if k.endswith("grad_share")] for record in runs[1].state.log_history]
    assert [len(own) for own in shares if own] == [2], "of three updates the second was measured"


@pytest.mark.parametrize(
    ("training", "key"), [({"role_gradients": 1}, "role_gradients"), ({"balance": "role"}, "balance")]
)
def test_roles_are_refused_where_gradients_are_elsewhere(training, key, tmp_path):
    values = values_of(tmp_path, **training) | {"cluster": {"backend": "ray"}}
    with pytest.raises(ConfigError, match=rf"training.{key}: gradients of roles are measured where one process has"):
        from_dict(values)


def test_updates_in_which_one_role_moves_a_policy_are_counted():
    shares = {"one/role/critic/grad_share": 0.8, "one/role/solver/grad_share": 0.2}
    assert metric_counts(shares, ["one", "two"]) == {"learner/one/by_role": 1.0, "learner/one/captured": 1.0}
    even = {"one/role/critic/grad_share": 0.7, "one/role/solver/grad_share": 0.3}
    assert metric_counts(even, ["one"]) == {"learner/one/by_role": 1.0}
    old = {"one/policy/staleness": 2.0, "one/policy/engine_gap": 0.1}
    assert metric_counts(old, ["one"]) == {"learner/one/far": 1.0}
    assert metric_counts(old | {"one/policy/engine_gap": 0.09}, ["one"]) == {}
    assert metric_counts(old | {"one/policy/staleness": 0.0}, ["one"]) == {}
