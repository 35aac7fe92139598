"""One cell of the conformance sweep: a tiny model of an architecture, an adapter, a critic and the ways to read and sample.

An update at learning rate 0 must have ratio 1, KL 0 and engine gap 0, and give every trainable parameter a gradient. After two
updates at a real rate every trainable parameter has moved, and what is saved and loaded again computes the same.
"""

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from maporl.config.schema import TinySection
from maporl.tiny import build_tiny_tokenizer
from trl_ext import PPOv2Config, PPOv2Trainer
from trl_ext.adapters import adapter_parameters
from trl_ext.lora_merge import merged, merges
from trl_ext.mixed_adapters import mixes
from trl_ext.sampler import Sampler
from trl_ext.sampling import sample
from trl_ext.weights import read_adapter

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

MORE: dict[str, dict[str, Any]] = {
    **{
        kind: DECODER
        for kind in (
            "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
            "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
        )
    },
    **{
        kind: SEQ2SEQ
        for kind in (
            "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "trocr",
            "whisper",
        )
    },
    **{kind: MLA for kind in ("axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu")},
    **{kind: MLA | EXPERTS for kind in ("axk1", "deepseek_v2", "dots3_note_text")},
    **{kind: EXPERTS for kind in ("hy_v4", "mixtral", "qwen3_moe", "gpt_oss", "solar_open")},
    "bailing_hybrid": MLA | LINEAR,
    "longcat_flash": {**MLA, **EXPERTS, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 64, "moe_topk": 2, "head_dim": 8,
                      "zero_expert_num": 1},
    "inkling_text": EXPERTS | LINEAR,
    "qwen3_next": EXPERTS | LINEAR,
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "kolibri1": {**EXPERTS, "layer_types": ["full_attention", "sliding_attention"]},
    "mimo_v2_flash": {**EXPERTS, "layer_types": ["full_attention", "sliding_attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
                  "mamba_chunk_size": 16},
    "codegen": {"rotary_dim": 4, "head_dim": None},
    "gptj": {"rotary_dim": 4, "head_dim": None},
    "falcon": {"head_dim": None},
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
"""What architectures need besides :data:`SIZE` to be built tiny. Bidirectional ones are decoders only if they are told so."""

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
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": list(range(3, 15)), "target_modules": "embeddings"}),
}
"""The adapters of the sweep by name: PEFT's class and its options. Where ``target_modules`` is not given it is all linear layers."""

NO_CHECKPOINTING = ("ctrl", "jetmoe", "xlm", "openai-gpt", "cpmant")
"""Architectures that transformers cannot recompute."""
CRITICS = ("head", "adapter", "model", "none")
PATHS = ("own", "mixed", "plain")
"""How completions are sampled: as the trainer does (merged where that suits), in a batch of several adapters, or as it is."""


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
        return f"{self.method}, critic {self.critic}{chunk}{', checkpointing' * self.checkpointing}, sampled {self.path}"


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
    options = dict(options)
    embedding, head = ({n for n, m in model.named_modules() if m is found} for found in
                       (model.get_input_embeddings(), model.get_output_embeddings()))  # fmt: skip
    kinds = ("Linear", "Conv1D") if name in ("LoraConfig", "AdaLoraConfig", "IA3Config", "VeraConfig") else ("Linear",)
    mamba = ("out_proj", "conv1d", "dt_proj") if "mamba" in model.config.model_type or "nemotron_h" in model.config.model_type else ()
    linear = [n for n, m in model.named_modules() if type(m).__name__ in kinds and n not in head]
    linear = [n for n in linear if n.rpartition(".")[2] not in mamba]  # PEFT refuses these
    norms = [n for n, m in model.named_modules() if "Norm" in type(m).__name__ and getattr(m, "weight", None) is not None]
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


class Way(Sampler):
    """Samples by one of the ways that suit the adapter."""

    def __init__(self, way: str):
        self.way = way

    def attach(self, learner, args):
        self.learner = learner

    def sample(self, prompts, sampling, keys):
        model, adapter = self.learner.model, self.learner.adapter
        if self.way == "mixed" and mixes(model, adapter):
            return sample(model, prompts, sampling, keys, [adapter] * len(prompts))
        merge = self.way == "own" and merges(model, adapter)
        with merged(model, adapter) if merge else self.learner.active() as base:
            return sample(base, prompts, sampling, keys)


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
        logits_chunk=cell.chunk, gradient_checkpointing=cell.checkpointing, critic=cell.critic, stop_token="none",
        missing_eos_penalty=None, whiten_rewards=False, kl_coef=0.05, max_grad_norm=1e9,
    )  # fmt: skip
    rows = [{"prompt": "1+" * (7 if n < 5 else 1) + str(n)} for n in range(8)]
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

    def accumulated(rows, index):
        read[:] = [rows]
        seen.append(accumulate(rows, index))
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
        with learner.active() as base:
            lost = trained - learnt - {n for n in trained if n.endswith(tuple(unused(base, read[0].input_ids, read[0].tree.lengths)))}
        faults += [f"{len(lost)} parameters without a gradient, such as {min(lost)}"] if lost else []
    return faults


def unused(model: Any, ids: torch.Tensor, lengths: list[int]) -> set[str]:
    """The parameters that a plain forward of these rows does not use: experts that no token reaches, parts for images, ..."""
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
    learner.accumulate = lambda rows, index: (read.append(rows), accumulate(rows, index))[1]
    trainer.train()
    still = {n for n, p in named.items() if torch.equal(p, before[n])}
    if still:
        with learner.active() as base:
            still -= {n for n in still if n.endswith(tuple(unused(base, read[-1].input_ids, read[-1].tree.lengths)))}
    faults = [f"{len(still)} parameters never moved, such as {min(still)}"] if still else []
    trainer.save_model(str(folder / "saved"))
    if cell.method == "all weights":
        loaded = AutoModelForCausalLM.from_pretrained(folder / "saved")
    else:
        loaded = read_adapter(build(cell.architecture)[0], str(folder / "saved"), "default", False).get_base_model()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad(), learner.active() as base:
        base.eval()
        gap = float((base(input_ids=ids).logits - loaded.eval()(input_ids=ids).logits).abs().max())
    return faults + ([f"saved and loaded logits differ by {gap:.2g}"] if gap > 1e-3 else [])


def tried(cell: Cell) -> tuple[Cell, str, str]:
    """Try a cell, with a plain LoRA where PEFT has not its own adapter for the model. Return what was tried, and :func:`conform`."""
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
            ids = torch.tensor([[3, 4, 5]])
            with torch.no_grad():
                model(input_ids=ids)
            model = adapted(model, cell.method)
            if cell.method != "all weights" and not adapter_parameters(model, "default"):
                raise Unbuilt("PEFT: nothing of this model is trained by it")
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
            return ("refused" if "the package" not in str(error) else "fails"), " ".join(str(error).split())[:200]
        except Exception as error:
            return "fails", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ("fails", "; ".join(faults)) if faults else ("checked", "")
