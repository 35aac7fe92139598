"""What one of two processes keeps of a bfloat16 policy and its reference, or of a team with frozen models where
``FOLDER/config.json`` is its configuration; started by test_strategy_memory.py and test_team_memory.py.

    python tests/support/memory_worker.py FOLDER

Only the main process has weights when the learner is built. Every process writes ``rankN.json``.
"""

import gc
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from maporl.config import parse_config
from maporl.config.schema import TinySection
from maporl.runs.build import build_trainer
from maporl.team import loading
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext import PPOv2Config
from trl_ext.learning import policy
from trl_ext.learning.checkpoint import Learners, load_checkpoint, write_checkpoint
from trl_ext.learning.learner import Learner
from trl_ext.learning.policy import Policy
from trl_ext.models.forward import base_of
from trl_ext.ppo.batch import Completion, build_token_batch
from trl_ext.process import distributed

SECTION = TinySection(hidden_size=192, layers=2)


def held() -> int:
    """The bytes of all tensors of this process, with gradients. FSDP2 empties the storages of gathered weights."""
    gc.collect()
    found = {}
    for tensor in [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]:
        for one in (tensor, tensor.grad if tensor.is_leaf else None):
            own = getattr(one, "_local_tensor", one)  # a shard
            if own is not None and not own.is_meta:
                storage = own.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def learner_of(folder: Path, main_only: bool) -> Learner:
    tokenizer = build_tiny_tokenizer(SECTION)
    torch.manual_seed(0)
    with torch.device("meta") if main_only and distributed.rank() else nullcontext():
        model = build_tiny_model(SECTION, tokenizer).to(torch.bfloat16)
    args = PPOv2Config(
        output_dir=str(folder), report_to=[], kl_coef=0.05, temperature=1.0, per_device_train_batch_size=1, learning_rate=1e-3,
        use_cpu="ACCELERATE_USE_DEEPSPEED" not in os.environ, lr_scheduler_type="constant",
    )  # fmt: skip
    return Learner(Policy("policy", model, tokenizer), args, critic="head")


def rows_of(learner: Learner):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 20, (2, 9), generator=generator).tolist()
    rows = build_token_batch([Completion(r[:4], r[4:], True, f"row {n}") for n, r in enumerate(ids)], learner.device)
    rows.advantages = torch.ones(rows.sampled_mask.shape) * rows.sampled_mask
    rows.returns = rows.advantages.clone()
    return rows


def keep_policy(folder: Path) -> None:
    found = {}
    whole = learner_of(folder, main_only=False)
    whole.reference.to("cpu")
    expected = whole.reference_logprobs(rows_of(whole))
    before = held()
    learner = learner_of(folder, main_only=True)
    learner.prepare(Accelerator(cpu=learner.args.use_cpu), 2)
    unset_hf_deepspeed_config()  # as the trainer does, so that from_pretrained loads whole weights
    parameters = sum(p.numel() for p in whole.model.parameters())

    def note(name: str) -> None:
        found[name] = (held() - before) / parameters

    note("weights")
    rows = rows_of(learner)
    learner.annotate(rows)
    note("read")
    found["policy"] = float((rows.old_logprobs[rows.sampled_mask] - expected).abs().max())
    found["reference"] = float((rows.ref_logprobs[rows.sampled_mask] - expected).abs().max())
    seen = []
    backward = learner.strategy.backward
    learner.strategy.backward = lambda loss, last: (backward(loss, last), seen.append((held() - before) / parameters))
    learner.accumulate(rows, torch.arange(len(rows)))
    learner.strategy.backward = backward
    found["micro-batches"] = seen
    learner.step()
    note("stepped")
    with learner.strategy.whole():
        moved = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    found["moved"] = max(float((moved[n] - p).abs().max()) for n, p in whole.model.named_parameters())
    found["reference after"] = float((learner._reference_logprobs(rows) - expected).abs().max())
    with learner.frozen.whole():
        kept = dict(learner.reference.named_parameters())
        found["whole reference"] = all(torch.equal(kept[n], p) for n, p in whole.model.named_parameters())
    write_checkpoint(folder / "checkpoint-1", Learners(policy=learner), {})
    learner.accumulate(rows, torch.arange(len(rows)))
    learner.step()
    reads = []
    read, policy.read_model = policy.read_model, lambda *a, **k: (reads.append(a[1]), read(*a, **k))[1]
    load_checkpoint(folder / "checkpoint-1", Learners(policy=learner))
    with learner.strategy.whole():
        found["loaded"] = all(torch.equal(moved[n], p) for n, p in learner.model.named_parameters())
    found["reads"] = len(reads)
    found["strategy"] = type(learner.strategy).__name__
    (folder / f"rank{distributed.rank()}.json").write_text(json.dumps(found))
    distributed.shutdown()


def keep_team(folder: Path) -> None:
    config = parse_config(json.loads((folder / "config.json").read_text()), "test")
    places = []
    read = loading.read_model

    def noted(*args, **options):
        model = read(*args, **options)
        places.append(model.device.type)
        return model

    loading.read_model = noted
    before = held()
    trainer = build_trainer(config, quiet=True)
    found = {"read": places, "strategy": type(trainer.learners["ann"].strategy).__name__}
    bases = {id(base_of(p.model)): base_of(p.model) for p in trainer.team.policies.values()}
    with trainer.whole_weights():
        whole = dict(trainer.team.policies["cat"].model.named_parameters())
        found["sum"] = sum(float(p.detach().double().abs().sum()) for p in whole.values())
        parameters = sum(p.numel() for p in whole.values())
    found["bases"] = len(bases)
    found["built"] = (held() - before) / parameters
    trainer.train()
    found["trained"] = (held() - before) / parameters
    with trainer.whole_weights():
        after = trainer.team.policies["cat"].model.named_parameters()
        found["sum after"] = sum(float(p.detach().double().abs().sum()) for _, p in after)
    (folder / f"rank{distributed.rank()}.json").write_text(json.dumps(found))
    distributed.shutdown()


def main() -> None:
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        from distributed_worker import skip_compilation

        skip_compilation()
    folder = Path(sys.argv[1])
    (keep_team if (folder / "config.json").exists() else keep_policy)(folder)


if __name__ == "__main__":
    main()
