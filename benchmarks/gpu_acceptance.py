"""Check on one accelerator what a CPU cannot show: that training is right there, and how fast it is.

    python benchmarks/gpu_acceptance.py [--only losses speed] [--out FILE.json]
    python benchmarks/gpu_acceptance.py --cpu --small

The first command is made for one H100 or H200 and takes about three minutes. It works on every accelerator that
``torch.accelerator`` knows. The second command runs the parts on the CPU with tiny models. Models are random and have
the shapes of Qwen3, so nothing is downloaded.

Standard output has one JSON object: ``passed``, ``failed`` and ``skipped`` with reasons, ``figures``, ``seconds`` of
each part, the ``device``, the ``date`` and the ``versions``. The exit status is 1 if a check failed, and standard error
names the checks. A part that raises is a failed check. A part that does not begin within ``--limit`` seconds is one
too.

Where a machine has only torch and transformers, unpack wheels of the other packages into a folder and name the folder::

    python -m pip download --no-deps -d wheels trl datasets dill multiprocess xxhash peft accelerate pydantic pydantic-core \\
        annotated-types typing-inspection httpx2 httpcore2 truststore opentelemetry-api tenacity jsonschema \\
        jsonschema-specifications referencing rpds-py transformers huggingface-hub liger-kernel
    for wheel in wheels/*.whl; do unzip -qo $wheel -d wheels/unpacked; done
    PYTHONPATH=.:wheels/unpacked python benchmarks/gpu_acceptance.py
"""  # noqa: E501

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import packed_updates
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.learning import learner
from trl_ext.learning.learners import Learning
from trl_ext.learning.policy import Policy
from trl_ext.ppo import maths
from trl_ext.ppo.advantages import assign_advantages
from trl_ext.ppo.batch import Completion, GlobalBatch
from trl_ext.process import devices
from trl_ext.sampling.request import Draw, TokenRequest
from trl_ext.sampling.sample import sample

SIZES = {  # width, layers, heads, heads of keys, width of a head, width of the MLP, vocabulary
    "tiny": (64, 2, 4, 2, 16, 128, 1024),
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936),
    "1.7B": (2048, 28, 16, 8, 128, 6144, 151936),
}
PEAK_TFLOPS = {"H100": 989, "H200": 989}
"""What the manufacturer states for dense bfloat16.

For other devices the measured speed of a matrix product is the peak.
"""


