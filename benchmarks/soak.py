"""Measure whether the memory of a long run grows: a team of two tiny models trains for ten minutes.

    python benchmarks/soak.py --minutes 10 [--json]

Every update samples, scores, trains and records. Every tenth update also evaluates and saves a checkpoint, of which two
are kept. The slope is that of a line through the resident memory after every update in the second half of the time,
because the first half fills pools and caches.
"""

import argparse
import json
import os
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    import numpy as np
    import psutil
    import torch
    from transformers import TrainerCallback

    from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, RewardSection, Team
    from maporl.config.schema import TinySection
    from maporl.tiny import build_tiny_model, build_tiny_tokenizer

    torch.manual_seed(0)
    agents = []
    for name, architecture in (("ann", "llama"), ("bob", "qwen3")):
        section = TinySection(architecture=architecture, hidden_size=64, layers=2)
        tokenizer = build_tiny_tokenizer(section)
        agents.append(Agent(name, build_tiny_model(section, tokenizer), tokenizer))
    process, started = psutil.Process(), time.perf_counter()
    minutes: list[float] = []
    resident: list[float] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            minutes.append((time.perf_counter() - started) / 60)
            resident.append(process.memory_info().rss / 2**20)
            control.should_training_stop = minutes[-1] >= options.minutes

    task, held_out = Arithmetic(largest=49), Arithmetic(largest=49, split="eval")
    args = MultiAgentPPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=64, total_episodes=64 * 10**6, response_length=16,
        temperature=1.0, num_ppo_epochs=2, learning_rate=1e-4, lr_scheduler_type="constant", report_to=[], disable_tqdm=True,  # noqa: E501
        use_cpu=not torch.cuda.is_available(), save_steps=10, save_total_limit=2, eval_strategy="steps", eval_steps=10, eval_questions=64,  # noqa: E501
    )  # fmt: skip
    debate = Debate(turns=2, later="{others};{question}", quote="{text}", separator=";")
    trainer = MultiAgentPPOTrainer(args, Team(agents), task, debate, held_out, RewardSection(), callbacks=[Watch()])
    trainer.train()
    half = [i for i, minute in enumerate(minutes) if minute >= options.minutes / 2]
    slope, _ = np.polyfit([minutes[i] for i in half], [resident[i] for i in half], 1)
    result = {
        "minutes": minutes[-1], "updates": len(minutes), "mib_at_start": resident[0], "mib_at_half": resident[half[0]],
        "mib_at_end": resident[-1], "mib_at_most": max(resident), "slope_mib_per_minute": float(slope),
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name.replace('_', ' ')}: {value:.1f}")


if __name__ == "__main__":
    main()
