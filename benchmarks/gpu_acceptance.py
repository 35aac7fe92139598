"""Check and measure on one accelerator what a CPU cannot show. It prints one JSON object.

    python benchmarks/gpu_acceptance.py > benchmarks/results/accelerator.json
    python benchmarks/gpu_acceptance.py --cpu --small        # the program itself, in less than a minute (make test)
    python benchmarks/gpu_acceptance.py --only speed trees   # some parts

It needs no network and no data: models are random, of Qwen3's shapes. Where TRL or other packages are not installed, a
folder with their unpacked wheels on PYTHONPATH serves. With ``--trl-python`` (a Python with TRL 1.12) and ``--trl-script``
(``compare_with_trl_ppo.py`` says what it must print) TRL's trainer does the same work.

A part that raises an error has failed, and the other parts go on. A part that cannot run here says why in ``skipped``, and
has not passed. The exit status is 1 if a check has failed, and the last key, ``failed``, names it.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
if "--cpu" in sys.argv:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from maporl import Agent, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team, TinySection
from maporl.team.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext import PPOv2Config, PPOv2Trainer, maths
from trl_ext.forward import read_actions, tree_limits
from trl_ext.lora_merge import merged
from trl_ext.sampling import Sampling, sample
from trl_ext.token_batch import Completion, build_token_batch

SHAPES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "intermediate_size": 128, "head_dim": 16, "vocab_size": 1024},
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "intermediate_size": 3072, "head_dim": 128, "vocab_size": 151936},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "intermediate_size": 6144, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
PEAK_TFLOPS = 989
"""The bfloat16 peak of an H100 and an H200, in TFLOP/s (NVIDIA's data sheet, dense)."""


class Skipped(Exception):
    """A part cannot run on this machine. The message says why."""


@dataclass
class Setting:
    """Where the parts run, and how large their models are."""

    cpu: bool
    small: bool
    trl_python: str | None
    trl_script: str | None
    folder: Path

    @property
    def device(self) -> str:
        """The device's kind."""
        kind = None if self.cpu else torch.accelerator.current_accelerator()
        return "cpu" if kind is None else kind.type

    @property
    def large(self) -> str:
        """The shape that speed is measured with."""
        return "tiny" if self.small else "1.7B"

    @property
    def middle(self) -> str:
        """The shape of comparisons."""
        return "tiny" if self.small else "0.6B"

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return how long ``run`` takes until the device has finished."""
        self.wait()
        begun = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.accelerator.synchronize()


@dataclass
class Part:
    """What a part has found: checks with what was wanted, and figures that are only written down."""

    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def check(self, name: str, value: float, wanted: str, passed: bool | None) -> None:
        """Write a check down. ``passed`` is None where a figure of this size says nothing, as speed on a CPU."""
        self.checks[name] = {"value": value, "wanted": wanted, "passed": None if passed is None else bool(passed)}


# -- what the parts share ---------------------------------------------------------------------------------------------


def model_of(shape: str, dtype: torch.dtype, device: str) -> Any:
    """Return a random model of one of :data:`SHAPES`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(dtype)


def trainer_of(
    setting: Setting,
    model: Any,
    batch: int = 8,
    prompt: int = 24,
    new: int = 16,
    folder: str | None = None,
    **more: Any,
) -> PPOv2Trainer:
    """Return a trainer of random prompts, whose completions have ``new`` tokens."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"input_ids": torch.randint(3, 1000, (prompt - i % 5,), generator=generator).tolist()} for i in range(4 * batch)
    ]
    micro = more.pop("micro", batch)
    options: dict[str, Any] = {
        "save_strategy": "no", "num_ppo_epochs": 2, "learning_rate": 1e-4, "temperature": 1.0, "stop_token": "none",
        "report_to": [], "disable_tqdm": True, "use_cpu": setting.cpu, "response_length": new,
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": batch // micro,
        "total_episodes": 4 * batch, "num_mini_batches": 1,
    }  # fmt: skip
    args = PPOv2Config(output_dir=folder or tempfile.mkdtemp(dir=setting.folder), **{**options, **more})
    return PPOv2Trainer(
        args,
        build_tiny_tokenizer(TinySection()),
        model,
        train_dataset=rows,
        reward_funcs=remainder,
    )


def remainder(prompts: list, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Reward each completion by the sum of its ids, modulo 7."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def weights_of(trainer: PPOv2Trainer) -> Tensor:
    """Return all weights of a trainer's policy, as one float32 vector on the CPU."""
    return torch.cat([p.detach().float().cpu().flatten() for p in trainer.learners["policy"].model.parameters()])


def one_update(setting: Setting, completions: list[Completion] | None) -> dict[str, Any]:
    """Do one float32 update, on given completions or on those that are sampled here. Return what it computed."""
    trainer = trainer_of(setting, model_of("tiny", torch.float32, "cpu"), micro=4)
    with trainer.training():
        batch = trainer.next_batch()
        batch = trainer.collect(batch)
        if completions is not None:
            batch.completions = completions
        batch = trainer.advantage(trainer.score(batch))
        logprobs = batch.token_batches["policy"].old_logprobs.cpu()
        batch = trainer.update(batch)
        trainer.finish_update(batch)
    return {
        "completions": batch.completions,
        "logprobs": logprobs,
        "metrics": {k: v for k, v in batch.metrics.items() if not k.startswith(("time/", "memory/", "tokens_per"))},
        "weights": weights_of(trainer),
    }


# -- parts ------------------------------------------------------------------------------------------------------------


def losses(setting: Setting, part: Part) -> None:
    """The same completions give the same numbers on the CPU, in a process of its own, and here, in float32."""
    file = setting.folder / "reference.pt"
    command = [sys.executable, __file__, "--cpu", "--small", "--reference", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    there = torch.load(file, weights_only=False)  # what this program has just written
    here = one_update(setting, there["completions"])
    far = (there["logprobs"] - here["logprobs"]).abs().max().item()
    part.check("logprobs", far, "below 1e-4 nats", far < 1e-4)
    apart = {
        k: abs(v - here["metrics"][k]) / max(1.0, abs(v)) for k, v in there["metrics"].items() if k in here["metrics"]
    }
    worst = max(apart, key=apart.__getitem__)
    part.figures["metric_furthest_apart"] = worst
    part.check("metrics", apart[worst], "below 1e-3 of their size", apart[worst] < 1e-3)
    far = (there["weights"] - here["weights"]).abs().max().item()
    # AdamW's first steps have the size of the learning rate, 1e-4, whatever the gradient is, so a sign may differ
    part.check("weights", far, "below 5e-4, five steps", far < 5e-4)


def sampling(setting: Setting, part: Part) -> None:
    """A row's answer does not depend on its neighbours, and the sampler's probabilities are the trainer's."""
    model = model_of("tiny", torch.float32, setting.device).eval()
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 1000, (5 + 7 * (i % 6),), generator=generator).tolist() for i in range(24)]
    keys = [(0, i) for i in range(24)]
    alone, together = (
        [answer.ids for answer in sample(model, prompts, Sampling(24, 1.0, batch_size=size), keys)] for size in (1, 24)
    )
    same = sum(one == other for one, other in zip(alone, together, strict=True)) / 24
    part.check("same_alone_and_in_a_batch", same, "at least 0.95: rounding may change a draw", same >= 0.95)
    trainer = trainer_of(
        setting, model_of(setting.middle, torch.bfloat16, setting.device), new=16 if setting.small else 64
    )
    with trainer.training():
        batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    gap = batch.metrics["policy/engine_gap"]
    part.check("engine_gap_bfloat16", gap, "below 0.03 nats", gap < 0.03)