class Skipped(Exception):
    """A part cannot run here. The message says why."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU; speeds are recorded, but not judged")
    parser.add_argument("--small", action="store_true", help="tiny models only")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="run these parts only")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no part begins")
    parser.add_argument("--out", type=Path, help="write the JSON object to this file too")
    options = parser.parse_args()
    if not options.cpu and devices.accelerator() is None:
        parser.error("torch finds no accelerator here; --cpu --small checks what a CPU can")
    return options


class Run:
    """What the parts share: the device, the sizes of models, and what was found."""

    def __init__(self, options: argparse.Namespace):
        self.cpu, self.small, self.limit = options.cpu, options.small, options.limit
        self.device = torch.device("cpu") if options.cpu else devices.process_device()
        self.big, self.middle = ("tiny", "tiny") if options.small else ("1.7B", "0.6B")
        self.folder = tempfile.mkdtemp()
        self.figures: dict[str, Any] = {}
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def check(self, name: str, value: float, good: bool, wanted: str) -> None:
        """Record a figure, and whether it is as wanted. NaN is never good, because no comparison with it is true."""
        self.figures[name] = value
        if good:
            self.passed.append(name)
        else:
            self.failed[name] = f"{value:.6g}, expected {wanted}"

    def speed(self, name: str, value: float, good: bool, wanted: str) -> None:
        """Record a speed. It is judged on an accelerator with full sizes only."""
        if self.cpu or self.small:
            self.figures[name] = value
            self.skipped[name] = "speeds are judged on an accelerator without --small"
        else:
            self.check(name, value, good, wanted)

    def timed(self, function: Callable[[], Any]) -> tuple[float, Any]:
        """Return the seconds of a call, until the device is done, and its result."""
        self.wait()
        begun = time.perf_counter()
        result = function()
        self.wait()
        return time.perf_counter() - begun, result

    def wait(self) -> None:
        if not self.cpu:
            torch.accelerator.synchronize()

    def model(self, size: str, dtype: torch.dtype, device: torch.device | str | None = None) -> Qwen3ForCausalLM:
        """Return a model whose weights depend on the size alone."""
        width, layers, heads, keys, head, wide, words = SIZES[size]
        config = Qwen3Config(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys,
            head_dim=head, intermediate_size=wide, vocab_size=words, tie_word_embeddings=True,
            max_position_embeddings=8192, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        # tiny weights come from the CPU's generator, so that two devices get the same ones
        with torch.device("cpu" if size == "tiny" else self.device):
            return Qwen3ForCausalLM(config).to(self.device if device is None else device, dtype)

    def trainer(
        self, model: Any, batch=8, micro=8, prompt=24, new=16, updates=4, folder: str | None = None, **more: Any
    ) -> PPOv2Trainer:
        """Return a trainer on random prompts, with a reward that depends on the text."""
        options = {
            "save_strategy": "no", "num_ppo_epochs": 2, "learning_rate": 1e-4, "temperature": 1.0, "stop_token": "none",
            "report_to": [], "disable_tqdm": True,
        } | more  # fmt: skip
        args = PPOv2Config(
            output_dir=folder or tempfile.mkdtemp(dir=self.folder), use_cpu=self.cpu, total_episodes=batch * updates,
            per_device_train_batch_size=micro, gradient_accumulation_steps=batch // micro, response_length=new, **options,  # noqa: E501
        )  # fmt: skip
        rows = [{"input_ids": ids(prompt - number % 5, number)} for number in range(batch * updates)]
        return PPOv2Trainer(args, tokenizer(), model, train_dataset=rows, reward_funcs=reward)


def reward(prompts: list, completions: list, **columns: Any) -> list[float]:
    return [float(len(text) % 7) for text in completions]


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 1000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(3, 1024))])}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left",
    )  # fmt: skip
    made.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return made


def weights_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().cpu().flatten() for p in model.parameters()])


def completions(prompts: int, answers: int, prompt: int, answer: int) -> list[Completion]:
    """Return ``answers`` random completions of each of ``prompts`` prompts, with scores."""
    return [
        Completion(ids(prompt, n), ids(answer, 100 + 10 * n + a), True, f"{n}.{a}", score=float((n + a) % 3))
        for n in range(prompts)
        for a in range(answers)
    ]


def update_on(
    run: Run, device: torch.device, dtype: torch.dtype, **options: Any
) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """Make one update of the tiny model. Return old log-probabilities, metrics, and how far each weight moved."""
    model = run.model("tiny", dtype, "cpu")
    args = PPOv2Config(
        output_dir=run.folder, per_device_train_batch_size=4, num_ppo_epochs=2, learning_rate=1e-4, temperature=1.0,
        use_cpu=run.cpu, report_to=[], **options,
    )  # fmt: skip
    policy = learner.Learner(Policy("policy", model, tokenizer()), args, critic="none")
    policy.prepare(Accelerator(cpu=run.cpu), updates=1, device=device)
    before = weights_of(model)
    learning = Learning({"policy": policy}, args, device)
    batches, _ = learning.token_batches({"policy": completions(2, 4, 20, 12)})
    assign_advantages(batches["policy"], args, has_critic=False)
    old = batches["policy"].old_logprobs.double().cpu()
    metrics, _ = learning.update(batches, 0)
    return old, metrics["policy"], weights_of(model) - before


def losses(run: Run) -> None:
    """The same update in float64 on the CPU and in float32 here.

    Rounding gives about 1e-6. 1e-4 leaves room for sums in another order, and TF32 would exceed it.
    """
    logprobs, metrics, moved = update_on(run, torch.device("cpu"), torch.float64)
    logprobs_, metrics_, moved_ = update_on(run, run.device, torch.float32)
    far = (logprobs - logprobs_).abs().max().item()
    run.check("losses.logprobs", far, far < 1e-4, "a distance under 1e-4 nats from the CPU's float64")
    gaps = [abs(value - metrics_[key]) / max(1.0, abs(value)) for key, value in metrics.items()]
    run.check("losses.metrics", max(gaps), all(gap < 1e-3 for gap in gaps), "relative distances under 1e-3")
    # Adam divides by the gradient's size, so a few weights with tiny gradients move by their noise
    off = ((moved - moved_).norm() / moved.norm()).item()
    run.check("losses.weights", off, off < 0.05, "a distance under 5% of the weights' movement")


def asked(
    prompts: list[list[int]], draw: Draw, keys: Sequence[tuple] | None = None, policies: Sequence[str] = ("",)
) -> list[TokenRequest]:
    """Return a request for each prompt. The policies take turns."""
    return [
        TokenRequest(policies[n % len(policies)], prompt, draw, keys[n] if keys else None)
        for n, prompt in enumerate(prompts)
    ]


def sampling(run: Run) -> None:
    """A row is sampled alike alone and in a batch, and the sampler's probabilities are the trainer's.

    95%: kernels for other sizes may round a draw at an edge to the next id. 0.03 nats is twice what bfloat16 showed.
    """
    model = run.model("tiny", torch.float32).eval()
    count = 12 if run.small else 24
    prompts = [ids(5 + 7 * (n % 6), n) for n in range(count)]
    keys = [(0, n) for n in range(count)]
    alone, batched = (
        [s.ids for s in sample(model, asked(prompts, Draw(count, 1.0), keys), batch_size=size)] for size in (1, count)
    )
    same = sum(a == b for a, b in zip(alone, batched, strict=True)) / count
    run.check("sampling.rows", same, same >= 0.95, "at least 95% of rows as if they were alone")
    trainer = run.trainer(run.model(run.middle, torch.bfloat16), new=16 if run.small else 64)
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    gap = next(value for key, value in batch.metrics.items() if key.endswith("policy/engine_gap"))
    run.check("sampling.engine_gap", gap, gap < 0.03, "under 0.03 nats in bfloat16")


def dropped_rows(run: Run) -> None:
    """Rows may leave the batch, as rows without a group's signal do. Their index is on the device."""
    trainer = run.trainer(run.model("tiny", torch.float32))
    rows = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch()))).token_batches["policy"]
    index = torch.tensor([5, 1, 2], device=rows.input_ids.device)
    kept = GlobalBatch.of(rows).take(index).back(rows)
    right = sum(torch.equal(kept.input_ids[k, :n], rows.input_ids[r, :n])
                for k, (r, n) in enumerate(zip((5, 1, 2), kept.tree.lengths, strict=True)))  # fmt: skip
    run.check("dropped_rows.kept", right, right == 3, "3 rows, those of the index")


