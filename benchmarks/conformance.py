"""Train a tiny model of every causal architecture of transformers, each with an adapter, a critic and ways to read and
sample.

    python benchmarks/conformance.py                # all, into benchmarks/results/conformance.json and docs/models.md
    python benchmarks/conformance.py llama mixtral  # only these; the file keeps what was found of the others
    python benchmarks/conformance.py --page         # only write the page again

The options are dealt so that every one meets every other one (a Latin square). An update at learning rate 0 must have
ratio 1, KL 0 and engine gap 0, and give every trainable parameter a gradient, if a plain forward of the same rows gives
it one. After two updates at a real rate all these have moved, and what is saved and loaded again computes the same.
"""

import argparse
import contextlib
import io
import json
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from maporl.config.schema import TinySection
from maporl.tiny import build_tiny_tokenizer
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.models.adapters import adapter_parameters, beyond_lora
from trl_ext.models.lora_sampling import mixes
from trl_ext.models.weights import read_adapter
from trl_ext.sampling.engine import Ready
from trl_ext.sampling.own_weights import OwnWeights
from trl_ext.sampling.sample import sample
from trl_ext.trainer.ppov2 import Sampler

SIZE = {
    "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip

MLA = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    "head_dim": None,
}  # fmt: skip
DECODER = {"is_decoder": True}
SEQ2SEQ = {
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "encoder_layers": 2, "d_model": 32,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip
INKLING = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "unpadded_vocab_size": 40,
    "num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2,
    "n_layers_per_attn_res_block": 1,
}  # fmt: skip

MORE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
        ), DECODER
    ),
    **dict.fromkeys(
        (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
            "trocr", "whisper",
        ), SEQ2SEQ
    ),
    **dict.fromkeys(
        (
            "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu",
        ), MLA
    ),
    **dict.fromkeys(("axk1", "deepseek_v2", "dots3_note_text"), MLA | EXPERTS),
    **dict.fromkeys(
        (
            "afmoe", "deepseek_v4", "exaone_moe", "glm4_moe", "gpt_oss", "hy_v3", "hy_v4", "laguna", "mellum",
            "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
        ), EXPERTS
    ),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), EXPERTS | INKLING),
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1},
    "sarvam_mla": MLA | EXPERTS | {"head_dim": None},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "bailing_hybrid": MLA | LINEAR,
    "longcat_flash": {**MLA, **EXPERTS, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 64, "moe_topk": 2, "head_dim": 8,
                      "zero_expert_num": 1},
    "qwen3_next": EXPERTS | LINEAR,
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "kolibri1": {**EXPERTS, "layer_types": ["full_attention", "sliding_attention"]},
    "mimo_v2_flash": {**EXPERTS, "layer_types": ["full_attention", "sliding_attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
                  "mamba_chunk_size": 16},
    "codegen": {"rotary_dim": 4, "head_dim": None},
    "gptj": {"rotary_dim": 4, "head_dim": None},
    "falcon": {"head_dim": None},
    "kimi_linear": MLA | EXPERTS | LINEAR,
    "gemma4_text": {**EXPERTS, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40, "num_kv_shared_layers": 0,
                    "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "head_dim": None},
    "dots1": {**EXPERTS, "layer_types": ["full_attention", "sliding_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8,
                     "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40, "laurel_rank": 4,
                     "altup_num_inputs": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16,
                         "layer_types": ["mamba", "attention"], **EXPERTS, "shared_intermediate_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              **EXPERTS, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "qwen3_5_text": {**LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                     "linear_value_head_dim": 8},
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
                         "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "qwen4_exp_text": {**EXPERTS, "layer_types": ["linear_attention", "indexed_attention"], "linear_num_key_heads": 2,
                       "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "hc_count": 2,
                       "hc_lowrank": 4, "ngram_vocab_size_base": 64, "split_ngram_parts": 8, "heads_per_ngram": 2,
                       "make_ngram_vocab_size_divisible_by": 8, "ple_embed_dim": 8, "indexer_n_heads": 2,
                       "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16, "indexer_compress_ratio": 2},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], **EXPERTS, "num_dense_layers": 1},
    "prophetnet": {"num_hidden_layers": None, "num_decoder_layers": 2, "num_encoder_layers": 2, "is_decoder": True,
                   "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "decoder_ffn_dim": 64},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_headdim": 8,
               "mamba_ngroups": 1, "head_dim": None, "hybrid_layer_ids": [1], "use_mamba_kernels": False, "num_mem_blocks": 1,
               "attention_head_dim": 16},
    "xlstm": {"num_heads": 4, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "head_dim": None},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False, "attention_head_size": 8,
                 "feed_forward_size": 64, "local_attn_chunk_length": 16, "head_dim": None},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 64},
    "phi3": {"original_max_position_embeddings": 16, "sliding_window": None, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
        "original_max_position_embeddings": 16}},
}  # fmt: skip
"""What architectures need besides :data:`SIZE` to be built tiny.

Bidirectional ones are decoders only if they are told so.
"""

