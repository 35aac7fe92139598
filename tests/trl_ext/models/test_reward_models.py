"""Reward models of strangers: their own special tokens and templates, encoders, adapters, and what is refused at the
door."""

import pytest
import torch
from chat_models import TEMPLATE, tokenizer_with
from conformance import build
from one_policy import config
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from trl_ext import PPOv2Trainer
from trl_ext.chat.encoding import RenderedChat
from trl_ext.ppo.batch import Completion
from trl_ext.trainer.prompts import Prompt, read_prompt
from trl_ext.trainer.reward_sources import RewardSources
from trl_ext.trainer.scoring import ModelReward, RewardError

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 1}
ROWS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [4, 5, 6]]


def llama(**more):
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=300, pad_token_id=0, **SIZE, **more)).eval()


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=300, **SIZE)).eval()


def gpt2():
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, num_labels=1, pad_token_id=0)
    ).eval()


def adapted():
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, target_modules=["q_proj"]))
    with torch.no_grad():
        model.get_base_model().score.modules_to_save["default"].weight.normal_()
    return model.eval()


@pytest.mark.parametrize("model", [llama, bert, gpt2, adapted])
def test_a_score_is_the_models_own_for_the_row_alone(model):
    model = model()
    with torch.no_grad():
        expected = [float(model(input_ids=torch.tensor([row])).logits) for row in ROWS]
    assert len({round(score, 5) for score in expected}) == 4, "rows differ"
    assert ModelReward(model, tokenizer_with(), batch_size=2).score_ids(ROWS) == pytest.approx(expected, abs=1e-5)


def test_what_gives_no_one_number_for_a_text_is_refused_at_the_door():
    with pytest.raises(ValueError, match=r"expected a sequence-classification model.*BertForTokenClassification"):
        ModelReward(BertForTokenClassification(BertConfig(vocab_size=300, **SIZE)), tokenizer_with())
    with pytest.raises(ValueError, match=r"LlamaForCausalLM with an output \[1, 2, 40\].*AutoModelForSeq"):
        policy = build("llama")[0]
        policy.config.num_labels = 1
        ModelReward(policy, tokenizer_with())


def scored(tokenizer, reader, prompt, completion, shown=""):
    """The ids that a reward model with the tokenizer ``reader`` reads."""
    read = []

    class Model:
        tokenizer = reader

        def score_texts(self, texts):
            self.texts = texts
            return ModelReward.score_texts(self, texts)

        def score_ids(self, rows):
            read.extend(rows)
            return [0.0] * len(rows)

    model, text = Model(), tokenizer.decode(completion, skip_special_tokens=True)
    sources = RewardSources(tokenizer, lambda prompts, completions: [], None, None, None, 4)
    sources._scores_of(
        model, [Completion(prompt, completion, True, "row", prompt=Prompt(prompt, shown, {}), text=text)]
    )
    return model.texts[0], read[0]


def test_a_text_has_the_reward_models_special_tokens_and_the_blank_where_the_completion_begins():
    words = {word: n for n, word in enumerate(["<unk>", "<s>", "</s>", "\u2581Hello", "\u2581world"])}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    policys = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    reader = tokenizer_with(bos=True, eos=True)
    text, ids = scored(policys, reader, [1, 3], [4, 2])
    assert text == "Hello world"
    assert ids == reader.encode("Hello world") and ids[0] == 1 and ids[-1] == 2


@pytest.mark.parametrize(
    ("template", "expected"),
    [(TEMPLATE, "<s>[user]hi </s>[assistant]yes"), (None, "<s>User: hi </s>\n\nAssistant: yes</s>\n\n")],
)
def test_a_conversation_is_shown_in_the_reward_models_template(template, expected):
    policys = tokenizer_with(
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    policys.add_tokens([AddedToken(word, special=True) for word in ("<|im_start|>", "<|im_end|>")])
    prompt = read_prompt({"prompt": [{"role": "user", "content": "hi </s>"}]}, policys)
    reader = tokenizer_with(template=template)
    text, ids = scored(policys, reader, prompt.ids, policys.encode("yes", add_special_tokens=False), prompt.prompt)
    assert isinstance(text, RenderedChat) and text == expected
    assert reader.decode(ids) == expected
    assert ids.count(1) == 1 and ids.count(2) == expected.count("</s>") - 1, "the user's </s> is words"


def test_a_policy_learns_from_an_encoder_with_a_tokenizer_of_its_own(tiny, tmp_path):
    parts = {"reward_model": bert(), "reward_processing_class": tokenizer_with(eos=True)}
    args = config(tmp_path, total_episodes=16)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1"}]} for n in range(16)]
    trainer = PPOv2Trainer(args, tiny()[1], tiny()[0], train_dataset=rows, **parts)
    assert trainer.train()["objective/scores"] != 0.0


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_angles_that_depend_on_the_length_are_those_of_the_text_alone(kind):
    angles = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    if kind == "longrope":
        angles = {"rope_type": kind, "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
                  "original_max_position_embeddings": 4}  # fmt: skip
    model = llama(rope_parameters=angles, max_position_embeddings=64 if kind == "longrope" else 4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
        rows = [[3, 4, 5], [6, 7, 8, 9]] + [[8, 9, 10, 11, 12, 13]] * (kind == "longrope")
        expected = [float(model(input_ids=torch.tensor([row])).logits) for row in rows]
    assert ModelReward(model, tokenizer_with()).score_ids(rows) == pytest.approx(expected, abs=1e-5)


def test_texts_that_do_not_fit_and_models_that_pool_at_eos_are_refused():
    with pytest.raises(RewardError, match="a row has 5 tokens, and it reads at most 4"):
        ModelReward(llama(max_position_embeddings=4), tokenizer_with()).score_ids([[3, 4, 5, 6, 7]])
    roberta = RobertaForSequenceClassification(
        RobertaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                      max_position_embeddings=6, num_labels=1)  # of which it counts two before a text
    )  # fmt: skip
    with pytest.raises(RewardError, match="a row has 5 tokens, and it reads at most 4"):
        ModelReward(roberta, tokenizer_with()).score_ids([[3, 4, 5, 6, 7]])
    config = BartConfig(vocab_size=300, d_model=16, encoder_layers=1, decoder_layers=1, num_labels=1, encoder_attention_heads=2,
                        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)  # fmt: skip
    with pytest.raises(ValueError, match="BartForSequenceClassification is an encoder with a decoder, which reads a"):
        ModelReward(BartForSequenceClassification(config), tokenizer_with())