def resume(run: Run) -> None:
    """A run that goes on from a checkpoint ends where the whole run ends.

    2% of the movement: an accelerator's sums vary from run to run, and Adam enlarges that.
    """
    trainers = [
        run.trainer(
            run.model("tiny", torch.float32), folder=f"{run.folder}/{name}", save_strategy="steps", save_steps=2
        )
        for name in ("whole", "resumed")
    ]
    whole, resumed = (trainer.learners["policy"].model for trainer in trainers)
    start = weights_of(whole)
    trainers[0].train()
    trainers[1].train(resume_from_checkpoint=f"{run.folder}/whole/checkpoint-2")
    off = ((weights_of(whole) - weights_of(resumed)).norm() / (weights_of(whole) - start).norm()).item()
    run.check("resume.distance", off, off < 0.02, "under 2% of the movement")


def masters(run: Run) -> None:
    """500 steps of 1e-6 on bfloat16 weights add up to 5e-4.

    That is several times the distance of neighbouring weights, so rounding at the end matters little. A single step is
    far below that distance, so weights without master weights would hardly move.
    """
    trainer = run.trainer(run.model("tiny", torch.bfloat16), learning_rate=1e-6)
    policy = trainer.learners["policy"]
    weight = max(policy.model.parameters(), key=lambda p: p.numel())
    sign = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)).to(weight.device) * 2.0 - 1
    before = weight.detach().float().clone()
    for _ in range(500):
        for parameter in policy.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        weight.grad = (1e-3 * sign).to(weight.dtype)
        policy.step()
    moved = -((weight.detach().float() - before) * sign).mean().item() / 500e-6
    run.check("masters.movement", moved, 0.8 < moved < 1.2, "0.8 to 1.2 of float32's movement")


