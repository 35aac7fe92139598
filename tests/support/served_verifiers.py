"""A verifier behind a real server."""

import json
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from launches import free_port
from transformers import LlamaConfig, LlamaForSequenceClassification

from reward_server.options import ServerOptions
from reward_server.serve import server


@contextmanager
def serving(scorers, **options):
    """A server in a thread; gives its URL."""
    running = server(scorers, ServerOptions(port=free_port(), **options), log_level="critical")
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{running.config.port}"
    finally:
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def verifier_folder(tmp_path_factory):
    from maporl.config.schema import TinySection
    from maporl.tiny import build_tiny_tokenizer

    tokenizer = build_tiny_tokenizer(TinySection())
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, num_labels=1, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("verifier")
    LlamaForSequenceClassification(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "verifier.json").write_text(json.dumps({"temperature": 1.7, "metrics": {"held_out": {"auc": 0.5}}}))
    return str(folder)