def dropped_rows(setting: Setting, part: Part) -> None:
    """Rows without weight leave the batch, wherever their tensors are."""
    completions = [Completion([5, 6], [7, 8 + i], True, str(i)) for i in range(6)]
    rows = build_token_batch(completions, setting.device)
    kept = rows.take(torch.tensor([4, 1, 2]))
    part.check("rows", len(kept), "3", len(kept) == 3 and kept.labels == ["4", "1", "2"])
    ids = kept.input_ids[:, -1].tolist()
    part.check("their_tokens", float(ids == [12, 9, 10]), "1: those of rows 4, 1 and 2", ids == [12, 9, 10])


def resume(setting: Setting, part: Part) -> None:
    """A run that is resumed ends near the one that was not interrupted. On a GPU this is not bit for bit."""
    folders = [str(setting.folder / name) for name in ("whole", "resumed")]
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole, parts = (
        trainer_of(setting, model_of("tiny", torch.float32, "cpu"), folder=folder, **options) for folder in folders
    )
    start = weights_of(whole)
    whole.train()
    parts.train(resume_from_checkpoint=f"{folders[0]}/checkpoint-2")
    distance = ((weights_of(whole) - weights_of(parts)).norm() / (weights_of(whole) - start).norm()).item()
    part.check("distance", distance, "below 2% of the movement", distance < 0.02)


