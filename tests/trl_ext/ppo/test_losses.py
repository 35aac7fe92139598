"""Policy and critic losses with literal numbers, and how they are averaged."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from trl_ext.errors import ArgumentError
from trl_ext.learning.metrics import update_metrics
from trl_ext.ppo import maths
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.ppo.losses import (
    OBJECTIVES,
    Totals,
    aggregation_total,
    importance_ratio,
    micro_batch_loss,
    objective_of,
    sampling_logprobs,
    token_weights,
)  # fmt: skip
from trl_ext.ppo.options import PPOOptions

ONES = torch.ones(1, 3, dtype=torch.bool)


def test_ratios_of_tokens_sequences_and_their_mean():
    """M-GRPO's log-ratios (.1, -.02, .05): product 1.1388, GSPO 1.0443; MARTI's (.1, -.3, .05): GSPO .9512."""
    new, old = torch.tensor([[0.1, -0.02, 0.05]]), torch.zeros(1, 3)
    torch.testing.assert_close(importance_ratio(new, old, ONES, "token"), torch.tensor([[1.1052, 0.9802, 1.0513]]), atol=1e-4, rtol=0)  # fmt: skip
    assert importance_ratio(new, old, ONES, "sequence")[0].tolist() == pytest.approx([1.1388] * 3, abs=1e-4)
    assert importance_ratio(new, old, ONES, "sequence_mean")[0].tolist() == pytest.approx([1.0443] * 3, abs=1e-4)
    marti = torch.tensor([[0.1, -0.3, 0.05]])
    assert importance_ratio(marti, old, ONES, "sequence_mean")[0, 0].item() == pytest.approx(0.9512, abs=1e-4)
    outside = torch.tensor([[True, True, False]])
    assert importance_ratio(torch.tensor([[0.1, -0.1, math.inf]]), old, outside, "sequence")[0, 0].item() == 1.0


def loss_of(ratio, advantage, **options):
    new = torch.log(torch.tensor([[ratio]]))
    options = PPOOptions(**options)
    losses, measures = OBJECTIVES[options.objective](
        new, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1, dtype=torch.bool), options
    )
    return losses.item(), measures["clipfrac"].item()


@pytest.mark.parametrize(("ratio", "advantage", "options", "expected"), [
    (1.1, 1.0, {}, (-1.1, 0)),
    (1.5, 1.0, {}, (-1.2, 1)),
    (0.5, 1.0, {}, (-0.5, 0)),
    (0.5, -1.0, {}, (0.8, 1)),
    (1.25, 1.0, {"cliprange_high": 0.28}, (-1.25, 0)),
    (1.5, 1.0, {"cliprange_high": 0.28}, (-1.28, 1)),
    (9.0, -1.0, {}, (9.0, 0)),
    (9.0, -1.0, {"dual_clip": 3.0}, (3.0, 0)),
    (9.0, 1.0, {"dual_clip": 3.0}, (-1.2, 1)),
])  # fmt: skip
def test_clipping_by_hand(ratio, advantage, options, expected):
    assert loss_of(ratio, advantage, **options) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratios_that_would_overflow_are_clipped_and_masked_columns_stay_out(kind, advantage):
    """Two answers of 120 and of 2 tokens; the policy has since moved by a nat, or by 89, at each token."""
    for nats in (1.0, 89.0):
        mask = torch.ones(2, 120, dtype=torch.bool)
        mask[1, 2:] = False
        new = torch.where(mask, -1.0, float("nan")).requires_grad_(True)
        old = torch.where(mask, -1.0 - nats, float("inf"))
        advantages = torch.where(mask, advantage, 0.0)
        options = PPOOptions(ratio=kind, cliprange=0.2)
        losses, measures = OBJECTIVES["ppo"](new, old, advantages, mask, options)
        loss = (losses * mask).sum()
        loss.backward()
        assert torch.isfinite(losses).all() and torch.isfinite(measures["ratio"]).all()
        assert not new.grad[~mask].any() and torch.isfinite(new.grad).all()
        if advantage > 0:
            assert torch.allclose(losses[mask], torch.tensor(-1.2)), "clipped at 1 + 0.2"
            assert not new.grad.any(), "and what is clipped has no gradient"
        elif nats == 89.0:
            assert losses[mask].max().item() == pytest.approx(math.exp(20.0), rel=1e-6)


def test_reinforce_weighs_with_a_truncated_ratio_that_has_no_gradient():
    new = torch.tensor([[-0.5, -3.0]], requires_grad=True)
    old = torch.tensor([[-2.0, -2.0]])
    mask, advantages = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1.0, -2.0]])
    losses, _ = OBJECTIVES["reinforce"](new, old, advantages, mask, PPOOptions(objective="reinforce", tis_cap=2.0))
    low = math.exp(-1.0)  # exp(1.5) is cut to 2
    assert losses[0].tolist() == pytest.approx([-1.0 * 2.0 * -0.5, 2.0 * low * -3.0], abs=1e-6)
    losses.sum().backward()
    assert new.grad[0].tolist() == pytest.approx([-2.0, 2.0 * low], abs=1e-6)


def test_the_weight_of_dis_is_the_ratio_inside_and_nothing_outside():
    """Of SAO: ratios of 0.5, 1, 2 and 6 and the range [0.6, 4]: the gradient of a token is -A r inside, and 0 outside."""
    ratios = torch.tensor([[0.5, 1.0, 2.0, 6.0]])
    new = torch.full((1, 4), -1.0, requires_grad=True)
    old = new.detach() - ratios.log()
    options = PPOOptions(objective="dis", cliprange=0.4, cliprange_high=3.0)
    for sign in (1.0, -1.0):  # whatever the sign of the advantage, unlike the clip of ppo
        advantages = sign * torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        losses, measures = OBJECTIVES["dis"](new, old, advantages, torch.ones(1, 4).bool(), options)
        (gradient,) = torch.autograd.grad(losses.sum(), new)
        assert gradient[0].tolist() == pytest.approx([0.0, -2.0 * sign, -6.0 * sign, 0.0], abs=1e-6)
        assert measures["clipfrac"].tolist() == [[1.0, 0.0, 0.0, 1.0]]


@pytest.mark.parametrize("objective", ["ppo", "dis", "reinforce"])
def test_the_ratio_is_to_the_policy_before_the_update_or_to_the_one_that_sampled(objective):
    """One token with p new 0.3, p before the update 0.25 and p when it was sampled 0.2: ratios of 1.2 and 1.5."""
    rows = build_token_batch([Completion([1], [2], True, "a", sampled_logprobs=[math.log(0.2)])], "cpu")
    rows.old_logprobs[0, 1], rows.advantages[0, 1] = math.log(0.25), 1.0
    for ratio_to, ratio in (("update", 1.2), ("sampler", 1.5)):
        options = PPOOptions(objective=objective, ratio_to=ratio_to, cliprange=0.6, tis_cap=9.0)
        new = torch.tensor([math.log(0.3)], requires_grad=True)
        totals = Totals.of(rows, torch.tensor([0]), options)
        loss, measures = micro_batch_loss(rows, Output(new), totals, options, OBJECTIVES[objective])
        assert torch.autograd.grad(loss, new)[0].item() == pytest.approx(-ratio, rel=1e-5)
        assert measures["ratio"].item() == pytest.approx(ratio, rel=1e-5)


def test_a_token_whose_sampler_told_no_probability_has_the_ratio_to_the_policy_before_the_update():
    rows = build_token_batch([Completion([1], [2], True, "a")], "cpu")
    rows.old_logprobs[0, 1] = math.log(0.25)
    assert sampling_logprobs(rows)[0, 1].item() == pytest.approx(math.log(0.25))


def test_old_answers_have_the_gradient_of_the_policy_that_would_have_answered_now():
    """A bandit of three answers, old probabilities, present ones, and the exact policy gradient of the present ones.

    With the weight of ``engine_tis_cap`` (uncut), with ``ratio_to: sampler`` and with ``dis`` in a wide range, the
    expectation over old answers is the expectation over present ones, which is sum_a p(a) A(a) grad log p(a).
    """
    logits = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([0.6, 0.15, 0.25], dtype=torch.float64), [1.0, -2.0, 0.5]
    present = torch.log_softmax(logits, 0)
    exact = torch.autograd.grad(sum(p.exp() * a for p, a in zip(present, advantages, strict=True)), logits)[0]
    ways = (
        {"engine_tis_cap": 1e6}, {"engine_tis_cap": 1e6, "engine_tis_mode": "token_mask"}, {"ratio_to": "sampler", "cliprange": 50.0},
        {"ratio_to": "sampler", "objective": "dis", "cliprange": 1.0, "cliprange_high": 50.0},
    )  # fmt: skip
    for options in (PPOOptions(kl_coef=0.0, **way) for way in ways):
        found = torch.zeros(3, dtype=torch.float64)
        for answer, probability in enumerate(old.tolist()):
            found += probability * ascent(logits, answer, probability, advantages[answer], options)
        assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-6), options


def ascent(logits, answer, sampled_with, advantage, options):
    """The direction in which one answer of one token moves the logits of a policy, if it was sampled with a
    probability."""
    rows = build_token_batch([Completion([1], [answer + 2], True, "a", sampled_logprobs=[math.log(sampled_with)])], "cpu")  # fmt: skip
    present = torch.log_softmax(logits, 0)[answer : answer + 1]
    rows.old_logprobs[0, 1], rows.advantages[0, 1] = present.detach(), advantage
    totals = Totals.of(rows, torch.tensor([0]), options)
    loss, _ = micro_batch_loss(rows, Output(present), totals, options, OBJECTIVES[options.objective])
    return -torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("options", [{"engine_tis_cap": 1e6}, {"ratio_to": "sampler", "cliprange": 50.0}])
def test_in_a_team_old_answers_have_the_gradient_against_the_partner_who_gave_them(options):
    """Two agents choose one of two actions each, and share a payoff. Both played with old policies.

    The weight corrects for an agent's own old policy. What it learns is the exact gradient against the partner as that
    was when it answered, and not against the partner of now.
    """
    payoff = torch.tensor([[1.0, 0.0], [-1.0, 2.0]], dtype=torch.float64)
    logits = torch.tensor([0.2, -0.1], dtype=torch.float64, requires_grad=True)
    mine, theirs = torch.tensor([0.7, 0.3]), torch.tensor([0.8, 0.2])  # when they played
    options = PPOOptions(kl_coef=0.0, **options)
    found = torch.zeros(2, dtype=torch.float64)
    for own, other in itertools.product((0, 1), (0, 1)):
        found += mine[own] * theirs[other] * ascent(logits, own, float(mine[own]), float(payoff[own, other]), options)
    by_partner = [
        torch.autograd.grad(torch.softmax(logits, 0) @ payoff @ partner.double(), logits)[0]
        for partner in (theirs, torch.tensor([0.4, 0.6]))
    ]
    assert found.tolist() == pytest.approx(by_partner[0].tolist(), abs=1e-6)
    assert by_partner[0][0] > 0 > by_partner[1][0], "the partner of now would teach the other action"


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", [[1 / 4] * 3, [1 / 4, 0, 0]]), ("sequence_mean", [[1 / 6] * 3, [1 / 2, 0, 0]]), ("sequence_sum", [[1 / 2] * 3, [1 / 2, 0, 0]])],
)  # fmt: skip
def test_losses_are_averaged_over_tokens_or_answers(aggregation, expected):
    mask = torch.tensor([[True] * 3, [True, False, False]])
    rows = torch.ones(2)
    weights = token_weights(mask, rows, aggregation_total(mask, rows, aggregation), aggregation)
    torch.testing.assert_close(weights, torch.tensor(expected))
    heavy = torch.tensor([2.0, 1.0])
    weights = token_weights(mask, heavy, aggregation_total(mask, heavy, "token_mean"), "token_mean")
    assert float(weights[0, 0]) == pytest.approx(2 / 7)


def test_the_critics_loss_may_be_huber():
    values, old, returns = torch.tensor([3.0]), torch.tensor([3.0]), torch.tensor([0.0])
    assert maths.value_loss_terms(values, old, returns, 0.2)[0].item() == 4.5
    assert maths.value_loss_terms(values, old, returns, 0.2, huber_delta=1.0)[0].item() == 2.5
    assert maths.value_loss_terms(torch.tensor([1.0]), torch.tensor([2.0]), returns, 0.2, 10.0)[0].item() == pytest.approx(0.5 * 1.8**2)  # fmt: skip


class Output:
    def __init__(self, logprobs, values=None, entropies=None):
        self.logprobs, self.values, self.entropies = logprobs, values, entropies


def some_rows():
    rows = build_token_batch([Completion([1, 2], [3, 4, 5], True, "a"), Completion([1], [6], True, "b"), Completion([1], [7, 8], True, "c")], "cpu")  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for name in ("logprobs", "ref_logprobs", "values", "advantages", "returns"):
        setattr(rows, name, torch.randn(rows.sampled_mask.shape, generator=generator) * rows.sampled_mask)
    rows.weight = torch.tensor([1.0, 2.0, 0.5])
    return rows


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("objective", ["ppo", "reinforce"])
def test_a_minibatch_may_be_cut_anywhere(objective, aggregation):
    more = {"kl_in": "loss", "kl_estimator": "k3", "entropy_coef": 0.1, "ratio": "sequence_mean"}
    options = PPOOptions(objective=objective, aggregation=aggregation, **more)
    rows = some_rows()
    flat = rows.old_logprobs[rows.sampled_mask] + 0.1
    everything = torch.arange(3)
    totals = Totals.of(rows, everything, options)

    def part(index):
        piece = rows.take(index)
        own = torch.cat([flat.split(rows.sampled_mask.sum(1).tolist())[i] for i in index.tolist()])
        return micro_batch_loss(piece, Output(own, own * 0.5, own.abs()), totals, options, OBJECTIVES[objective])

    whole, measures = part(everything)
    pieces = [part(torch.tensor(i)) for i in ([0], [1, 2])]
    assert float(sum(loss for loss, _ in pieces)) == pytest.approx(float(whole), abs=1e-6)
    for name in measures:
        assert float(sum(m[name] for _, m in pieces)) == pytest.approx(float(measures[name]), abs=1e-6), name


@pytest.mark.parametrize(("ratio", "loss"), [("token", -4.7 / 4), ("sequence", -5.2 / 4), ("trajectory", -6.4 / 4)])
def test_a_ratio_is_of_a_token_an_answer_or_a_trajectory(ratio, loss):
    """Answers [a] and [b, c] of one trajectory and [d] of another: tokens are now 1.2, 1.5, 1 and 1 times as likely.

    So are the answers 1.2, 1.5 and 1 times, and the trajectories 1.8 times and once.
    """
    pair = [Completion([1], ids, True, "pair", trajectory=("t",)) for ids in ([2], [3, 4])]
    rows = build_token_batch([*pair, Completion([1], [5], True, "alone")], "cpu")
    rows.advantages = rows.sampled_mask.float()
    options = PPOOptions(ratio=ratio, cliprange=0.9, aggregation="token_mean")
    totals, new = Totals.of(rows, torch.arange(3), options), torch.tensor([1.2, 1.5, 1.0, 1.0]).log()
    assert micro_batch_loss(rows, Output(new), totals, options, OBJECTIVES["ppo"])[0].item() == pytest.approx(loss)


def test_kl_in_the_loss_pulls_towards_the_reference():
    rows = replace(some_rows())
    rows.advantages = torch.zeros_like(rows.advantages)
    logprobs = rows.old_logprobs[rows.sampled_mask].clone().requires_grad_(True)
    options = PPOOptions(kl_in="loss", kl_estimator="k3", kl_coef=0.5)
    totals = Totals.of(rows, torch.arange(3), options)
    loss, metrics = micro_batch_loss(rows, Output(logprobs), totals, options, OBJECTIVES["ppo"])
    d = logprobs.detach() - rows.ref_logprobs[rows.sampled_mask]
    assert metrics["kl_loss"] > 0
    loss.backward()
    assert torch.equal(torch.sign(logprobs.grad), torch.sign(1 - torch.exp(-d)))
    with pytest.raises(ValueError, match=r"kl_in: loss needs kl_estimator k2 or k3"):
        PPOOptions(kl_in="loss")


def test_while_the_critic_warms_up_only_its_loss_counts():
    rows = replace(some_rows(), critic_only=True)
    logprobs = rows.old_logprobs[rows.sampled_mask].clone().requires_grad_(True)
    values = rows.values[rows.sampled_mask].clone().requires_grad_(True)
    options = PPOOptions(entropy_coef=0.1, kl_in="loss", kl_estimator="k3")
    totals = Totals.of(rows, torch.arange(3), options)
    loss, _ = micro_batch_loss(rows, Output(logprobs, values, logprobs.abs()), totals, options, OBJECTIVES["ppo"])
    loss.backward()
    assert logprobs.grad is None or not logprobs.grad.any()
    assert values.grad.any()


# -- an objective of one's own ------------------------------------------------------------------------------------


def surrogate(new, old, advantages):
    return -advantages * (new - old).exp()


OWN = {
    "loss_alone": (lambda n, o, a, m, s: surrogate(n, o, a), "returned a tensor [4, 8] and no measures; expected (losses, measures)"),
    "no_measures": (lambda n, o, a, m, s: (surrogate(n, o, a), None), "returned a value of type tuple and no measures"),
    "three": (lambda n, o, a, m, s: (surrogate(n, o, a), {}, 0), "returned a value of type tuple and no measures"),
    "mean": (lambda n, o, a, m, s: (surrogate(n, o, a).mean(), {}), "returned losses that are a tensor []; expected"),
    "row": (lambda n, o, a, m, s: (surrogate(n, o, a).sum(1), {}), "returned losses that are a tensor [4]; expected"),
    "mean_measure": (lambda n, o, a, m, s: (surrogate(n, o, a), {"gap": (n - o).mean()}), "the measure 'gap', which is a tensor []"),
    "number": (lambda n, o, a, m, s: (surrogate(n, o, a), {"gap": 0.5}), "the measure 'gap', which is a value of type float"),
    "detached": (lambda n, o, a, m, s: (surrogate(n.detach(), o, a), {}), "losses without a gradient, so that nothing would be learned"),
    "elsewhere": (lambda n, o, a, m, s: (a + 0 * n, {}), "the sizes of their gradients to 0.0; expected"),
    "nan_outside": (lambda n, o, a, m, s: (surrogate(n, o, a) * m / m, {}), "its losses sum to nan"),
    "nan_gradient": (lambda n, o, a, m, s: (a * ((n - o) ** 2).sqrt(), {}), "of their gradients to nan"),
    "too_few": (lambda n, o, a: (a, {}), "failed on made-up tokens: TypeError: "),
    "raises": (lambda n, o, a, m, s: (n @ o, {}), "failed on made-up tokens: RuntimeError: mat1 and mat2"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_an_objective_that_cannot_be_trained_on_is_refused_before_anything_is_sampled(name, monkeypatch):
    objective, message = OWN[name]
    monkeypatch.setitem(OBJECTIVES, name, objective)
    with pytest.raises(ArgumentError) as caught:
        objective_of(PPOOptions(objective=name))
    assert str(caught.value).startswith(f"objective {name}: ") and message in str(caught.value)


def test_an_objective_that_nobody_defined_is_refused_with_those_that_are():
    with pytest.raises(ArgumentError, match=r"^objective: expected one of ppo, reinforce, dis.*, got 'pppo'$"):
        objective_of(PPOOptions(objective="pppo"))


@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_mean", "trajectory"])
@pytest.mark.parametrize("objective", ["ppo", "reinforce", "dis"])
def test_the_objectives_that_are_here_pass(objective, ratio):
    if ratio == "token" or objective == "ppo":
        options = PPOOptions(
            objective=objective, ratio=ratio, cliprange=0.0003, tis_cap=2.0 if objective == "reinforce" else None
        )
        assert objective_of(options) is OBJECTIVES[objective]


def test_a_loss_of_another_shape_in_a_later_batch_is_named():
    def first_only(new, old, advantages, mask, options):
        return surrogate(new, old, advantages)[:1], {}

    rows, options = some_rows(), PPOOptions(objective="first_only")
    logprobs = rows.old_logprobs[rows.sampled_mask].requires_grad_(True)
    with pytest.raises(ArgumentError, match=r"objective first_only: returned losses that are a tensor \[1, 5\]"):
        micro_batch_loss(rows, Output(logprobs), Totals.of(rows, torch.arange(3), options), options, first_only)


def test_own_measures_are_metrics_and_what_is_not_measured_is_left_out():
    """Six tokens of ratio e^0.1 = 1.1052. Own measures are token means; the ratio is computed, and clips are unknown."""

    def own(new, old, advantages, mask, options):
        return surrogate(new, old, advantages), {"trust": 3.0 * mask, "near": (new - old).abs() < 1.0}

    rows, options = some_rows(), PPOOptions(cliprange=0.2)
    logprobs = (rows.old_logprobs[rows.sampled_mask] + 0.1).requires_grad_(True)
    _, sums = micro_batch_loss(rows, Output(logprobs), Totals.of(rows, torch.arange(3), options), options, own)
    metrics = update_metrics([{name: float(value) for name, value in sums.items()} | {"grad_norm": 1.0}])
    assert metrics["measure/trust"] == pytest.approx(3.0) and metrics["measure/near"] == pytest.approx(1.0)
    assert metrics["val/ratio"] == pytest.approx(1.1052, abs=1e-4)
    assert "policy/clipfrac_avg" not in metrics
