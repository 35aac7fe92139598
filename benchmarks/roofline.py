"""Measure the least time that a PPO update takes on this machine with torch's matrix products and attention.

    python benchmarks/roofline.py --model DIR [--batch 8 --prompt-len 64 --response-len 64 --epochs 4 --lora 16]

The products of every linear layer, and the attention of every layer, run alone on random inputs of the sizes that an
update has. Norms, activations, losses and the optimizer are left out. Weights come from memory, layer after layer, as
in a model. An update with these kernels cannot take less, so the seconds of another trainer divided by the sum bound
how many times as fast an update can be. With ``--lora``, gradients go through the layers to adapters of this rank, and
not to the weights. The script prints a Markdown table with the machine, the date, the rate of a large product and the
bandwidth of memory.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from machine import machine
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

REPEATS = 5


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a causal language model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0: all weights learn")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def seconds(work: Callable[[], object]) -> float:
    """Return the median seconds of ``work`` after a first time."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def products(weights: list[Tensor], rows: int, backward: bool, trained: bool, rank: int = 0) -> float:
    """Return the seconds of the products of ``rows`` tokens with each of ``weights`` [out, in], perhaps with gradients.

    ``trained`` says whether the weights take a gradient. ``rank`` is that of an adapter beside each of them. 0: no
    adapters.
    """
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights}
    gradients = {w.shape[0]: torch.randn(rows, w.shape[0], dtype=w.dtype) for w in weights}
    down = {size: torch.randn(rank, size, dtype=weights[0].dtype) for size in inputs}
    up = {size: torch.randn(size, rank, dtype=weights[0].dtype) for size in gradients}

    def forward() -> None:
        for weight in weights:
            given = inputs[weight.shape[1]]
            linear(given, weight)
            if rank:
                linear(linear(given, down[weight.shape[1]]), up[weight.shape[0]])

    def both() -> None:
        forward()
        for weight in weights:
            given, gradient = inputs[weight.shape[1]], gradients[weight.shape[0]]
            _ = gradient @ weight
            if trained:
                _ = gradient.t() @ given
            if rank:
                inner = gradient @ up[weight.shape[0]]
                _ = inner @ down[weight.shape[1]], inner.t() @ given, gradient.t() @ inner

    return seconds(both if backward else forward)


def attention(config: Any, batch: int, queries: int, keys: int, backward: bool, dtype: torch.dtype) -> float:
    """Return the seconds of one layer's attention of the last ``queries`` of ``keys`` tokens, perhaps with
    gradients."""
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = [(batch, heads, queries, width), (batch, shared, keys, width), (batch, shared, keys, width)]
    if queries == 1:  # heads that share keys read them once
        sizes[0] = (batch, shared, heads // shared, width)
    given = [torch.randn(size, dtype=dtype, requires_grad=backward) for size in sizes]

    def attend() -> None:
        with torch.set_grad_enabled(backward):
            found = scaled_dot_product_attention(*given, is_causal=queries > 1, enable_gqa=queries > 1)
        if backward:
            found.backward(torch.ones_like(found))

    return seconds(attend)


@torch.no_grad()
def main() -> None:
    options = parse()
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    head = model.get_output_embeddings().weight
    layers = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight is not head]
    large = torch.randn(4096, 4096, dtype=head.dtype)
    block, target = torch.ones(2**28, dtype=torch.uint8), torch.ones(2**28, dtype=torch.uint8)
    peak = 2 * 4096**3 / seconds(lambda: large @ large) / 1e9
    bandwidth = 2 * block.nbytes / seconds(lambda: target.copy_(block)) / 1e9
    rows, answers = options.batch * (options.prompt_len + options.response_len), options.batch * options.response_len
    prompts, length = options.batch * options.prompt_len, options.prompt_len + options.response_len
    middle = options.prompt_len + options.response_len // 2
    # the first pass with gradients computes the old log-probabilities too
    # name: the layers' tokens, the head's tokens, queries, keys, with gradients, how often in an update
    parts = {
        "reading the prompts": (prompts, options.batch, options.prompt_len, options.prompt_len, False, 1),
        "decoding, a step": (options.batch, options.batch, 1, middle, False, options.response_len),
        "reference log-probabilities": (rows, answers, length, length, False, 1),
        "a pass with gradients": (rows, answers, length, length, True, options.epochs),
    }
    config, depth = model.config, model.config.num_hidden_layers
    sizes = [sum(w.numel() for w in layers), head.numel()]
    print(f"{machine()}; {options.threads} threads, {options.dtype}")
    print(f"A product of 4096 x 4096: {peak:.0f} GFLOP/s. A copy in memory: {bandwidth:.1f} GB/s read and written.\n")
    print("| | times | products, s | GFLOP/s | attention, s | s in an update |\n|---|---|---|---|---|---|")
    total, trained = 0.0, not options.lora
    for name, (tokens, predicted, queries, keys, backward, times) in parts.items():
        each = products(layers, tokens, backward, trained, options.lora) + products(
            [head], predicted, backward, trained
        )
        seen = depth * attention(config, options.batch, queries, keys, backward, head.dtype)
        work = (2 + 2 * backward + 2 * (backward and trained)) * (sizes[0] * tokens + sizes[1] * predicted)
        total += (each + seen) * times
        print(f"| {name} | {times} | {each:.3f} | {work / each / 1e9:.0f} | {seen:.3f} | {(each + seen) * times:.2f} |")
    print(f"| together | | | | | {total:.2f} |")


if __name__ == "__main__":
    main()
