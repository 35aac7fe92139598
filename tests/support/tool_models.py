"""A tokenizer of characters, so that token ids can be counted, and an engine that says what a script says."""

import hashlib
from importlib.metadata import version
from pathlib import Path
from string import printable

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from maporl.engines.base import Engine, Reply
from maporl.types import Stop
from trl_ext.chat.stop_strings import StopStrings

TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
"""Where TRL keeps the chat templates of model families. It has no public name for them."""


def trl_template(name):
    """TRL's chat template of a family, as text. Tests that need one are skipped where TRL no longer has it."""
    file = TRL_TEMPLATES / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"TRL {version('trl')} has no chat template {name}", allow_module_level=True)
    return file.read_text(encoding="utf-8")


def characters(template):
    """Each character is a token. ``<|im_start|>`` and ``<|im_end|>`` are special; the latter ends a message."""
    vocabulary = {"<pad>": 0, "<unk>": 1, "<|im_start|>": 2, "<|im_end|>": 3}
    for character in [*printable[:95], "\n"]:
        vocabulary[character] = len(vocabulary)
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([AddedToken(t, normalized=False) for t in ("<pad>", "<unk>", "<|im_start|>", "<|im_end|>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


class SayingEngine(Engine):
    """Says the next line of an agent's script, as sampled tokens. A line that ends with EOS's words ends so."""

    def __init__(self, tokenizer, scripts, stop_strings=()):
        self.tokenizer, self.scripts = tokenizer, {name: list(lines) for name, lines in scripts.items()}
        self.stops = StopStrings.of(tokenizer, stop_strings)
        self.stop_ids = frozenset([tokenizer.eos_token_id])

    def generate(self, requests, decoding):
        replies = []
        for request in requests:
            prompt = request.transcript.add_messages(request.messages, self.tokenizer, self.stop_ids)
            line = self.scripts[request.ask.agent].pop(0)
            ids = self.tokenizer.encode(line, add_special_tokens=False)
            ended = ids[-1] in self.stop_ids
            request.transcript.add_completion(request.utterance, ids, ended)
            stop = Stop.EOS if ended else Stop.LENGTH
            if not ended and self.stops is not None and self.stops.end(ids):
                stop = Stop.STOP
            text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
            replies.append(Reply(text, stop, prompt, ids))
        return replies


def digest(ids):
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]
