"""Trains two learners of different architectures for three updates; started by tests/system/test_distributed.py.

    torchrun --nproc_per_node 2 tests/support/distributed_worker.py CONFIG.json OUT

``CONFIG.json`` has ``args`` (of the trainer) and perhaps ``advantage``, ``algorithms``, ``structured`` (what ann's answers match), ``lora``, ``pool``, ``resume``, ``strategy``,
``die`` and ``fails``, both a rank; the second one's reward fails in the last update. Writes the weights and the metrics from the main process.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from maporl import (
    Agent,
    Algorithm,
    Arithmetic,
    Debate,
    MultiAgentPPOConfig,
    MultiAgentPPOTrainer,
    RewardFailure,
    RewardSection,
    RewardSource,
    Sampling,
    StructuredOutput,
    Team,
)
from maporl.config.schema import AdvantageConfig, TinySection
from maporl.schedules import OpponentPool, Schedule
from maporl.tiny import build_tiny_model, build_tiny_tokenizer
from trl_ext.process import distributed


def odd(dialogues, task):
    """A reward that random models earn now and then."""
    return [[float(sum(u.response_ids) % 3) for u in d.utterances] for d in dialogues]


class Fails(RewardSource):
    """``odd``, which fails in the third update."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __call__(self, dialogues, task):
        if self.trainer.state.global_step == 2:
            raise RewardFailure("the server of rewards is gone")
        return odd(dialogues, task)


def build(architecture: str, seed: int):
    torch.manual_seed(seed)
    section = TinySection(architecture=architecture, hidden_size=64, layers=2, context=600)
    tokenizer = build_tiny_tokenizer(section)
    return build_tiny_model(section, tokenizer), tokenizer


def team_of(lora: str | None, algorithms: dict, structured: str | None) -> Team:
    own = {name: Algorithm(**options) for name, options in algorithms.items()}
    ann, ann_tokenizer = build("llama", 1)
    if lora is None:
        bob, bob_tokenizer = build("qwen3", 2)
        agents = [Agent("ann", ann, ann_tokenizer), Agent("bob", bob, bob_tokenizer)]
        held = {} if structured is None else {"ann": Sampling(structured_output=StructuredOutput(regex=structured))}
        return Team([replace(a, algorithm=own.get(a.name, Algorithm()), sampling=held.get(a.name)) for a in agents])
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    shared = get_peft_model(ann, options, adapter_name="ann")
    shared.add_adapter("bob", options)
    return Team([Agent(name, shared, ann_tokenizer, adapter=name) for name in ("ann", "bob")])


def skip_compilation() -> None:
    """Leave out DeepSpeed's shared-memory messages, which serve inference only: compiling them takes a minute on a new
    machine."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    if "ACCELERATE_USE_DEEPSPEED" in os.environ:
        skip_compilation()
    options = json.loads(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    args = MultiAgentPPOConfig(**options["args"])
    trainer = MultiAgentPPOTrainer(
        args, team_of(options.get("lora"), options.get("algorithms", {}), options.get("structured")), Arithmetic(largest=9),
        Debate(turns=2, later="{others};{question}", quote="{text}", separator=";"),
        Arithmetic(largest=9, split="eval"), RewardSection(sources={"odd": 1.0}), sources={"odd": odd},
        advantage=AdvantageConfig(**options["advantage"]) if "advantage" in options else None,
        schedule=Schedule(opponent_pool=OpponentPool(**options["pool"])) if "pool" in options else None,
    )  # fmt: skip
    if options.get("strategy"):
        assert type(trainer.learners["ann"].strategy).__name__ == options["strategy"], trainer.learners["ann"].strategy
    if options.get("die") is not None and distributed.rank() == options["die"]:
        trainer.collect = lambda batch: (_ for _ in ()).throw(RuntimeError("this rank dies on purpose"))
    if options.get("fails") == distributed.rank():
        trainer.player.scorer.sources["odd"] = Fails(trainer)
    trainer.train(resume_from_checkpoint=options.get("resume"))
    trainer.evaluate()
    trainer.save_model(str(out / "final"))
    weights, heads = {}, {}
    with trainer.whole_weights():
        for name, learner in trainer.learners.items():
            weights |= {f"{name}.{k}": v.detach().clone().contiguous() for k, v in learner.model.named_parameters()}
            if learner.value_head is not None:
                heads |= {f"{name}.{k}": v.detach().clone() for k, v in learner.value_head.named_parameters()}
    if distributed.is_main():
        save_file(weights | {f"head.{k}": v for k, v in heads.items()}, out / "weights.safetensors")
    (out / f"rank{os.environ.get('RANK', '0')}").write_text(str(distributed.size()))
    if trainer.past_policies is not None:
        kept = [len(snapshot) for snapshot in trainer.past_policies.snapshots]
        (out / f"snapshots{distributed.rank()}").write_text(json.dumps(kept))
    distributed.shutdown()


if __name__ == "__main__":
    main()
