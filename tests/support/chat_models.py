"""Small tokenizers of the families that chat models use, with their templates, and one of characters, so that token ids
can be counted. Nothing is downloaded.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path
from string import printable

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from maporl.config.schema import TinySection
from maporl.engines.base import Engine, Reply
from maporl.tiny import build_tiny_tokenizer
from maporl.types import Stop
from trl_ext.chat.encoding import FALLBACK_TEMPLATE
from trl_ext.chat.stop_strings import StopStrings

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
GLUED = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}{% endif %}"
)
CORPUS = [
    "How many apples has Ann, if Bob gives her 3 and she had 12 before? The answer is 15, because 12 + 3 = 15.",
    "These are answers of other agents to the same question:\n\nAgent 1:\n```\nx < 4 and y > 2\n```\n\n\nCorrect it.",
    "def add(a, b):\n    return a + b  # if a <= b\nim start of turn end header id inst system user assistant tool "
    "call",
]


def _trained(model, trainer, normalizer=None, splitter=None, decoder=None):
    raw = Tokenizer(model)
    if normalizer is not None:
        raw.normalizer = normalizer
    if splitter is not None:
        raw.pre_tokenizer = splitter
    if decoder is not None:
        raw.decoder = decoder
    raw.train_from_iterator(CORPUS, trainer)
    return raw


def _fast(raw, special, others, template, **names):
    raw.add_special_tokens(special)
    raw.add_tokens(others)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, chat_template=template, clean_up_tokenization_spaces=False, **names
    )


def _byte_level():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(
        models.BPE(ignore_merges=True),
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False),
        splitter=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel(),
    )


def chatml():
    """Byte-level BPE, as Qwen and SmolLM have it, with added tokens that are not special."""
    others = [AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "    ")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _fast(_byte_level(), special, others, CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def llama3():
    """Byte-level BPE with many reserved tokens."""
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    special += [f"<|reserved_special_token_{n}|>" for n in range(250)]
    names = {"bos_token": special[0], "eos_token": "<|eot_id|>", "pad_token": special[0]}
    return _fast(_byte_level(), special, [], LLAMA3, **names)


def gemma():
    """SentencePiece-like BPE that writes spaces as U+2581, with added tokens for runs of line ends and for markup."""
    raw = _trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"], show_progress=False),
        normalizers.Replace(" ", "\u2581"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
    )
    others = [AddedToken(t, normalized=False) for t in ("\n", "\n\n", "\u2581\u2581", "<table>", "<unused0>")]
    special = ["<start_of_turn>", "<end_of_turn>"]
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return _fast(raw, special, others, GEMMA, **names)


def mistral():
    """Llama-2-like BPE, whose special tokens are sought after normalization, with [INST] as a token."""
    raw = _trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False),
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    )
    special = [AddedToken(t, normalized=True, special=True) for t in ("<s>", "</s>")]
    special += [AddedToken(t, normalized=False, special=True) for t in ("[INST]", "[/INST]")]
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    return _fast(raw, special, [], MISTRAL, **names)


def unigram():
    """A T5-like tokenizer: NFKC, and the end of a text stands in its vocabulary as a piece."""
    raw = _trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
        ),
        normalizers.NFKC(),
        pre_tokenizers.Metaspace(),
    )
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return _fast(raw, [], [], FALLBACK_TEMPLATE, **names)


def bert():
    """WordPiece that writes everything small and drops control characters, with an added token sought after that."""
    raw = _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(
            vocab_size=200, special_tokens=["[PAD]", "[UNK]", "[SEP]", "[CLS]"], show_progress=False
        ),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    others = [AddedToken("<tool>", normalized=True)]
    names = {"bos_token": "[CLS]", "eos_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return _fast(raw, [], others, GLUED, **names)


def tiny():
    """The project's own character-level tokenizer, whose template writes messages without anything between them."""
    return build_tiny_tokenizer(TinySection(alphabet="0123456789+=?<>|/_ abcdefghijklmnopqrstuvwxyz"))


FAMILIES = {f.__name__: f for f in (chatml, llama3, gemma, mistral, unigram, bert, tiny)}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt "
    "%}[assistant]{% endif %}"
)


def tokenizer_with(bos=True, eos=False, template=None, pad="<pad>"):
    """A tokenizer of bytes that puts BOS before a text and EOS behind it, as it is told."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(words[:4])
    single = "<s> " * bos + "$A" + " </s>" * eos
    raw.post_processor = processors.TemplateProcessing(
        single=single, pair=single + " $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": pad, "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template, **names)


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