METHODS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "all weights": None,
    "LoRA": ("LoraConfig", {}),
    "LoRA, embeddings": ("LoraConfig", {"target_modules": "embeddings too"}),
    "LoRA, lora_bias": ("LoraConfig", {"lora_bias": True}),
    "LoRA, bias all": ("LoraConfig", {"bias": "all"}),
    "LoRA, bias lora_only": ("LoraConfig", {"bias": "lora_only"}),
    "LoRA, modules_to_save": ("LoraConfig", {"modules_to_save": "the head"}),
    "LoRA, trained tokens": ("LoraConfig", {"trainable_token_indices": list(range(3, 15))}),
    "LoRA, tied head": ("LoraConfig", {"target_modules": "the head too"}),
    "DoRA": ("LoraConfig", {"use_dora": True}),
    "PiSSA": ("LoraConfig", {"init_lora_weights": "pissa"}),
    "OLoRA": ("LoraConfig", {"init_lora_weights": "olora"}),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10}),
    "VeRA": ("VeraConfig", {"r": 4}),
    "IA3": ("IA3Config", {"feedforward_modules": []}),
    "LoHa": ("LoHaConfig", {"r": 4}),
    "LoKr": ("LoKrConfig", {"r": 4}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "HRA": ("HRAConfig", {"r": 4}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 8, "init_weights": True}),
    "RandLoRA": ("RandLoraConfig", {"r": 4}),
    "MiSS": ("MissConfig", {"r": 4}),
    "LayerNorm tuning": ("LNTuningConfig", {"target_modules": "norms"}),
    "trainable tokens": (
        "TrainableTokensConfig",
        {"token_indices": list(range(3, 15)), "target_modules": "embeddings"},
    ),
}
"""The adapters of the sweep by name: PEFT's class and its options.

Where ``target_modules`` is not given it is all linear layers.
"""

NO_CHECKPOINTING = ("ctrl", "jetmoe", "xlm", "openai-gpt", "cpmant")
"""Architectures that transformers cannot recompute."""
CONV1D = ("LoraConfig", "AdaLoraConfig", "IA3Config", "VeraConfig")
"""The options of PEFT that know the linear layers of GPT-2, whose weights are transposed."""
CRITICS = ("head", "adapter", "model", "none")
PATHS = ("own", "mixed", "plain")
"""How completions are sampled: as the trainer does, in a batch of several adapters if that suits, or as it is."""


@dataclass(frozen=True)
class Cell:
    """What is combined in one training run."""

    architecture: str
    method: str
    critic: str = "head"
    chunk: int | None = None
    checkpointing: bool = False
    path: str = "own"

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f", logits_chunk {self.chunk}"
        return (
            f"{self.method}, critic {self.critic}{chunk}{', checkpointing' * self.checkpointing}, sampled {self.path}"
        )