def ceilings(run: Run) -> None:
    """How fast this device multiplies matrices and copies memory. Other parts are measured by it."""
    size = 512 if run.small else 8192
    x = torch.randn(size, size, device=run.device, dtype=torch.bfloat16)
    run.timed(lambda: x @ x)
    run.figures["ceilings.tflops"] = 20 * size**3 / run.timed(lambda: [x @ x for _ in range(10)])[0] / 1e12
    run.figures["ceilings.copy_tb_s"] = 40 * size**2 / run.timed(lambda: [x.clone() for _ in range(10)])[0] / 1e12


def logprobs(run: Run) -> None:
    """Log-probabilities of tokens are bound by memory: forward and backward read logits, and write their gradient.

    That is 6 bytes a logit. A float32 copy and the passes over it are 66 bytes, eleven times as much. Fourteen times as
    long leaves room for launches of slices, but not of rows.
    """
    if "ceilings.copy_tb_s" not in run.figures:
        ceilings(run)
    rows, words = (64, 1024) if run.small else (8192, 151936)
    logits = torch.randn(rows, words, device=run.device, dtype=torch.bfloat16).requires_grad_()
    wanted = torch.arange(rows, device=run.device) % words
    found = maths.token_logprobs(logits, wanted)
    found.sum().backward()  # the first call asks the device for memory
    expected = logits[:64].detach().float().log_softmax(-1).gather(1, wanted[:64, None])[:, 0]
    far = (found[:64].detach().float() - expected).abs().max().item()
    run.check("logprobs.exact", far, far < 1e-2, "under 0.01 nats from log_softmax in float32")
    took = min(run.timed(lambda: maths.token_logprobs(logits, wanted).sum().backward())[0] for _ in range(3))
    times = took * run.figures["ceilings.copy_tb_s"] * 1e12 / (6 * rows * words)
    run.speed("logprobs.times_of_bandwidth", times, times < 14, "under 14")


def recorded(run: Run) -> None:
    """Recorded steps of decoding choose the tokens of steps that the host launches, and are faster.

    The host launches 1,900 kernels a step. Recorded, they leave the device no time to wait.
    """
    rows, prompt, new = (8, 24, 16) if run.small else (64, 256, 128)
    model = run.model("tiny", torch.float32).eval()
    prompts, keys = [ids(5 + n % 9, n) for n in range(24)], [(0, n) for n in range(24)]
    stop = frozenset(range(0, 1024, 40))  # rows end at different times
    ways = {"launched": False, "recorded": True}

    def sampled(way: str, *arguments: Any, **options: Any) -> Any:
        with patch("trl_ext.sampling.batch.records", lambda base, steps: ways[way]):
            return sample(*arguments, **options)

    found = {
        way: [s.ids for s in sampled(way, model, asked(prompts, Draw(64, 1.0, stop_ids=stop), keys))] for way in ways
    }
    same = sum(a == b for a, b in zip(found["recorded"], found["launched"], strict=True)) / 24
    run.check("recorded.rows", same, same >= 0.95, "at least 95% of rows as launched steps sample them")
    model, prompts = run.model(run.big, torch.bfloat16).eval(), [ids(prompt, n) for n in range(rows)]
    took = {
        way: min(run.timed(lambda way=way: sampled(way, model, asked(prompts, Draw(new, 1.0))))[0] for _ in range(2))
        for way in ways
    }
    run.figures["recorded.tokens_s"] = {way: rows * new / seconds for way, seconds in took.items()}
    many = asked(4 * prompts, Draw(new, 1.0))
    took_many, _ = run.timed(lambda: sampled("recorded", model, many, batch_size=4 * rows))
    run.figures["recorded.tokens_s_of_four_times_the_rows"] = 4 * rows * new / took_many
    ratio = took["launched"] / took["recorded"]
    run.speed("recorded.times_as_fast", ratio, ratio > 1.2, "above 1.2")


