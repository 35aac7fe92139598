"""PPO's mathematics against literal numbers, golden cases, and TRL 1.12's formulas written out."""

import json
import math

import pytest
import torch
from folders import GOLDEN

from trl_ext.ppo import maths

NUMBERS = GOLDEN / "gae.json"


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def test_masked_mean_reads_only_what_the_mask_shows():
    values = double([[1.0, 2.0, float("nan")], [4.0, float("inf"), 6.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    assert maths.masked_mean(values, mask).item() == pytest.approx(3.25)
    assert maths.masked_mean(values, mask, dim=1).tolist() == pytest.approx([1.5, 5.0])
    assert math.isnan(maths.masked_mean(values, torch.zeros_like(mask)).item())


def test_masked_whiten_uses_the_unbiased_variance():
    values, mask = double([[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    # mean 2.5, unbiased variance 5/3
    expected = [-1.161895, -0.387298, 0.0, 0.387298, 1.161895, 0.0]
    assert maths.masked_whiten(values, mask).flatten().tolist() == pytest.approx(expected, abs=1e-6)
    kept = maths.masked_whiten(values, mask, shift_mean=False)
    assert kept[mask.bool()].tolist() == pytest.approx([1.338105, 2.112702, 2.887298, 3.661895], abs=1e-6)


def test_whitening_one_value_or_equal_values_gives_zero_and_none_is_an_error():
    assert maths.masked_whiten(double([[7.0]]), torch.tensor([[True]])).item() == 0.0
    assert maths.masked_whiten(double([[0.3, 0.3, 0.3]]), torch.ones(1, 3)).tolist() == [[0.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match="the mask selects no value"):
        maths.masked_whiten(double([[7.0]]), torch.tensor([[False]]))


def test_gae_steps_over_tokens_of_others():
    """A row with other agents' tokens between the agent's own gives the same as the own tokens alone."""
    rewards, values = double([[5, 0, 9, 0, 1, 9]]), double([[9, 0.2, 9, 0.5, 0.1, 9]])
    mask = torch.tensor([[0, 1, 0, 1, 1, 0]])
    advantages, returns = maths.gae(rewards, values, mask, 0.9, 0.8)
    assert advantages.tolist()[0] == pytest.approx([0, 0.42136, 0, 0.238, 0.9, 0])
    assert returns.tolist()[0] == pytest.approx([0, 0.62136, 0, 0.738, 1.0, 0])


def test_gae_and_whitening_equal_the_golden_cases():
    cases = json.loads(NUMBERS.read_text())["cases"]
    assert len(cases) == 30
    for case in cases:
        whole = torch.ones(case["batch"], case["length"])
        advantages, returns = maths.gae(
            double(case["rewards"]), double(case["values"]), whole, case["gamma"], case["lam"]
        )
        whitened = maths.masked_whiten(advantages, torch.tensor(case["mask"]))
        for got, key in ((advantages, "advantages"), (returns, "returns"), (whitened, "whitened_advantages")):
            torch.testing.assert_close(got, double(case[key]), atol=1e-9, rtol=0)


def test_value_loss_terms_by_hand():
    values, old, returns = double([1.0, 0.3]), double([0.0, 0.2]), double([0.9, 0.0])
    # clipped to 0.2: (0.2-0.9)^2 = 0.49 > 0.01; 0.3 within the range: 0.09
    losses, clipped = maths.value_loss_terms(values, old, returns, 0.2)
    assert losses.tolist() == pytest.approx([0.5 * 0.49, 0.5 * 0.09]) and clipped.tolist() == [1, 0]


def test_losses_equal_the_formulas_of_trl_1_12_on_random_tensors():
    generator = torch.Generator().manual_seed(0)
    new, old, adv, val, old_val, ret = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(6))
    ratio = torch.exp(new - old)
    losses = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2))
    torch.testing.assert_close(maths.policy_loss_terms(ratio, adv, 0.2, 0.2)[0], losses, atol=1e-12, rtol=0)
    clipped = torch.clamp(val, old_val - 0.2, old_val + 0.2)
    squares = torch.max((val - ret) ** 2, (clipped - ret) ** 2)
    torch.testing.assert_close(maths.value_loss_terms(val, old_val, ret, 0.2)[0], 0.5 * squares, atol=1e-12, rtol=0)


def test_kl_estimates_by_hand():
    logprobs, reference = double([-1.0, -2.0]), double([-1.5, -1.0])
    assert maths.kl_estimate(logprobs, reference, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert maths.kl_estimate(logprobs, reference, "k2").tolist() == pytest.approx([0.125, 0.5])
    assert maths.kl_estimate(logprobs, reference, "k3").tolist() == pytest.approx([0.106531, 0.718282], abs=1e-6)
    with pytest.raises(ValueError, match="kind must be 'k1', 'k2' or 'k3', got 'k4'"):
        maths.kl_estimate(logprobs, reference, "k4")


def test_a_ratio_has_a_largest_exponent_and_no_gradient_beyond():
    exponent = double([1.0, 19.9, 20.1, 1000.0, -1000.0]).requires_grad_(True)
    ratio = maths.bounded_exp(exponent)
    largest = math.exp(20.0)
    assert ratio.tolist() == pytest.approx([math.e, math.exp(19.9), largest, largest, 0.0])
    ratio.sum().backward()
    assert exponent.grad.tolist() == pytest.approx([math.e, math.exp(19.9), 0.0, 0.0, 0.0])
    far = maths.kl_estimate(double([-200.0]).float(), double([-1.0]).float(), "k3")
    assert far.item() == pytest.approx(largest - 1 - 199, rel=1e-6), "the exponential of 199 is not a float32"


def test_token_logprobs_and_entropies_are_taken_at_the_temperature_and_in_float32():
    logits = torch.tensor([[0.0, math.log(4.0)]])
    half = maths.token_logprobs(logits, torch.tensor([1]), temperature=0.5)
    assert half.item() == pytest.approx(math.log(16 / 17), abs=1e-6)
    assert maths.token_logprobs(logits.bfloat16(), torch.tensor([1])).dtype == torch.float32
    assert maths.token_entropies(torch.zeros(1, 8)).item() == pytest.approx(math.log(8), abs=1e-6)


def test_gradients_of_log_probabilities_are_those_of_cross_entropy_and_logits_stay_as_they_are():
    torch.manual_seed(0)
    logits = torch.randn(7, 400_000, dtype=torch.float32, requires_grad=True)  # four parts of at most two rows
    before, tokens, weights = logits.detach().clone(), torch.randint(400_000, (7,)), torch.randn(7)
    own = maths.token_logprobs(logits, tokens, temperature=0.7)
    (found,) = torch.autograd.grad((own * weights).sum(), logits)
    other = -torch.nn.functional.cross_entropy(logits / 0.7, tokens, reduction="none")
    (expected,) = torch.autograd.grad((other * weights).sum(), logits)
    torch.testing.assert_close(own, other, atol=1e-5, rtol=0)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
    assert torch.equal(logits, before)
    small = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: maths.token_logprobs(x, torch.tensor([0, 5, 10]), 0.5), (small,))
    half = before[:, :1000].bfloat16().requires_grad_()
    (found,) = torch.autograd.grad(maths.token_logprobs(half, tokens % 1000).sum(), half)
    (expected,) = torch.autograd.grad(
        -torch.nn.functional.cross_entropy(half.float(), tokens % 1000, reduction="sum"), half
    )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-2)


def of_slices(monkeypatch, size, logits, tokens):
    """Log-probabilities, entropies and both gradients if slices have ``size`` bytes."""
    monkeypatch.setattr(maths, "_slice_bytes", lambda kind: size)
    logits = logits.clone().requires_grad_()
    logprobs, entropies = maths.token_logprobs(logits, tokens, 0.7), maths.token_entropies(logits, 0.7)
    weights = torch.linspace(-1, 1, len(tokens))
    found = [torch.autograd.grad((part * weights).sum(), logits)[0] for part in (logprobs, entropies)]
    return [logprobs.detach(), entropies.detach(), *found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_do_not_depend_on_the_size_of_slices(monkeypatch, dtype):
    torch.manual_seed(0)
    for rows in (1, 13, 64):
        logits, tokens = (5 * torch.randn(rows, 997)).to(dtype), torch.randint(997, (rows,))
        alone = of_slices(monkeypatch, 1, logits, tokens)  # one row at a time
        for size in (3 * 4 * 997 + 5, 2**22, 2**29):
            for one, other in zip(alone, of_slices(monkeypatch, size, logits, tokens), strict=True):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    empty = of_slices(monkeypatch, 2**22, torch.zeros(0, 997), torch.zeros(0, dtype=torch.long))
    assert [len(part) for part in empty] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("memory", "most", "tokens"),
    [(141 * 10**9, 2**29, 4096), (24 * 10**9, 94 * 10**6, 1024), (None, 2**26, 1024), (10**6, 4 * 151_936, 16)],
)
def test_an_accelerator_gets_few_large_slices(monkeypatch, memory, most, tokens):
    """The meta device stands for an accelerator: it computes nothing, and only shapes matter here."""
    monkeypatch.setattr(maths, "total_bytes", lambda: memory)
    maths._slice_bytes.cache_clear()
    sizes = []
    exp = torch.Tensor.logsumexp
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda rows, dim: sizes.append(rows.nbytes) or exp(rows, dim))
    ids = torch.zeros(tokens, dtype=torch.long, device="meta")
    try:
        maths.token_logprobs(torch.empty(tokens, 151_936, dtype=torch.bfloat16, device="meta"), ids)
        assert sum(sizes) == tokens * 151_936 * 4
        assert most / 2 < max(sizes) <= most
        assert len(sizes) == math.ceil(sum(sizes) / max(sizes))
        sizes.clear()
        maths.token_logprobs(torch.zeros(16, 151_936), torch.zeros(16, dtype=torch.long))
        assert max(sizes) <= 2**22  # on a CPU a slice stays in the cache, whatever an accelerator has
    finally:
        maths._slice_bytes.cache_clear()
