"""A classifier, as users of TRL's PPOTrainer bring it."""

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification


def classifier(tokenizer, seed=0, size=None):
    """A sequence-classification model with one output, as TRL's reward and value models."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=size or len(tokenizer), num_labels=1, pad_token_id=0)
    return LlamaForSequenceClassification(config)