def speed(run: Run) -> None:
    """Rollouts and updates of a model of Qwen3-1.7B's shape.

    3,000 tokens a second is a twentieth of what reading the weights once a step for 64 rows allows. An update is
    compared with the forwards and backwards of the model alone, which have neither padding nor an optimizer.
    """
    took, used, trained = one_update(run)
    run.figures["speed.seconds"] = took
    run.figures["speed.peak_bytes"] = devices.peak_bytes([run.device])
    batch, micro, prompt, new, epochs = update_sizes(run)
    run.speed(
        "speed.rollout_tokens_s", batch * new / took["collect"], batch * new / took["collect"] > 3000, "above 3,000"
    )
    run.figures["speed.update_mfu"] = used
    one = min(run.timed(lambda: bare(run, trained, micro, prompt + new - 1, new))[0] for _ in range(2))
    times = took["update"] / (epochs * batch / micro * one)
    run.speed("speed.times_of_bare", times, times < 1.3, "under 1.3")


def liger(run: Run) -> None:
    """The speed of an update with Liger's kernels, which compute what transformers computes.

    35% of the peak is what well-kept trainers reach with sequences of this length.
    """
    if run.cpu:
        raise Skipped("Liger's kernels run on accelerators only")
    if importlib.util.find_spec("liger_kernel") is None:
        raise Skipped("the package liger-kernel is not installed")
    logprobs, _, moved = update_on(run, run.device, torch.float32)
    logprobs_, _, moved_ = update_on(run, run.device, torch.float32, use_liger_kernel=True)
    far = (logprobs - logprobs_).abs().max().item()
    run.check("liger.logprobs", far, 0 < far < 1e-4, "a distance under 1e-4 nats from transformers, and not 0")
    off = ((moved - moved_).norm() / moved.norm()).item()
    run.check("liger.weights", off, off < 0.05, "a distance under 5% of the weights' movement")
    took, used, _ = one_update(run, use_liger_kernel=True)
    run.figures["liger.seconds"] = took
    run.speed("liger.update_mfu", used, used > 0.35, f"above 0.35 of {peak_tflops(run):.0f} TFLOP/s")


def update_sizes(run: Run) -> tuple[int, int, int, int, int]:
    """Return rows, rows of a micro-batch, tokens of a prompt and of an answer, and epochs of one update."""
    return (8, 8, 24, 16, 2) if run.small else (64, 16, 256, 256, 2)


def one_update(run: Run, **options: Any) -> tuple[dict[str, float], float, Any]:
    """Return the seconds of each phase of an update, its share of the device's peak, and the model."""
    batch, micro, prompt, new, epochs = update_sizes(run)
    width, layers, heads, _, head, _, words = SIZES[run.big]
    model = run.model(run.big, torch.bfloat16)
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    trainer = run.trainer(
        model, batch=batch, micro=micro, prompt=prompt, new=new, num_ppo_epochs=epochs, learning_rate=1e-6, **options
    )
    for _ in range(2):  # the first time warms up
        collect, scored = run.timed(lambda: trainer.collect(trainer.next_batch()))
        advantage, ready = run.timed(lambda scored=scored: trainer.advantage(trainer.score(scored)))
        update, _ = run.timed(lambda ready=ready: trainer.update(ready))
        trainer.finish_update(ready)
    read = prompt + new - 1
    flops = epochs * batch * (6 * body * read + 6 * width * words * new + 6 * layers * heads * head * read**2)
    took = {"collect": collect, "advantage": advantage, "update": update}
    return took, flops / update / 1e12 / peak_tflops(run), trainer.learners["policy"].model