def masters(setting: Setting, part: Part) -> None:
    """Fifty steps of 1e-6 move bfloat16 weights as far as float32 weights, because float32 master weights are stepped."""
    trainer = trainer_of(setting, model_of("tiny", torch.bfloat16, "cpu"), learning_rate=1e-6, total_episodes=800)
    learner = trainer.learners["policy"]
    parameter, master = max(learner.strategy.masters, key=lambda pair: pair[0].numel())
    generator = torch.Generator().manual_seed(3)
    sign = (torch.randint(0, 2, parameter.shape, generator=generator) * 2.0 - 1).to(parameter.device)
    before = master.detach().clone()
    for _ in range(50):
        for _, other in learner.strategy.masters:
            other.grad = torch.zeros_like(other)
        master.grad = 1e-3 * sign
        learner.step()
    moved = (-(master.detach() - before) * sign).mean().item() / 50e-6
    part.check("movement", moved, "0.8 to 1.2 of 50 steps of 1e-6", 0.8 < moved < 1.2)
    off = (parameter.detach().float() - master.detach()).abs().max().item()
    bound = 2**-8 * master.detach().abs().max().item()
    part.check("rounded_copy", off, "below a bfloat16 rounding of the largest weight", off <= bound)


def ceilings(setting: Setting, part: Part) -> None:
    """What this device can do: multiplications, and bytes copied."""
    size = 512 if setting.small else 8192
    x = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
    x @ x
    part.figures["matmul_tflops"] = 20 * size**3 / setting.seconds(lambda: [x @ x for _ in range(10)]) / 1e12
    part.figures["copy_tb_per_second"] = 40 * x.numel() / setting.seconds(lambda: [x.clone() for _ in range(10)]) / 1e12


def logprobs(setting: Setting, part: Part) -> None:
    """Log-probabilities of sampled tokens take a small multiple of the time in which their logits can be moved."""
    rows, words = (64, 1024) if setting.small else (8192, 151936)
    x = torch.randn(rows, words, device=setting.device, dtype=torch.bfloat16).requires_grad_()
    ids = torch.zeros(rows, dtype=torch.long, device=setting.device)

    def both() -> None:
        maths.token_logprobs(x, ids).sum().backward()

    both()
    took = setting.seconds(both)
    one_copy = Part()
    ceilings(setting, one_copy)
    # forward and backward read the logits once each and write their gradient once: 6 bytes a logit
    needed = 6 * rows * words / (one_copy.figures["copy_tb_per_second"] * 1e12)
    part.figures["microseconds_per_token"] = 1e6 * took / rows
    passed = None if setting.small else took < 8 * needed
    part.check("times_the_bandwidth", took / needed, "below 8: a few passes over the logits", passed)


