"""How often training waits for its device: reading a number stops an accelerator until all its work is done.

CPU tensors are never waited for, so these tests count the reads themselves.
"""

from contextlib import contextmanager

import pytest
import torch
from test_update_layouts import learner_of
from tiny_models import build
from torch.utils._python_dispatch import TorchDispatchMode

from trl_ext.losses import Totals, micro_batch_loss
from trl_ext.sampling import Sampling, sample
from trl_ext.token_batch import Completion, build_token_batch


class _Items(TorchDispatchMode):
    """Counts ``item``, ``float(tensor)``, ``bool(tensor)`` and ``int(tensor)``."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@contextmanager
def reads(monkeypatch):
    """Yield a function that returns how many numbers or lists have been read from tensors."""
    lists = []
    whole = torch.Tensor.tolist
    with monkeypatch.context() as patch, _Items() as items:
        patch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(1) or whole(tensor))
        yield lambda: items.count + len(lists)


def test_the_counter_counts(monkeypatch):
    with reads(monkeypatch) as count:
        one = torch.ones(1)
        _ = one.item(), float(one), bool(one), one.tolist(), one + one
        assert count() == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decoding_step_reads_once(tiny, monkeypatch, temperature):
    """Transformers reads its attention mask once more in each step on CPUs."""
    model, _ = build(tiny, "qwen2")
    counts = []
    for length in (4, 12):
        with reads(monkeypatch) as count:
            options = Sampling(length, temperature, batch_size=32)
            found = sample(model, [[3, 4, 5 + n % 4] for n in range(32)], options, keys=[(n,) for n in range(32)])
            counts.append(count())
        assert all(len(row.ids) == length for row in found)
    assert counts[1] - counts[0] <= 2 * 8  # eight steps more
    assert counts[1] <= 12 * 32 / 16  # one read for 16 sampled tokens


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_the_loss_of_a_micro_batch_reads_once(tiny, tmp_path, monkeypatch, kl_in):
    """All measures are read together, and the loss among them shows whether it is finite."""
    model, tokenizer = build(tiny, "qwen2")
    learner = learner_of(model, tokenizer, tmp_path, kl_in=kl_in, kl_coef=0.1, kl_estimator="k3")
    completions = [Completion([3, 4], [5 + n, 6, 7], True, f"row {n}") for n in range(4)]
    rows = build_token_batch(completions, "cpu")
    learner.compute_old_logprobs_and_values(rows)
    totals = Totals.of(rows, torch.arange(4), learner.args)
    out = learner.forward(rows)
    with reads(monkeypatch) as count:
        _, measures = micro_batch_loss(rows, out, totals, learner.args, learner.objective)
        assert count() == 1
    assert ("kl_loss" in measures) == (kl_in == "loss")
    assert measures["ratio"] == pytest.approx(1.0)