def peak_tflops(run: Run) -> float:
    if "ceilings.tflops" not in run.figures:
        ceilings(run)
    name = device_name(run)
    return next((tflops for known, tflops in PEAK_TFLOPS.items() if known in name), run.figures["ceilings.tflops"])


def bare(run: Run, model: Any, rows: int, length: int, trained: int) -> None:
    """Read rows of equal lengths forward and backward, with a loss at the last ``trained`` tokens of each."""
    read = torch.tensor([ids(length, number) for number in range(rows)], device=run.device)
    logits = model(input_ids=read, logits_to_keep=trained, use_cache=False).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, read[:, -trained:].flatten()).backward()
    model.zero_grad()


def adapters(run: Run) -> None:
    """Rows of three adapters in one batch say what each adapter says alone, and how fast each way is."""
    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    names = ("x", "y", "z")
    own = {name: name for name in names}

    def team(size: str, dtype: torch.dtype) -> Any:
        model = get_peft_model(run.model(size, dtype), config, adapter_name="x", autocast_adapter_dtype=False)
        for name in names[1:]:
            model.add_adapter(name, config, autocast_adapter_dtype=False)
        return model.eval()

    model, prompts = team("tiny", torch.float32), [ids(12, n) for n in range(24)]
    keys = [(0, n) for n in range(24)]
    mixed = sample(model, asked(prompts, Draw(12), keys, names), adapters=own)
    same = 0
    for place, name in enumerate(names):
        model.set_adapter(name)
        alone = sample(model.get_base_model(), asked(prompts[place::3], Draw(12), keys[place::3]))
        same += sum(a.ids == b.ids for a, b in zip(alone, mixed[place::3], strict=True))
    run.check("adapters.rows", same / 24, same / 24 >= 0.95, "at least 95% of rows as each adapter alone says them")
    model, prompts = team(run.middle, torch.bfloat16), [[5 + n] * 32 for n in range(48)]
    most = Draw(8 if run.small else 64)

    def plain() -> None:
        for name in names:
            model.set_adapter(name)
            sample(model.get_base_model(), asked(prompts[:16], most))

    ways = {"mixed": lambda: sample(model, asked(prompts, most, policies=names), adapters=own), "plain": plain}
    run.figures["adapters.tokens_s"] = {
        way: 48 * most.max_tokens / min(run.timed(call)[0] for _ in range(2)) for way, call in ways.items()
    }


def trees(run: Run) -> None:
    """Answers to one prompt are read as a tree, as fast as rows at least, with equal log-probabilities."""
    found = {}
    for way in ("trees", "rows"):
        with patch.object(learner, "tree_limits", learner.tree_limits if way == "trees" else lambda model: None):
            found[way] = update_on(run, run.device, torch.float32)[0]
    far = (found["trees"] - found["rows"]).abs().max().item()
    run.check("trees.logprobs", far, far < 1e-4, "under 1e-4 nats from rows")
    took = {way: grouped_updates(run, way) for way in ("rows", "trees")}
    run.figures["trees.seconds"] = took
    ratio = took["rows"] / took["trees"]
    run.speed("trees.times_as_fast_as_rows", ratio, ratio > 1, "above 1, because they read a third of the tokens")


def grouped_updates(run: Run, way: str) -> float:
    """Return the seconds of the fastest update of 8 groups of 8 answers, in one of the ways of packed_updates.py."""
    folder = Path(run.folder) / "grouped"
    if not folder.exists():
        run.model(run.middle, torch.bfloat16).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    # small micro-batches would measure how fast the host launches kernels
    sizes = (2, 4, 24, 8, 8) if run.small else (8, 8, 512, 128, 32)
    names = ("groups", "answers", "prompt_len", "answer_len", "micro")
    work = argparse.Namespace(
        **dict(zip(names, sizes, strict=True)), model=str(folder), dtype="bfloat16", epochs=2, updates=2, variants=[way],  # noqa: E501
        highest=1000, cpu=run.cpu,
    )  # fmt: skip
    with patch.object(learner, "tree_limits", learner.tree_limits):  # the way "rows" replaces it
        update = packed_updates.trl_updates if way == "trl" else packed_updates.maporl_updates
        starts = [clock for clock, _ in update(work)]
    return min(end - start for start, end in pairwise(starts[1:]))  # the first one warms up