def architectures() -> list[str]:
    """All causal architectures of transformers, in the order of its table."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def cells(kinds: Sequence[str]) -> list[Cell]:
    """One cell for each architecture, dealt so that every option meets every other one."""
    methods = list(METHODS)
    found = []
    for number, kind in enumerate(kinds):
        turn, method = divmod(number, len(methods))
        critic = CRITICS[(number + turn) % len(CRITICS)]
        checkpointing = (number + number // 2 + turn) % 2 == 1 and kind not in NO_CHECKPOINTING
        if critic == "adapter" and (checkpointing or not METHODS[methods[method]] or "bias" in methods[method]):
            critic = "head"
        chunk = 4 if (number // 2 + turn) % 2 else None
        found.append(Cell(kind, methods[method], critic, chunk, checkpointing, PATHS[(number + turn) % len(PATHS)]))
    return found


def build(kind: str) -> tuple[Any, Any]:
    """A tiny model of an architecture with weights that make tokens matter to each other, and a tokenizer."""
    given = {**SIZE, **MORE.get(kind, {})}
    config = CONFIG_MAPPING[kind](**{key: value for key, value in given.items() if value is not None})
    if getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        raise Unbuilt("it has a vision or audio part")
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 3e7:
        raise Unbuilt(f"the options here leave it with {size / 1e6:.0f}M weights")
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.2, generator=generator)
    model.generation_config.eos_token_id = 2  # some configurations keep their own
    return model.eval(), build_tiny_tokenizer(TinySection(hidden_size=64, layers=2))


class Unbuilt(Exception):
    """Transformers or PEFT cannot build this cell."""


def adapted(model: Any, method: str) -> Any:
    """The model with a new adapter, or as it is."""
    if METHODS[method] is None:
        return model
    name, options = METHODS[method]
    if not hasattr(peft, name):
        raise Unbuilt(f"PEFT: this version has no {name}")
    options = dict(options)
    embedding, head = ({n for n, m in model.named_modules() if m is found} for found in
                       (model.get_input_embeddings(), model.get_output_embeddings()))  # fmt: skip
    kinds = (torch.nn.Linear, Conv1D) if name in CONV1D else (torch.nn.Linear,)
    linear = [n for n, m in model.named_modules() if isinstance(m, kinds) and n not in head]
    linear = [n for n in linear if not n.endswith(tuple(beyond_lora(model)))]
    norms = [
        n for n, m in model.named_modules() if "Norm" in type(m).__name__ and getattr(m, "weight", None) is not None
    ]
    wanted = options.get("target_modules")
    options["target_modules"] = {
        None: linear, "embeddings too": [*linear, *embedding], "the head too": [*linear, *head], "norms": norms,
        "embeddings": sorted(embedding),
    }[wanted]  # fmt: skip
    if options.get("modules_to_save"):
        options["modules_to_save"] = sorted(head)
    torch.manual_seed(2)
    try:
        return peft.get_peft_model(model, getattr(peft, name)(task_type="CAUSAL_LM", **options))
    except Exception as error:
        raise Unbuilt(f"PEFT: {type(error).__name__}: {' '.join(str(error).split())[:120]}") from error


@torch.no_grad()
def shake(model: Any) -> None:
    """Add noise to an adapter, as much as leaves the logits in a range."""
    learning = [p for p in adapter_parameters(model, "default").values() if p.requires_grad]
    before = [p.clone() for p in learning]
    ids = torch.arange(3, 15)[None]
    start = model.get_base_model()(input_ids=ids).logits
    for scale in (0.03, 0.003, 0.0003, 0.00003):
        generator = torch.Generator().manual_seed(4)
        for parameter, was in zip(learning, before, strict=True):
            parameter.copy_(was + scale * torch.randn(parameter.shape, generator=generator))
        if (model.get_base_model()(input_ids=ids).logits - start).abs().max() < 5:  # false for NaN too
            return


RATES = {"RandLoRA": 1e-5}
"""Learning rates of methods whose parameters are multiplied by large numbers. Others have 0.01."""


def check_plain(model: Any) -> None:
    """Check that PEFT has something to train in a model, and that PEFT's own forward of it works."""
    if not adapter_parameters(model, "default"):
        raise Unbuilt("PEFT: nothing of this model is trained by it")
    try:
        model(input_ids=torch.tensor([[3, 4, 5]]))
    except Exception as error:
        raise Unbuilt(f"PEFT: {type(error).__name__}: {' '.join(str(error).split())[:120]}") from error


class Way(Sampler):
    """Samples by one of the ways that suit the adapter."""

    def __init__(self, way: str):
        self.way = way

    def attach(self, learner, args):
        self.learner = learner

    def submit(self, requests):
        return [Ready(completion) for completion in self._sampled(requests)]

    def _sampled(self, requests):
        model, adapter = self.learner.model, self.learner.adapter
        if self.way == "own":
            engine = OwnWeights({self.learner.name: self.learner.policy}, len(requests), keep_states=False)
            return [ready.result() for ready in engine.submit(requests)]
        if self.way == "mixed" and mixes(model, adapter):
            return sample(model, requests, batch_size=len(requests), adapters={requests[0].policy: adapter})
        with self.learner.policy.active() as base:
            return sample(base, requests, batch_size=len(requests))


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def reward(prompts, completions, completion_ids, **columns):
    return [sum(i % 5 for i in ids) / len(ids) + 0.1 * len(ids) for ids in completion_ids]