def speed(setting: Setting, part: Part) -> None:
    """Rollout and update of one policy with all weights, without gradient checkpointing."""
    size, prompt, new, epochs = (8, 24, 16, 2) if setting.small else (64, 256, 256, 2)
    model = model_of(setting.large, torch.bfloat16, setting.device)
    trainer = trainer_of(
        setting, model, size, prompt, new, micro=min(16, size), num_ppo_epochs=epochs, learning_rate=1e-6
    )
    shape, width = SHAPES[setting.large], prompt + new - 1
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    attention = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] * width**2
    # 2 FLOPs a weight and token forward, and 4 backward; causal attention reads half of the keys
    flops = epochs * size * (6 * body * width + 6 * shape["hidden_size"] * shape["vocab_size"] * new + 6 * attention)
    took: dict[str, float] = {}
    with trainer.training():
        for _ in range(2):  # the first one warms up
            batch = trainer.next_batch()
            for name in ("collect", "score", "advantage", "update"):
                setting.wait()
                begun = time.perf_counter()
                batch = getattr(trainer, name)(batch)
                setting.wait()
                took[name] = time.perf_counter() - begun
            trainer.finish_update(batch)
    part.figures["seconds"] = took
    part.figures["peak_gib"] = batch.metrics.get("memory/peak")
    rate, mfu = size * new / took["collect"], flops / took["update"] / 1e12 / PEAK_TFLOPS
    part.check("rollout_tokens_per_second", rate, "above 3000", None if setting.small else rate > 3000)
    part.check("update_mfu", mfu, f"above 0.35 of {PEAK_TFLOPS} TFLOP/s", None if setting.small else mfu > 0.35)


def trees(setting: Setting, part: Part) -> None:
    """Eight answers to each of some prompts, read as trees and as rows: equal in float32, and faster in bfloat16."""
    generator = torch.Generator().manual_seed(4)
    groups, prompt, new = (2, 64, 8) if setting.small else (8, 256, 64)
    prompts = [torch.randint(3, 1000, (prompt,), generator=generator).tolist() for _ in range(groups)]
    completions = [
        Completion(prompts[i % groups], torch.randint(3, 1000, (new,), generator=generator).tolist(), True, str(i))
        for i in range(8 * groups)
    ]
    rows = build_token_batch(completions, setting.device)
    targets = rows.input_ids[rows.sampled_mask]

    def read(model: Any, as_trees: bool) -> Tensor:
        limits = tree_limits(model) if as_trees else None
        return read_actions(model, rows.to_read(limits), targets, 1.0, contextlib.nullcontext)[1]

    model = model_of("tiny", torch.float32, setting.device)
    assert rows.to_read(tree_limits(model)).layout is not None  # otherwise both ways are the same
    with torch.no_grad():
        far = (read(model, True) - read(model, False)).abs().max().item()
    part.check("logprobs", far, "below 1e-4 nats", far < 1e-4)
    model = model_of(setting.middle, torch.bfloat16, setting.device)
    took = {}
    for name, as_trees in (("trees", True), ("rows", False)):
        read(model, as_trees).sum().backward()  # warms up
        took[name] = setting.seconds(lambda as_trees=as_trees: read(model, as_trees).sum().backward())
    part.figures["seconds"] = took
    times = took["rows"] / took["trees"]
    part.check("times_as_fast", times, "above 1.5", None if setting.small else times > 1.5)