def two_agents(run: Run) -> None:
    """Two agents with adapters of one base learn by the trainer of teams, and the base stays as it is."""
    from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection, Team

    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    shared = get_peft_model(run.model("tiny", torch.float32), config, adapter_name="ann")
    shared.add_adapter("bob", config)
    team = Team([Agent(name, shared, tokenizer(), adapter=name) for name in ("ann", "bob")])
    args = MultiAgentPPOConfig(
        output_dir=tempfile.mkdtemp(dir=run.folder), per_device_train_batch_size=4, total_episodes=8, response_length=8,
        temperature=1.0, num_ppo_epochs=2, learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=run.cpu,
    )  # fmt: skip

    def score(dialogues: list, task: Any) -> list[list[float]]:
        return [[float(len(u.response_ids) + sum(u.response_ids)) % 7 for u in d.utterances] for d in dialogues]

    trainer = MultiAgentPPOTrainer(
        args, team, Arithmetic(largest=9), Debate(turns=2), None, RewardSection(), sources={"label": score}
    )
    before = {name: p.detach().float().cpu().clone() for name, p in shared.named_parameters()}
    trainer.train()
    moved = {
        name: (p.detach().float().cpu() - before[name]).abs().max().item() for name, p in shared.named_parameters()
    }
    for agent in ("ann", "bob"):
        most = max(value for name, value in moved.items() if f".{agent}." in name)
        run.check(f"two_agents.{agent}", most, 1e-4 < most < 1, "an adapter that moved by 1e-4 to 1")
    most = max(value for name, value in moved.items() if "lora" not in name)
    run.check("two_agents.base", most, most == 0, "a base that did not move")


def team(run: Run) -> None:
    """One update of two policies with weights of their own, which debate over two turns, and how long its phases take.

    The engine's probabilities are the trainer's for both, after weights of both have moved.
    """
    from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection, Team

    questions, new = (4, 8) if run.small else (32, 256)
    models = {"ann": run.model(run.big, torch.bfloat16), "bob": run.model(run.middle, torch.bfloat16)}
    agents = [Agent(name, model, tokenizer()) for name, model in models.items()]
    args = MultiAgentPPOConfig(
        output_dir=tempfile.mkdtemp(dir=run.folder), per_device_train_batch_size=questions, num_ppo_epochs=2,
        total_episodes=2 * questions, response_length=new, temperature=1.0, stop_token="none", learning_rate=1e-5,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=run.cpu, gradient_checkpointing=True,
    )  # fmt: skip

    def score(dialogues: list, task: Any) -> list[list[float]]:
        return [[float(sum(u.response_ids) % 7) for u in d.utterances] for d in dialogues]

    trainer = MultiAgentPPOTrainer(
        args, Team(agents), Arithmetic(largest=9), Debate(turns=2), None, RewardSection(), sources={"label": score}
    )
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "time/collect" in entry][-1]
    run.figures["team.seconds"] = {key[5:]: value for key, value in last.items() if key.startswith("time/")}
    run.figures["team.rollout_tokens_s"] = questions * 2 * 2 * new / last["time/collect"]
    run.figures["team.peak_bytes"] = devices.peak_bytes([run.device])
    for agent in models:
        gap = last[f"{agent}/policy/engine_gap"]
        run.check(f"team.{agent}.engine_gap", gap, gap < 0.03, "under 0.03 nats in bfloat16")