def trainer_of(cell: Cell, rate: float, folder: Path, steps: int, noise: bool = False) -> PPOv2Trainer:
    """A trainer of the cell. With ``noise`` its adapter and its critic's head are not those that begin with 0."""
    model, tokenizer = build(cell.architecture)
    model = adapted(model, cell.method)
    if noise and cell.method != "all weights":
        shake(model)
    args = PPOv2Config(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, total_episodes=8 * steps,
        response_length=8, learning_rate=rate, lr_scheduler_type="constant", temperature=1.0, report_to=[], save_strategy="no",
        disable_tqdm=True, use_cpu=True, seed=3, num_sample_generations=0, num_ppo_epochs=1, num_mini_batches=2,
        logits_chunk=cell.chunk, gradient_checkpointing=cell.checkpointing, critic=cell.critic, stop_token_id=[2, 7, 11],
        missing_eos_penalty=None, whiten_rewards=False, kl_coef=0.05, max_grad_norm=1e9,
    )  # fmt: skip
    # lengths differ, prompts are equal in pairs, and some rows end early
    rows = [{"prompt": "1+" * (7 if n < 5 else 1) + str(n // 2)} for n in range(8)]
    trainer = PPOv2Trainer(args, tokenizer, model, train_dataset=rows, reward_funcs=reward, sampler=Way(cell.path))
    if noise and trainer.learners["policy"].value_head is not None:
        torch.nn.init.normal_(trainer.learners["policy"].value_head.linear.weight)
    return trainer


def unmoved(cell: Cell, folder: Path, noise: bool) -> list[str]:
    """Train one update at learning rate 0, and say what is not as it must be.

    Without ``noise`` the policy is its reference. With it, every parameter has a gradient.
    """
    trainer = trainer_of(cell, 0.0, folder, steps=1, noise=noise)
    learner, seen, read = trainer.learners["policy"], [], []
    learnt: set[str] = set()
    accumulate, step = learner.accumulate, learner.step

    def accumulated(rows, index, *forward):
        read[:] = [rows]
        seen.append(accumulate(rows, index, *forward))
        return seen[-1]

    def stepped():
        learnt.update(n for n, p in learner.model.named_parameters() if p.grad is not None and p.grad.any())
        return step()

    learner.accumulate, learner.step = accumulated, stepped
    metrics = trainer.train()
    faults = [f"ratio {m['ratio']:.6g}" for m in seen if abs(m["ratio"] - 1) > 1e-3]
    faults += [f"KL {m['approx_kl']:.2g}" for m in seen if m["approx_kl"] > 1e-6]
    if (gap := metrics.get("policy/engine_gap", 0.0)) > 1e-3:
        faults.append(f"engine gap {gap:.2g}")
    if not noise and (kl := abs(metrics["objective/kl_k3"])) > 1e-5:
        faults.append(f"KL from the reference {kl:.2g}")
    if noise:
        trained = {n for n, p in learner.model.named_parameters() if p.requires_grad}
        with learner.policy.active() as base:
            idle = tuple(unused(base, read[0].input_ids, read[0].tree.lengths))
        lost = {name for name in trained - learnt if not name.endswith(idle)}
        faults += [f"{len(lost)} parameters without a gradient, such as {min(lost)}"] if lost else []
    return faults


def unused(model: Any, ids: torch.Tensor, lengths: list[int]) -> set[str]:
    """The parameters that a plain forward of these rows does not use: experts that no token reaches, parts for images,
    ..."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(5)
    for row, length in zip(ids, lengths, strict=True):
        logits = model(input_ids=row[None, : length - 1]).logits
        (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    found = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    model.zero_grad(set_to_none=True)
    return found


def moved(cell: Cell, folder: Path) -> list[str]:
    """Train two updates at a real rate, save and load, and say what is not as it must be."""
    trainer = trainer_of(cell, RATES.get(cell.method, 1e-2), folder, steps=2, noise=True)
    learner = trainer.learners["policy"]
    named = {n: p for n, p in learner.model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in named.items()}
    accumulate, read = learner.accumulate, []
    learner.accumulate = lambda rows, *more: (read.append(rows), accumulate(rows, *more))[1]
    trainer.train()
    still = {n for n, p in named.items() if torch.equal(p, before[n])}
    if still:
        with learner.policy.active() as base:
            idle = tuple(unused(base, read[-1].input_ids, read[-1].tree.lengths))
        still = {name for name in still if not name.endswith(idle)}
    faults = [f"{len(still)} parameters never moved, such as {min(still)}"] if still else []
    trainer.save_model(str(folder / "saved"))
    if cell.method == "all weights":
        loaded = AutoModelForCausalLM.from_pretrained(folder / "saved")
    else:
        loaded = read_adapter(build(cell.architecture)[0], str(folder / "saved"), "default", False).get_base_model()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad(), learner.policy.active() as base:
        base.eval()
        gap = float((base(input_ids=ids).logits - loaded.eval()(input_ids=ids).logits).abs().max())
    return faults + ([f"saved and loaded logits differ by {gap:.2g}"] if gap > 1e-3 else [])


def tried(cell: Cell) -> tuple[Cell, str, str]:
    """Try a cell, with a plain LoRA where PEFT has not its own adapter for the model.

    Return what was tried, and :func:`conform`.
    """
    outcome, reason = conform(cell)
    if outcome == "unbuilt" and reason.startswith("PEFT:"):
        cell = replace(cell, method="LoRA")
        outcome, reason = conform(cell)
    return cell, outcome, reason


def conform(cell: Cell) -> tuple[str, str]:
    """Return ``checked``, ``refused``, ``unbuilt`` or ``fails``, and the reason."""
    with tempfile.TemporaryDirectory() as folder, silence():
        try:
            model, _ = build(cell.architecture)
            model.generate(
                input_ids=torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False
            )  # as transformers does
            model = adapted(model, cell.method)
            if cell.method != "all weights":
                check_plain(model)
            del model
        except Unbuilt as error:
            return "unbuilt", str(error)
        except Exception as error:
            return "unbuilt", f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        try:
            faults = unmoved(cell, Path(folder) / "unmoved", noise=False)
            faults += unmoved(cell, Path(folder) / "noise", noise=True)
            faults += moved(cell, Path(folder) / "moved")
        except ValueError as error:
            return "refused", " ".join(str(error).replace(folder, "FOLDER").split())[:250]
        except Exception as error:
            return "fails", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ("fails", "; ".join(faults)) if faults else ("checked", "")


# -- the table ----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/conformance.json", ROOT / "docs/models.md"

HEAD = """# Models and adapters

<!-- written by benchmarks/conformance.py -->

Any causal language model of transformers can be a policy, with all weights or an adapter of PEFT. What cannot be trained as a plain
forward says is refused in one sentence, before the first update. This page says what was tried.

`python benchmarks/conformance.py` builds a tiny model of every causal architecture of transformers {transformers} and trains it with PEFT
{peft}: one update at learning rate 0, again with noise on the adapter, and two updates at a real rate. It asks that

- the ratio of a first minibatch is 1, and the KL divergence from before and from the reference 0 (adapters that do not begin as the
  identity are given the option by which they do);
- sampled and trained log-probabilities are equal (`engine_gap` 0), whichever way the adapter is run in rollouts;
- every trainable parameter has a gradient and moves, if a plain forward of the same rows gives it one;
- what is saved and loaded again computes the same logits.

Each architecture is tried in one combination of adapter, critic, `logits_chunk`, gradient checkpointing and way to sample. The combinations
are dealt so that every option meets every other one. `make test` tries four of them, and `make test-slow` all. The models are tiny and
random, in float32 on a CPU: this says that the numbers are right, and nothing of speed, memory or half precision.

Last run: {date}, {machine}, torch {torch}. Of {total} architectures {checked} were checked and {refused} refused. {unbuilt} could not be built
tiny or have images or sound, and were not tried. They are checked at the start of a run like all others (below).

## What is checked in every run

- An adapter that works only through PEFT's own forward is refused: virtual tokens before the prompt (prompt tuning, prefix tuning,
  p-tuning, CPT), adaption prompts, X-LoRA, Poly, activated LoRA, and models with mixed adapters.
- Everything that requires a gradient is trained, or named. A parameter that belongs to no adapter is an error, because PEFT would not save it.
- All modules are in evaluation mode while they are trained. Only what recomputes activations is in training mode, alone. Dropout and noise
  are 0 there too, whatever they are called.
- In its first minibatch a learner's ratios must be 1 and its KL divergence 0, to 1e-6 in float32 and 5e-3 in half precision. Otherwise the
  run ends with the name of the first layer whose output differs between two forwards.
- In the first update, samples and training must agree: `engine_gap` is at most 0.1 nats a token, or 0.3 in half precision.
- An adapter answers in one batch with others only if it consists of the two matrices of linear layers, and if both ways give the same
  logits with noise on it. Otherwise it is run as it is. vLLM gets such adapters only.
- Positions and padding are counted as the model counts them, which a few short forwards show. Where padding would count, only prompts of
  one length are sampled together.
- The cache of a conversation is kept between turns only if it is keys and values alone, and if padding may stand in it. Where rows that are
  sampled together would not have the numbers of each alone (RWKV), they are sampled one at a time.
- With `longrope`, a token is read by the angles for what precedes it. Rows beyond the length are read apart, and a cache is dropped there.
  "Dynamic" angles are refused beyond the context.
- Adapters whose initialisation changes the base (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA, KaSA), and those that train biases of it, need a base of
  their own. Their reference is a copy of the adapter, or of the model, and not the base with the adapter off.
- Other references: a team's is a copy of the adapter as the run finds it, unless that is a new LoRA; that of `PPOv2Trainer` is the base with
  the adapter off, as in TRL.
- With noise on its adapter a model must not see later tokens. Lily does, because it averages over all tokens of a batch, and is refused.
- `target_modules: all-linear` leaves out what a LoRA cannot adapt: `dt_proj` and `out_proj` of Mamba, whose weights are read without calling
  the layers, and layers that are no plain product (the routers of Llama 4 and Phi-MoE, `o_a_proj` of DeepSeek V4). A list that names one is refused.
- Adapters that are merged into their base, and several that are active at once, are refused. What the user has frozen of the active adapter stays so.

AdaLoRA trains at its initial ranks, because nothing calls its `update_and_allocate`.

## Adapters

{methods}

## Architectures

{architectures}
"""


def page(found: dict[str, Any]) -> str:
    """The page that shows the results."""
    rows = found["cells"]
    built = [row for row in rows if row["outcome"] != "unbuilt"]
    methods = ["| adapter | checked with | refused with |", "|---|---|---|"]
    for method in METHODS:
        by = {
            o: [r["architecture"] for r in built if r["method"] == method and r["outcome"] == o]
            for o in ("checked", "refused")
        }
        methods.append(f"| {method} | {', '.join(by['checked']) or '-'} | {', '.join(by['refused']) or '-'} |")
    table = ["| architecture | tried with | |", "|---|---|---|"]
    for row in built:
        what = row["outcome"] if row["outcome"] == "checked" else f"{row['outcome']}: {row['reason']}"
        table.append(f"| {row['architecture']} | {_told(row)} | {what.replace('|', '/')} |")
    left = ", ".join(row["architecture"] for row in rows if row["outcome"] == "unbuilt")
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("checked", "refused", "unbuilt")}
    return HEAD.format(
        **found["versions"], date=found["date"], machine=found["machine"], total=len(rows), **counts, methods="\n".join(methods),
        architectures="\n".join(table) + f"\n\nNot tried: {left}.",
    )  # fmt: skip


def _told(row: dict[str, Any]) -> str:
    return str(Cell(**{key: value for key, value in row.items() if key not in ("outcome", "reason")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="the architectures to try; default: all")
    parser.add_argument("--page", action="store_true", help="only write docs/models.md again")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": []}
    if not options.page:
        logging.set_verbosity_error()
        torch.set_num_threads(1)
        known = {row["architecture"]: row for row in found["cells"]}
        for cell in cells(architectures()):
            if cell.architecture in options.architectures or not options.architectures:
                start = time.time()
                cell, outcome, reason = tried(cell)
                print(
                    f"{cell.architecture:24s} {outcome:8s} {time.time() - start:6.1f} s  {cell}  {reason}", flush=True
                )
                known[cell.architecture] = {**asdict(cell), "outcome": outcome, "reason": reason}
                found = {
                    "date": time.strftime("%Y-%m-%d"),
                    "machine": f"one core of {platform.machine()}",
                    "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
                    "cells": [known[kind] for kind in architectures() if kind in known],
                }
                RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
