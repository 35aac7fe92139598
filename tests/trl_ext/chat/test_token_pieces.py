"""The text that each token adds to a completion."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_ext.chat.encoding import token_pieces


def bytes_tokenizer():
    """A token for every byte, as GPT-2's tokenizer without its merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_a_token_within_a_character_adds_nothing_and_the_last_one_all_of_it():
    tokenizer = bytes_tokenizer()
    ids = tokenizer.encode("aé👍b")
    assert token_pieces(tokenizer, ids) == ["a", "", "é", "", "", "", "👍", "b"]
    cut = ids[:-2]  # ends within the thumb
    pieces = token_pieces(tokenizer, cut)
    assert "".join(pieces) == tokenizer.decode(cut) and len(pieces) == len(cut)
    assert token_pieces(tokenizer, []) == []