def vllm(run: Run) -> None:
    """vLLM in the trainer's process takes new weights, and its probabilities are the trainer's after an update."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("the package vllm is not installed")
    if run.cpu:
        raise Skipped("vLLM in the trainer's process needs an accelerator")
    from maporl import VLLMSampler

    folder = f"{run.folder}/vllm"
    run.model(run.middle, torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    args = PPOv2Config(
        output_dir=tempfile.mkdtemp(dir=run.folder), per_device_train_batch_size=8, total_episodes=24, response_length=64,  # noqa: E501
        temperature=1.0, stop_token="none", learning_rate=1e-4, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": ids(24, n)} for n in range(24)]
    sampler = VLLMSampler(colocate={}, base=folder)
    trainer = PPOv2Trainer(args, tokenizer(), model, train_dataset=rows, reward_funcs=reward, sampler=sampler)
    trainer.train()
    gaps = [entry["policy/engine_gap"] for entry in trainer.state.log_history if "policy/engine_gap" in entry]
    # old weights in the engine would show after the first update, which moves them by 1e-4 a step
    run.check("vllm.engine_gap", max(gaps, default=float("nan")), bool(gaps) and max(gaps) < 0.05, "under 0.05 nats")


def trl(run: Run) -> None:
    """The updates of ``trees`` by TRL's GRPOTrainer.

    Trees read a third of the tokens. Reading blocks of keys, and the optimizer, leave 1.5 to 1.8 of 3.
    """
    if tuple(map(int, version("trl").split(".")[:2])) < (1, 16):
        raise Skipped(f"the comparison is with TRL 1.16 or later, and {version('trl')} is installed")
    took = {way: grouped_updates(run, way) for way in ("trl", "trees")}
    run.figures["trl.seconds"] = took
    ratio = took["trl"] / took["trees"]
    run.speed("trl.times_as_fast", ratio, ratio > 1.2, "above 1.2")


PARTS: dict[str, Callable[[Run], None]] = {
    part.__name__: part
    for part in (
        losses, sampling, dropped_rows, resume, masters, ceilings, logprobs, recorded, speed,
        liger,  # before other parts, which show that it leaves nothing behind
        adapters, trees, two_agents, team, vllm, trl,
    )
}  # fmt: skip


def device_name(run: Run) -> str:
    if run.cpu:
        return platform.processor() or platform.machine()
    module = torch.get_device_module(run.device)
    return module.get_device_name() if run.device.type in ("cuda", "xpu") else str(run.device)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "peft", "trl", "liger-kernel", "vllm"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def attempt(run: Run, name: str, part: Callable[[Run], None]) -> None:
    """Run one part. Whatever it raises is a failed check, so that one run finds all faults."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trainers print
            run.seconds[name] = round(run.timed(lambda: part(run))[0], 2)
    except Skipped as reason:
        run.skipped[name] = str(reason)
    except Exception as error:
        run.failed[name] = f"{type(error).__name__}: {error}"[:500]
        traceback.print_exc()
    if not run.cpu:
        with contextlib.suppress(AttributeError, RuntimeError):  # a device that has no cache, or that has failed
            torch.get_device_module(run.device).empty_cache()


def main() -> None:
    options = parse()
    run, begun = Run(options), time.monotonic()
    for name, part in PARTS.items():
        if options.only and name not in options.only:
            run.skipped[name] = "not among --only"
        elif time.monotonic() - begun > options.limit:
            run.failed[name] = f"did not begin within --limit {options.limit:g} seconds"
        else:
            attempt(run, name, part)
        if options.out is not None:  # after each part, so that a run that is stopped has told what it found
            options.out.write_text(json.dumps(result_of(run), indent=1) + "\n")
    print(json.dumps(result_of(run)))
    for name, found in run.failed.items():
        print(f"FAILED {name}: {found}", file=sys.stderr)
    sys.exit(bool(run.failed))


def result_of(run: Run) -> dict[str, Any]:
    return {
        "date": str(datetime.date.today()), "device": device_name(run), "small": run.small, "versions": versions(),
        "passed": run.passed, "failed": run.failed, "skipped": run.skipped, "figures": run.figures,
        "seconds": run.seconds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
