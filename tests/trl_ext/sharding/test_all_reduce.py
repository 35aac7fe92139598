"""Gradients are summed over processes in messages of a limited size, without a copy of all of them."""

import processes
import pytest
import torch
import torch.distributed as dist
from launches import free_port

from trl_ext.process import distributed

SHAPES = [(3, 5), (70, 10), (7,), (), (0,), (40, 25), (2, 2), (2, 2)]
LIMIT = 1000
"""Bytes of a message in these tests. (70, 10) and (40, 25) are larger in float32."""


def gradients(rank):
    """Tensors of every shape, dtype and layout that gradients may have, with numbers whose sums depend on rounding."""
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randn(shape, generator=generator) * 10 ** torch.randn((), generator=generator) for shape in SHAPES]
    half = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    turned = [torch.randn(shape, generator=generator).T for shape in ((6, 4), (50, 30))]
    return [*found, *half, *turned, torch.randn(4, dtype=torch.float64, generator=generator)]


def flat_sums(tensors):
    """What one message for each dtype gives."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        alike = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.flatten() for t in alike])
        dist.all_reduce(flat)
        for tensor, summed in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def reduce_in(rank, number, port, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=number)
    distributed.BUCKET = LIMIT
    found = {"buckets": gradients(rank), "flat": gradients(rank)}
    distributed.all_reduce_tensors(found["buckets"])
    flat_sums(found["flat"])
    torch.save(found, folder / f"rank{rank}.pt")
    distributed.shutdown()


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_buckets_give_the_sums_of_one_flat_message(tmp_path, number):
    """Two processes get the same bits. Three may add in another order."""
    port = free_port()
    ranks = [processes.SERVER.Process(target=reduce_in, args=(rank, number, port, tmp_path)) for rank in range(number)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
        assert process.exitcode == 0
    per_rank = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(number)]
    rounding = {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-12}
    for here, everywhere in enumerate(zip(*(found["buckets"] for found in per_rank), strict=True)):
        assert all(torch.equal(own, everywhere[0]) for own in everywhere), "all processes step alike"
        most = 0 if number == 2 else rounding[everywhere[0].dtype]
        torch.testing.assert_close(everywhere[0], per_rank[0]["flat"][here], atol=most, rtol=most)
        if everywhere[0].dtype != torch.bfloat16:
            expected = sum(gradients(rank)[here] for rank in range(number))
            torch.testing.assert_close(everywhere[0], expected, atol=1e-6, rtol=1e-5)


def sent(monkeypatch, tensors):
    """The bytes of each message, and the largest copy, if ``tensors`` are summed over processes."""
    messages, copies = [], [0]
    cat = torch.cat
    monkeypatch.setattr(distributed, "size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: messages.append(tensor.nbytes))
    monkeypatch.setattr(torch, "cat", lambda parts: copies.append(sum(p.nbytes for p in parts)) or cat(parts))
    distributed.all_reduce_tensors(tensors)
    return messages, max(copies)


def test_no_copy_is_larger_than_a_bucket_and_small_tensors_share_messages(monkeypatch):
    """As of a model of 8 billion parameters: a large embedding, and layers of matrices and small vectors."""
    layer = [torch.empty(shape, device="meta") for shape in ((4096, 14336), 4096, 4096)]
    model = [torch.empty(151_936, 4096, device="meta"), *layer * 36]
    total = sum(t.nbytes for t in model)
    messages, largest = sent(monkeypatch, model)
    assert sum(messages) == total > 10 * 2**30
    assert largest <= distributed.BUCKET == 2**28
    assert len(messages) <= 2 * 36 + 1
    vectors = [torch.empty(1024, device="meta") for _ in range(1000)]
    messages, largest = sent(monkeypatch, vectors)
    assert messages == [1000 * 4096] and largest == 1000 * 4096
