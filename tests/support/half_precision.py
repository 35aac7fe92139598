"""Learners of bfloat16 and of float32 weights that make the same steps; started by
tests/trl_ext/sharding/test_master_weights.py.

    torchrun --nproc_per_node 2 tests/support/half_precision.py CRITIC[,CRITIC ...] FOLDER

The main process writes how far bfloat16 weights moved along the way of the float32 weights, for each critic.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from maporl.config.schema import TinySection
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext import PPOv2Config
from trl_ext.learning.checkpoint import Learners, load_checkpoint, write_checkpoint
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.learning.trained import NonFiniteError
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.process import distributed
from trl_ext.sharding.shards import Shards, entries

STEPS, RATE = int(os.environ.get("HALF_STEPS", "50")), 1e-6


def learner_of(dtype, critic, folder, **options):
    """A learner of a tiny model in ``dtype``. The critic ``adapter`` needs a LoRA; the others train all weights."""
    section = TinySection(hidden_size=64, layers=2)
    tokenizer = build_tiny_tokenizer(section)
    torch.manual_seed(0)
    model = build_tiny_model(section, tokenizer).to(dtype)
    torch.manual_seed(1)
    if critic == "adapter":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    defaults = {
        "output_dir": str(folder), "report_to": [], "learning_rate": RATE, "value_learning_rate": RATE, "kl_coef": 0.0, "temperature": 1.0,
        "per_device_train_batch_size": 2, "cliprange": 1e6, "cliprange_value": 1e6, "lr_scheduler_type": "constant", "use_cpu": "ACCELERATE_USE_DEEPSPEED" not in os.environ,
    }  # fmt: skip
    args = PPOv2Config(**{**defaults, **options})
    learner = Learner(Policy("policy", model, tokenizer), args, critic=critic)
    if learner.value_head is not None:
        torch.manual_seed(2)
        torch.nn.init.normal_(learner.value_head.linear.weight, std=0.02)
    learner.prepare(Accelerator(cpu=args.use_cpu), STEPS)
    return learner


def rows_of(learner):
    """Four rows with random advantages and returns. The first three are two micro-batches of two rows each."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 20, (4, 9), generator=generator).tolist()
    rows = build_token_batch([Completion(r[:4], r[4:], True, f"row {n}") for n, r in enumerate(ids)], learner.device)
    learner.annotate(rows)
    rows.advantages = torch.randn(rows.sampled_mask.shape, generator=generator) * rows.sampled_mask
    rows.returns = torch.randn(rows.sampled_mask.shape, generator=generator) * rows.sampled_mask
    return rows


def weights(learner):
    """All weights by name, as they are in memory when the policy samples."""
    modules = {"model": learner.model, "value_model": learner.critic.model, "head": learner.value_head}
    with learner.strategy.whole():
        return {
            f"{part}.{name}": parameter.detach().clone()
            for part, module in modules.items()
            if module is not None
            for name, parameter in module.named_parameters()
        }


def trained(learner):
    """What the optimizer steps, by name: the weights, or the master weights of those in half precision."""
    found = weights(learner)
    names = list(found)
    if learner.adapter is not None:
        adapters = ["head.linear"] * (learner.value_head is not None) + [f".{learner.critic.adapter}."]
        names = [n for part in (f".{learner.adapter}.", *adapters) for n in names if part in n]
    holder = learner.strategy
    masters = Shards.held(distributed.all_gather(entries(holder.shards(holder.half))))
    return {
        name: masters.whole(own, "weight", found[name].shape).clone() if masters.has(own) else found[name].clone()
        for name, own in zip(names, holder.names, strict=True)
    }


def take_steps(learner, steps):
    rows = rows_of(learner)
    for _ in range(steps):
        learner.accumulate(rows, torch.arange(len(rows)))
        learner.step()


def movement(learner, steps=STEPS):
    """How far ``steps`` optimizer steps on the same rows moved each trained weight."""
    before = weights(learner)
    take_steps(learner, steps)
    return {name: after.float() - before[name].float() for name, after in trained(learner).items()}


def share(half, whole):
    """The share of the movement ``whole`` that the movement ``half`` made: 1 if it went as far in the same
    direction."""
    own, other = (torch.cat([part[name].flatten() for name in sorted(whole)]) for part in (half, whole))
    return float(own @ other / (other @ other))


def shares(half, whole):
    """The :func:`share` of each part: the policy, the separate critic and the head."""
    parts = {name.split(".")[0] for name in whole}
    return {p: share(*({n: v for n, v in m.items() if n.startswith(f"{p}.")} for m in (half, whole))) for p in parts}


def rounding(learner):
    """The dtypes of the weights in memory by part, and the trained weights that are not their rounded master
    weights."""
    found = weights(learner)
    dtypes: dict[str, set] = {}
    for name, value in found.items():
        dtypes.setdefault(name.split(".")[0], set()).add(str(value.dtype).removeprefix("torch."))
    wrong = [
        name for name, exact in trained(learner).items() if not torch.equal(exact.to(found[name].dtype), found[name])
    ]
    return {"dtypes": {part: sorted(kinds) for part, kinds in dtypes.items()}, "wrong": wrong}


def lost_by_resuming(learner, dtype, critic, folder):
    """The trained weights that differ between ``learner`` and one that resumes from its checkpoint, two steps later."""
    write_checkpoint(folder / "checkpoint-1", Learners(policy=learner), {})
    resumed = learner_of(dtype, critic, folder)
    unset_hf_deepspeed_config()  # as the trainer does, so that from_pretrained loads whole weights
    load_checkpoint(folder / "checkpoint-1", Learners(policy=resumed))
    ends = []
    for own in (learner, resumed):
        take_steps(own, 2)
        ends.append(trained(own))
    return [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]


def changed_by_a_nan(learner):
    """The trained weights that change if a gradient is NaN in one process, and whether the step is refused."""
    before = trained(learner)
    own = float("nan") if distributed.rank() == distributed.size() - 1 else 1.0
    loss = learner.strategy.call(lambda: learner.forward(rows_of(learner)).logprobs.sum())
    learner.strategy.backward(own * loss, True)
    try:
        learner.step()
        refused = ""
    except NonFiniteError as error:
        refused = str(error)
    after = trained(learner)
    return {
        "refused": refused,
        "changed": [name for name, value in before.items() if not torch.equal(value, after[name])],
    }


def main() -> None:
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        from distributed_worker import skip_compilation

        skip_compilation()
    torch.set_num_threads(1)
    found, folder = {}, Path(sys.argv[2])
    for critic in sys.argv[1].split(","):
        whole = movement(learner_of(torch.float32, critic, folder))
        learner = learner_of(torch.bfloat16, critic, folder)
        half = movement(learner)
        found[critic] = {"strategy": type(learner.strategy).__name__, "shares": shares(half, whole)} | rounding(learner)
        states = sum(len(shard.values) for shard in learner.strategy.shards(learner.strategy.half))
        found[critic]["states"] = distributed.all_gather(states)
        found[critic]["nan"] = [
            changed_by_a_nan(learner_of(dtype, critic, folder)) for dtype in (torch.float32, torch.bfloat16)
        ]
        found[critic]["lost"] = lost_by_resuming(learner, torch.bfloat16, critic, folder / critic)
    if distributed.is_main():
        (folder / "found.json").write_text(json.dumps(found))
    distributed.shutdown()


if __name__ == "__main__":
    main()