def adapters(setting: Setting, part: Part) -> None:
    """How fast three adapters of one base answer, and that each answers in a mixed batch as it does alone."""
    names = ("x", "y", "z")
    config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    for dtype, shape in ((torch.float32, "tiny"), (torch.bfloat16, setting.middle)):
        model = get_peft_model(
            model_of(shape, dtype, setting.device), config, adapter_name=names[0], autocast_adapter_dtype=False
        )
        for name in names[1:]:
            model.add_adapter(name, config, autocast_adapter_dtype=False)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        model.eval()
        rows, keys = [[5 + i] * 32 for i in range(48)], [(0, i) for i in range(48)]
        options = Sampling(8 if setting.small else 64, 1.0)

        def alone(name: str, merge: bool, model=model, rows=rows, keys=keys, options=options) -> list[list[int]]:
            own = slice(names.index(name), None, 3)
            if not merge:
                model.set_adapter(name)
                return [a.ids for a in sample(model.get_base_model(), rows[own], options, keys[own])]
            with merged(model, name) as base:
                return [a.ids for a in sample(base, rows[own], options, keys[own])]

        def mixed(model=model, rows=rows, keys=keys, options=options) -> list[list[int]]:
            return [a.ids for a in sample(model, rows, options, keys, names * 16)]

        if dtype == torch.float32:
            expected = {name: alone(name, False) for name in names}
            found = mixed()
            same = sum(found[i::3] == expected[name] for i, name in enumerate(names)) / 3
            part.check("same_alone_and_mixed", same, "1: the same tokens for each adapter", same == 1)
            continue
        ways = {
            "mixed": mixed,
            "plain": lambda: [alone(name, False) for name in names],
            "merged": lambda: [alone(name, True) for name in names],
        }
        part.figures["tokens_per_second"] = {
            way: 48 * options.max_new_tokens / min(setting.seconds(run) for _ in range(2)) for way, run in ways.items()
        }


def team(setting: Setting, part: Part) -> None:
    """Two adapters of one base debate for two updates, and learn; the run's folder has their weights."""
    tiny = TinySection(alphabet="0123456789+=; ", context=512)
    tokenizer = build_tiny_tokenizer(tiny)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = get_peft_model(build_tiny_model(tiny, tokenizer), config, adapter_name="ann")
    model.add_adapter("bob", config)
    agents = [Agent(name, model, tokenizer, adapter=name) for name in ("ann", "bob")]
    folder = setting.folder / "team"
    args = MultiAgentPPOConfig(
        output_dir=str(folder), use_cpu=setting.cpu, per_device_train_batch_size=8, gradient_accumulation_steps=1,
        num_mini_batches=1, response_length=8, learning_rate=1e-3, report_to=[], disable_tqdm=True, save_strategy="no",
        total_episodes=16,
    )  # fmt: skip
    before = {n: p.detach().float().cpu().clone() for n, p in model.named_parameters() if "lora_B" in n}
    rows = [{"prompt": f"{i}+{i}="} for i in range(16)]
    trainer = MultiAgentPPOTrainer(
        team=Team(agents), train_dataset=rows, reward_funcs=remainder, protocol=Debate(turns=2), args=args
    )
    metrics = trainer.train()
    bad = [k for k, v in metrics.items() if not math.isfinite(v)]
    part.check("metrics_not_finite", len(bad), "0", not bad)
    still = [
        n for n, p in model.named_parameters() if n in before and bool((p.detach().float().cpu() == before[n]).all())
    ]
    part.check("adapters_that_stood_still", len(still), "0", not still)
    saved = sorted(path.name for path in (folder / "final").iterdir() if path.is_dir())
    part.check("policies_saved", len(saved), "2", saved == ["ann", "bob"])


