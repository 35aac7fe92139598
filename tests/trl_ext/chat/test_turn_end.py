"""How a template ends an answer is found from what it writes: it is taught, it ends what is sampled, and a conversation
goes on after each token that may end an answer as the template goes on."""

import string
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from maporl import Example
from maporl.engines.transcript import Transcript, written_transcripts
from maporl.loops.rows import Row
from maporl.loops.run_stage import encoded
from maporl.tasks import GSM8K
from maporl.types import Dialogue, Utterance
from trl_ext.chat.encoding import FALLBACK_TEMPLATE, turn_end
from trl_ext.sampling.options import stop_ids_of

OPENS = "{% if add_generation_prompt %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPENS + "<|im_start|>assistant\n{% endif %}"  # fmt: skip
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}"
    "<end_of_turn>\n{% endfor %}" + OPENS + "<start_of_turn>model\n{% endif %}"
)
GLM = (
    "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + OPENS + "<|assistant|>\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endfor %}" + OPENS + "<|start|>assistant{% endif %}"
)
WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + OPENS + "assistant:{% endif %}"
REFUSES = "{% for m in messages %}{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}"

# the template, its control tokens, EOS, how an answer ends, and after each token that may end it, what is not written
FAMILIES = {
    "ChatML": (CHATML, "<|im_end|> <|im_start|> <|endoftext|>", "<|im_end|>", "<|im_end|>",
               {"<|im_end|>": "<|im_end|>", "<|endoftext|>": "<|im_end|>"}),
    "a base of ChatML": (CHATML, "<|im_end|> <|im_start|> <|endoftext|>", "<|endoftext|>", "<|im_end|>",
                         {"<|im_end|>": "<|im_end|>", "<|endoftext|>": "<|im_end|>"}),
    "Gemma": (GEMMA, "<bos> <eos> <start_of_turn> <end_of_turn>", "<eos>", "<end_of_turn>",
              {"<end_of_turn>": "<end_of_turn>", "<eos>": "<end_of_turn>"}),
    "GLM-4": (GLM, "[gMASK] <|endoftext|> <|user|> <|assistant|> <|observation|>", "<|endoftext|>", "<|user|>",
              {"<|user|>": "<|user|>", "<|endoftext|>": "", "<|observation|>": ""}),
    "Llama-2": (LLAMA2, "<s> </s>", "</s>", " </s>", {"</s>": " </s>"}),
    "Harmony": (HARMONY, "<|start|> <|end|> <|message|> <|return|> <|call|>", "<|return|>", "<|return|>",
                {"<|return|>": "<|end|>", "<|call|>": "<|end|>"}),
    "words alone": (WORDS, "<eos>", "<eos>", "<eos>", {"<eos>": ""}),
    "our own": (FALLBACK_TEMPLATE, "<bos> <eos>", "<eos>", "<eos>", {"<eos>": "<eos>"}),
    "none that renders answers": (REFUSES, "<eos>", "<eos>", "<eos>", {}),
    "no template": (None, "<eos>", "<eos>", "<eos>", {}),
}  # fmt: skip


def characters(family):
    """A tokenizer of single characters with the control tokens and the template of a family."""
    template, special, eos, _, _ = FAMILIES[family]
    vocabulary = {token: n for n, token in enumerate(["<pad>", *special.split(), *dict.fromkeys(string.printable)])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    others = [word for word in special.split() if word != eos]
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token=eos, additional_special_tokens=others,
        chat_template=template, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_as_its_template_ends_it(family):
    tokenizer = characters(family)
    assert tokenizer.decode(turn_end(tokenizer).ids) == FAMILIES[family][3]


@pytest.mark.parametrize(("family", "end"), [(f, end) for f, (*_, ends) in FAMILIES.items() for end in ends])
def test_a_conversation_goes_on_as_its_template_does_after_each_token_that_may_end_an_answer(family, end):
    tokenizer, left_out = characters(family), FAMILIES[family][4][end]
    stops = frozenset(tokenizer.convert_tokens_to_ids([*FAMILIES[family][4]]))
    messages = [user("Q1"), {"role": "assistant", "content": "A1"}, user("Q2")]
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    begun, _, after = written.rpartition("A1")
    assert after.startswith(left_out)
    for ended in (True, False):
        transcript = Transcript()
        prompt = transcript.add_messages([user("Q1")], tokenizer, stops)
        assert begun.startswith(tokenizer.decode(prompt).rstrip())
        said = tokenizer.convert_tokens_to_ids(["A", "1"]) + tokenizer.convert_tokens_to_ids([end] * ended)
        transcript.add_completion(0, said, ended)
        whole = transcript.add_messages([user("Q2")], tokenizer, stops)
        rest = tokenizer.decode(whole[len(prompt) + len(said) :])
        assert rest == (after.removeprefix(left_out) if ended else after)


@pytest.mark.parametrize("family", [f for f in FAMILIES if "none" not in f and "no " not in f])
def test_taught_turns_end_so_too_and_every_end_is_learned(family):
    tokenizer, (*_, end, ends) = characters(family), FAMILIES[family]
    said = Dialogue(None, [Utterance(n, "ann", "ann", n, n, [user(f"Q{n}")], f"A{n}") for n in (1, 2)])
    [row] = written_transcripts(said, "ann", "ann", tokenizer, frozenset(tokenizer.convert_tokens_to_ids([*ends])))
    learned = [number for number, sampled in zip(row.ids, row.sampled_mask, strict=True) if sampled]
    assert tokenizer.decode(learned) == f"A1{end}A2{end}"
    policy, pieces = SimpleNamespace(tokenizer=tokenizer), (("A1", True), ("B", False))
    flat = Row("ann", "ann", "ann", "0", [], [], 1.0, (0, 0, 0), example=Example("0", "Q1", "1"), pieces=pieces)
    task = GSM8K.__new__(GSM8K)
    object.__setattr__(task, "instruction", "{question}")
    row = encoded(flat, policy, None, task)
    assert tokenizer.decode(row.completion_ids) == f"A1B{end}"
    assert row.bears_loss == [True, True, False, *[True] * len(turn_end(tokenizer).ids)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sampled_ends_there_too(family):
    tokenizer = characters(family)
    last = turn_end(tokenizer).ids[-1]
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[0]))
    assert stop_ids_of(model, tokenizer, None, None) == {0, last, tokenizer.eos_token_id}
    assert stop_ids_of(model, tokenizer, "eos", None) == {tokenizer.eos_token_id}


def test_another_template_is_read_anew():
    tokenizer = characters("Gemma")
    assert tokenizer.decode(turn_end(tokenizer).ids) == "<end_of_turn>"
    tokenizer.chat_template = FALLBACK_TEMPLATE
    assert tokenizer.decode(turn_end(tokenizer).ids) == "<eos>"
