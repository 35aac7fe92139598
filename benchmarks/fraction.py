"""Compare updates with plain forward and backward passes of the same model, and rollouts with the model's ``generate``.

    python benchmarks/fraction.py --model DIR [--batch 8 --prompt-len 64 --response-len 64 --dtype bfloat16 --lora 0
        --rounds 3]

An update is everything after the scores: the reference's log-probabilities, the old ones, advantages, and four passes
over the batch with a loss, a backward pass and a step of AdamW each. It is compared with what any trainer has to do:
one forward without gradients, and four times ``model(...)`` with logits for the completions only, their cross-entropy,
``backward()``, clipping, and a fused AdamW over the weights as they are (half-precision weights have float32 masters in
an update, and none here). ``trainer.collect`` is compared with ``model.generate`` on the same prompts, for as many
tokens, and a batch of three LoRA adapters of rank 16, each with these prompts, with three calls of ``generate``, each
with one adapter switched on. All run in turn in one process. FLOPs are counted as 6 for every parameter and every token
read with gradients. The table has medians over the rounds after a first one, which warms up.
"""

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections import defaultdict

from machine import machine

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed, if installed, prints on stdout
PASSES = 4
ADAPTERS = ("ann", "bob", "cyd")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a causal language model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lora", type=int, default=0, help="train a LoRA of this rank in place of all weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse()
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from trl_ext import PPOv2Config, PPOv2Trainer
    from trl_ext.learning.policy import Policy
    from trl_ext.sampling.own_weights import OwnWeights
    from trl_ext.sampling.request import Draw, TokenRequest
    from trl_ext.trainer.update_batch import UpdateBatch

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    lora = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), lora, adapter_name=ADAPTERS[0], autocast_adapter_dtype=False)
    for name in ADAPTERS[1:]:
        adapted.add_adapter(name, lora, autocast_adapter_dtype=False)
    policies = {name: Policy(name, adapted.eval(), tokenizer, name) for name in ADAPTERS}
    engine = OwnWeights(policies, keep_states=False)
    if options.lora:
        lora = LoraConfig(r=options.lora, target_modules="all-linear")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.prompt_len)
    prompts = torch.randint(100, min(model.config.vocab_size, 40_000), shape, generator=generator)
    args = PPOv2Config(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=options.batch, gradient_accumulation_steps=1,
        total_episodes=options.batch * 100, response_length=options.response_len, stop_token="none", temperature=1.0,
        num_ppo_epochs=PASSES, learning_rate=1e-6, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = PPOv2Trainer(
        args, tokenizer, model, train_dataset=[{"input_ids": ids} for ids in prompts.tolist()],
        reward_funcs=lambda prompts, completions, **columns: [float(len(text) % 7) for text in completions],
    )  # fmt: skip
    trainer.model.train()
    device = model.device

    def sampled() -> UpdateBatch:
        return trainer.score(trainer.collect(trainer.next_batch()))

    def generated(by=model) -> None:
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=options.response_len, min_new_tokens=options.response_len,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        ids = prompts.to(device)
        by.eval()
        with torch.no_grad():
            by.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)

    def generated_by_each() -> None:
        for name in ADAPTERS:
            adapted.set_adapter(name)
            generated(adapted)

    def sampled_together() -> None:
        draw = Draw(options.response_len, 1.0)
        engine.submit([TokenRequest(name, ids, draw) for name in ADAPTERS for ids in prompts.tolist()])

    def updated(scored: UpdateBatch) -> UpdateBatch:
        return trainer.update(trainer.advantage(scored))

    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-9, weight_decay=0.0, fused=True)

    def bare(ids: torch.Tensor) -> None:
        model.train()
        kept, targets = options.response_len, ids[:, -options.response_len :]
        with torch.no_grad():
            model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=kept)
        for _ in range(PASSES):
            logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=kept).logits
            torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def timed(function, *arguments):
        """Return the seconds of a call, and its result."""
        started = time.perf_counter()
        result = function(*arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, result

    times: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        collect, scored = timed(sampled)
        update, batch = timed(updated, scored)
        (rows,) = batch.token_batches.values()
        measured = {
            "collect": collect,
            "generate": timed(generated)[0],
            "bare": timed(bare, rows.input_ids)[0],
            "update": update,
            "together": timed(sampled_together)[0],
            "each": timed(generated_by_each)[0],
        }
        trainer.finish_update(batch)
        for name, value in measured.items() if number else ():
            times[name].append(value)
    middle = {name: statistics.median(values) for name, values in times.items()}
    flops = (
        6
        * sum(p.numel() for p in model.parameters())
        * options.batch
        * (options.prompt_len + options.response_len - 1)
        * PASSES
    )
    tokens = options.batch * options.response_len
    trained = f"LoRA of rank {options.lora}" if options.lora else "all weights"
    print(f"{machine()}; {options.threads} threads, {options.dtype}, {trained}\n")
    print("| | maporl | bare model | fraction |\n|---|---|---|---|")
    for name, work, ours, theirs in (
        ("update, GFLOP/s", flops / 1e9, "update", "bare"),
        ("rollout, tokens/s", tokens, "collect", "generate"),
        (f"rollout of {len(ADAPTERS)} adapters, tokens/s", tokens * len(ADAPTERS), "together", "each"),
    ):
        mine, other = middle[ours], middle[theirs]
        print(f"| {name} | {work / mine:.0f} | {work / other:.0f} | {other / mine:.0%} |")


if __name__ == "__main__":
    main()