def vllm(setting: Setting, part: Part) -> None:
    """Rollouts by vLLM in this process have the trainer's probabilities, also after an update of all weights."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed")
    if setting.cpu:
        raise Skipped("vLLM on a CPU is tested by `make test-vllm`")
    folder = setting.folder / "served"
    model_of(setting.middle, torch.bfloat16, setting.device).save_pretrained(folder)
    build_tiny_tokenizer(TinySection()).save_pretrained(folder)
    run = setting.folder / "vllm_run"
    options = [
        f"output_dir={run}", "task.name=toy_sum", f"agents.solo.model={folder}", "agents.solo.engine=vllm",
        "agents.solo.vllm.colocate.gpu_memory_utilization=0.3", "agents.solo.dtype=bfloat16", "updates=2",
        "protocol.turns=1", "training.learning_rate=1e-4", "evaluation.questions=0", "ppo.response_length=16",
        "ppo.num_mini_batches=1", "training.per_device_train_batch_size=8", "training.gradient_accumulation_steps=1",
    ]  # fmt: skip
    words = [word for option in options for word in ("--set", option)]
    command = [sys.executable, "-m", "maporl", "train", "quickstart", "--quiet", "--set", "agents=null", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    gaps = [json.loads(line)["solo/policy/engine_gap"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    part.check("engine_gap", max(gaps), "below 0.05 nats in both updates", max(gaps) < 0.05)


def trl(setting: Setting, part: Part) -> None:
    """The same work by TRL 1.12's PPOTrainer, each in a process of its own."""
    if setting.trl_python is None or setting.trl_script is None:
        raise Skipped("no TRL 1.12 was given (--trl-python, --trl-script)")
    folder = setting.folder / "compared"
    model_of(setting.middle, torch.bfloat16, "cpu").save_pretrained(folder)
    build_tiny_tokenizer(TinySection()).save_pretrained(folder)
    work = ["--model", str(folder), "--dtype", "bfloat16", "--updates", "3", "--epochs", "4"]
    work += ["--batch", "32", "--micro", "16", "--prompt-len", "128", "--response-len", "128"]
    own_script = str(Path(__file__).with_name("ppo_step.py"))
    found = []
    for command in (
        [sys.executable, own_script, "--critic", "head", "--json"],
        [setting.trl_python, setting.trl_script],
    ):
        done = subprocess.run([*command, *work], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    own, other = found[0]["seconds_per_update"], min(found[1]["update_s"][1:])
    part.figures |= {"seconds": own, "seconds_of_trl": other}
    part.check("times_as_fast", other / own, "above 2", other / own > 2)


PARTS = (losses, sampling, dropped_rows, resume, masters, ceilings, logprobs, speed, trees, adapters, team, vllm, trl)


def main() -> None:
    """Run the parts and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--small", action="store_true", help="tiny models, whose speed says nothing")
    parser.add_argument("--only", nargs="+", choices=[p.__name__ for p in PARTS], default=[p.__name__ for p in PARTS])
    parser.add_argument("--trl-python", help="the Python of an environment with TRL 1.12")
    parser.add_argument("--trl-script", help="a program that measures its PPOTrainer")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no further part begins")
    parser.add_argument("--reference", help=argparse.SUPPRESS)  # used by the part losses
    options = parser.parse_args()
    if not options.cpu and not torch.accelerator.is_available():
        parser.error("no accelerator here; --cpu --small runs the program itself")
    begun, found, skipped, failed = time.perf_counter(), {}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(options.cpu, options.small, options.trl_python, options.trl_script, Path(folder))
        if options.reference:
            torch.save(one_update(setting, None), options.reference)
            return
        for run in PARTS:
            name = run.__name__
            if name not in options.only:
                continue
            if time.perf_counter() - begun > options.limit:
                skipped[name] = f"the parts before it took {options.limit:g} seconds"
                continue
            part = Part()
            try:
                with contextlib.redirect_stdout(sys.stderr):  # trainers print
                    part.seconds = setting.seconds(lambda run=run, part=part: run(setting, part))
            except Skipped as reason:
                skipped[name] = str(reason)
                continue
            except Exception as error:
                traceback.print_exc()
                part.check("runs", 0.0, f"no error, got {type(error).__name__}: {error}"[:500], False)
            found[name] = vars(part)
            failed += [f"{name}.{check}" for check, result in part.checks.items() if result["passed"] is False]
            if not options.cpu:
                torch.accelerator.empty_cache() if hasattr(
                    torch.accelerator, "empty_cache"
                ) else torch.cuda.empty_cache()
    versions = {m: __import__(m).__version__ for m in ("torch", "transformers", "trl", "peft", "maporl")}
    device = "cpu" if options.cpu else torch.get_device_module().get_device_name()
    result = {
        "date": datetime.date.today().isoformat(), "device": device, "small": options.small, "versions": versions,
        "seconds": time.perf_counter() - begun, "parts": found, "skipped": skipped, "failed": failed,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
