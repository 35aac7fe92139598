"""Build tiny character-level models with real architectures, without any download."""

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer
from transformers import (
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from maporl.config.schema import TinySection
from trl_ext.chat.encoding import CONCATENATION_TEMPLATE


def build_tiny_tokenizer(section: TinySection) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one id for each character of ``alphabet``, after padding, end of sequence and unknown.

    The order of the alphabet decides the ids.
    """
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *section.alphabet])}
    raw = RawTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # a dot finds no line break
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CONCATENATION_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_tiny_model(section: TinySection, tokenizer: PreTrainedTokenizerFast, dtype: str = "auto") -> PreTrainedModel:
    """Build a randomly initialised model of the section's architecture and size.

    ``dtype`` is the precision of its weights: float32, bfloat16 or float16. ``auto`` is float32. Each has the same
    random numbers, which are then rounded.
    """
    model = _build(section, tokenizer)
    if dtype != "auto":
        for parameter in model.parameters():  # buffers stay in float32, as those of models that are read
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


def build_tiny_classifier(section: TinySection, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Build a sequence classifier with one output, with the trunk of :func:`build_tiny_model`. Its output is 0."""
    config = _build(section, tokenizer).config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.zero_()
    return model


def _build(section: TinySection, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": section.hidden_size,
        # a gated MLP has three matrices and an ordinary one two, so 8/3 of the width gives the same size
        "intermediate_size": section.hidden_size * 4
        if section.architecture == "gpt_neox"
        else section.hidden_size * 8 // 3,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "max_position_embeddings": section.context,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if section.architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=section.heads))
    if section.architecture == "gpt_neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**shape, hidden_dropout=0.0, attention_dropout=0.0))
    head_dim = section.hidden_size // section.heads
    return Qwen3ForCausalLM(Qwen3Config(**shape, num_key_value_heads=section.heads, head_dim=head_dim))
