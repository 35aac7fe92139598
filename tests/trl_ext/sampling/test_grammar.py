"""Completions that are held to a grammar: sampled and trained under the same masks."""

import json
import math
import random
import re

import pytest
import torch
from tiny_models import OPTIONS, build_any, filled, gradient_of, learner_of
from torch import nn

from maporl.decoding import StructuredOutput, as_written
from trl_ext.chat.templates import fault_of_grammar, try_grammar
from trl_ext.ppo import maths
from trl_ext.ppo.batch import Completion
from trl_ext.ppo.options import Grammar
from trl_ext.sampling.grammar import GrammarError, forced, grammars_of
from trl_ext.sampling.request import Draw, TokenRequest
from trl_ext.sampling.sample import sample

LETTERS = json.dumps({"grammars": [{"lark_grammar": "start: /[abc]*/"}]})
"""After any letters the same may come: a, b, c, and the end."""
ANYTHING = json.dumps({"grammars": [{"lark_grammar": "start: <[0-63]>*"}]})
ANSWER = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["ab", "ba"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


def bits(allowed, size):
    """The masks [M, W] of lists of allowed tokens."""
    masks = torch.zeros(len(allowed), 32 * -(-size // 32), dtype=torch.int64)
    for row, tokens in enumerate(allowed):
        masks[row, tokens] = 1
    packed = (masks.view(len(allowed), -1, 32) << torch.arange(32)).sum(-1)
    return packed.to(torch.int32)


@pytest.fixture
def model_of(tiny):
    """A llama in float64 that writes characters, and its tokenizer."""

    def make(alphabet='abc0123456789 {}":,'):
        model, tokenizer = tiny("llama", alphabet=alphabet)
        return model.double(), tokenizer

    return make


def said_under(model, tokenizer, text, rows=6, longest=40, **draw):
    """Completions of ``rows`` prompts that are held to a grammar, with what they were asked for."""
    grammar = Grammar(text, (tokenizer.eos_token_id,))
    drawn = Draw(longest, stop_ids=frozenset(grammar.stop_ids), grammar=grammar, **draw)
    generator = random.Random(0)
    prompts = [[generator.randrange(3, len(tokenizer)) for _ in range(4)] for _ in range(rows)]
    requests = [TokenRequest("", prompt, drawn, key=(number,)) for number, prompt in enumerate(prompts)]
    return requests, sample(model, requests, {"": tokenizer})


def completions_of(requests, said, grammar=True):
    return [
        Completion(
            request.prompt_ids, one.ids, True, str(number), sampled_logprobs=one.logprobs,
            grammar=request.draw.grammar if grammar else None,
        )
        for number, (request, one) in enumerate(zip(requests, said, strict=True))
    ]  # fmt: skip


def test_probabilities_are_those_among_the_allowed_tokens():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 70, generator=generator, dtype=torch.float64, requires_grad=True)
    allowed = [[0, 31, 32, 69], [5], list(range(70))]
    tokens = torch.tensor([32, 5, 6])
    logprobs = maths.token_logprobs(logits, tokens, 0.5, bits(allowed, 70))
    expected = [(logits[n] / 0.5)[some].log_softmax(0)[some.index(int(tokens[n]))] for n, some in enumerate(allowed)]
    assert torch.allclose(logprobs, torch.stack(expected), atol=1e-12, rtol=0)
    weights = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((torch.stack(expected) * weights).sum(), logits)
    assert torch.allclose(gradient, wanted, atol=1e-12, rtol=0)
    assert logprobs[1] == 0.0 and not gradient[1].any(), "a forced token is certain and moves nothing"
    entropies = maths.token_entropies(logits.detach(), 1.0, bits(allowed, 70))
    four = logits.detach()[0, allowed[0]].softmax(0)
    assert entropies[0].item() == pytest.approx(-(four * four.log()).sum().item(), abs=1e-6) and entropies[1] == 0
    assert forced(bits([[3], [31], [], [0, 64], [64]], 70)).tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("kind", ["tiny", "mamba", "openai-gpt"])
@pytest.mark.parametrize("draw", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2, "temperature": 0.3}], ids=str)
def test_what_is_sampled_keeps_to_the_schema_and_tells_the_probabilities_under_the_masks(model_of, tiny, kind, draw):
    model, tokenizer = model_of()
    if kind != "tiny":
        model = build_any(lambda: (None, tokenizer), kind, "eager")[0]
    requests, said = said_under(model, tokenizer, ANSWER.text, **draw)
    for request, one in zip(requests, said, strict=True):
        assert one.ids[-1] == tokenizer.eos_token_id
        answer = json.loads(tokenizer.decode(one.ids[:-1]))
        assert 0 <= answer["a"] <= 99 and answer["b"] in ("ab", "ba") and len(answer) == 2
        if one.logprobs is None:
            assert draw["temperature"] == 0
            continue
        logits = model(torch.tensor([request.prompt_ids + one.ids])).logits[0, len(request.prompt_ids) - 1 : -1]
        masks = grammars_of(tokenizer, logits.shape[1]).replay([request.draw.grammar], [one.ids])
        again = maths.token_logprobs(logits, torch.tensor(one.ids), request.draw.temperature, masks)
        assert torch.allclose(again, torch.tensor(one.logprobs, dtype=again.dtype), atol=1e-5)


def test_a_grammar_that_cannot_end_gives_a_cut_answer(model_of):
    model, tokenizer = model_of()
    _, said = said_under(model, tokenizer, json.dumps({"grammars": [{"lark_grammar": "start: /a{50}/"}]}), rows=1)
    assert said[0].ids == tokenizer.encode("a") * 40 and said[0].refused is None
    assert said[0].logprobs == [0.0] * 40


class OnlyTheseRows(nn.Module):
    """An output head that has no other rows than ``tokens``."""

    def __init__(self, head, tokens):
        super().__init__()
        self.head, self.weight = head, head.weight
        self.register_buffer("refused", torch.ones(head.weight.shape[0], dtype=torch.bool))
        self.refused[tokens] = False

    def forward(self, hidden):
        return self.head(hidden).masked_fill(self.refused, -torch.inf)


@pytest.mark.parametrize("options", [
    {"entropy_coef": 0.01}, {"aggregation": "sequence_mean", "ratio": "sequence_mean"},
    {"logits_chunk": 3, "entropy_coef": 0.01},
], ids=str)  # fmt: skip
def test_an_update_is_that_of_a_model_whose_head_has_only_the_allowed_rows(model_of, tmp_path, options):
    model, tokenizer = model_of()
    requests, said = said_under(model, tokenizer, LETTERS)
    assert sum(len(one.ids) for one in said) > 12
    found = []
    for masked in (True, False):
        own, _ = model_of()
        if not masked:
            rows = [tokenizer.eos_token_id, *tokenizer.encode("abc")]
            own.set_output_embeddings(OnlyTheseRows(own.get_output_embeddings(), rows))
        learner = learner_of(own, tokenizer, tmp_path, **OPTIONS, **options)
        batch = filled(learner, completions_of(requests, said, masked))
        measures, gradient = gradient_of(learner, batch)
        found.append((batch, measures, gradient))
    (held, one, gradient), (plain, other, wanted) = found
    assert torch.allclose(held.old_logprobs, plain.old_logprobs, atol=1e-9)
    assert torch.allclose(held.ref_logprobs, held.old_logprobs), "the reference is read under the same masks"
    assert torch.allclose(gradient, wanted, atol=1e-6) and gradient.norm() > 1e-3
    assert one.keys() == other.keys() and all(one[name] == pytest.approx(other[name], abs=1e-6) for name in one)
    assert one["ratio"] == pytest.approx(1.0, abs=1e-9) and torch.allclose(
        held.sampler_logprobs[held.sampled_mask].double(), held.old_logprobs[held.sampled_mask].double(), atol=1e-5
    )


def test_a_grammar_that_allows_everything_changes_no_number(model_of, tmp_path):
    model, tokenizer = model_of()
    text = ANYTHING.replace("63", str(len(tokenizer) - 1))
    requests, said = said_under(model, tokenizer, text)
    free = [TokenRequest("", r.prompt_ids, Draw(40, stop_ids=r.draw.stop_ids), r.key) for r in requests]
    assert [vars(one) for one in sample(model, free, {"": tokenizer})] == [vars(one) for one in said]
    found = []
    for held in (True, False):
        learner = learner_of(model_of()[0], tokenizer, tmp_path, **OPTIONS, entropy_coef=0.01)
        found.append(gradient_of(learner, filled(learner, completions_of(requests, said, held))))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("aggregation", "share"), [("token_mean", 2 / 6), ("sequence_mean", 1 / 2)])
def test_forced_tokens_count_in_no_average(model_of, tmp_path, aggregation, share):
    model, tokenizer = model_of()
    grammar = Grammar(json.dumps({"grammars": [{"lark_grammar": "start: /0{3}[ab]1{2}/ | /1[ab]{3}2/"}]}), (1,))
    said = [tokenizer.encode(text) for text in ("000a11", "1aba2")]
    rows = [Completion([5], [*ids, 1], True, str(n), grammar=grammar) for n, ids in enumerate(said)]
    learner = learner_of(model, tokenizer, tmp_path, aggregation=aggregation, kl_coef=0.0, num_ppo_epochs=1)
    batch = filled(learner, rows)
    # the first token is 0 or 1
    assert batch.chosen[0].nonzero().flatten().tolist() == [1, 4]
    assert batch.chosen[1].nonzero().flatten().tolist() == [1, 2, 3, 4]
    batch.advantages = batch.sampled_mask.to(batch.advantages.dtype)
    loss = learner.accumulate(batch, torch.arange(2))["policy_loss"]
    assert loss == pytest.approx(-1.0, abs=1e-6), "an average over the tokens that could be chosen"
    batch.advantages[1] = 0.0
    assert learner.accumulate(batch, torch.arange(2))["policy_loss"] == pytest.approx(-share, abs=1e-6)
    metrics, _ = learner.annotate(batch)
    assert metrics["policy/forced_tokens"] == pytest.approx(7 / 13)


def test_a_token_that_the_grammar_does_not_allow_is_no_row_of_it(model_of):
    tokenizer = model_of()[1]
    grammars = grammars_of(tokenizer, len(tokenizer))
    grammar = Grammar(LETTERS, (1,))
    assert math.prod(grammars.replay([grammar, None], [tokenizer.encode("abc"), [0, 1, 2]]).shape) == 6
    with pytest.raises(GrammarError, match=r"'0'.*not allowed by the grammar"):
        grammars.replay([grammar], [tokenizer.encode("ab0c")])


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


DOUBLED = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, 25)}


@pytest.mark.parametrize(("schema", "fault"), [
    ({"type": "object", "properties": {"k": {"not": {"type": "string"}}}}, r'properties.k: Unimplemented keys: ."not".'),
    ({"anyOf": [{"type": "null"}, {"items": {"type": "array", "uniqueItems": True}}]}, "anyOf.1.items: .*uniqueItems"),
    ({"$defs": {"x": {"format": "idn-hostname"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, "x: Unknown format"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "the schema: .*minimum .5. is greater than maximum"),
    ({"$ref": "http://127.0.0.1:9/x.json"}, "not present in a registry"),
    ({"$ref": "#"}, "NoExtension"),
    ({"type": "integer", "multipleOf": 99999989}, "more than 2 s of processor time"),
    ({"enum": [f"v{i}" for i in range(100_000)]}, "too big|more than"),
    ({"type": "array", "items": {"type": "string", "pattern": "("}}, "items: .*regex"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_its_place_in_bounded_time(schema, fault):
    [told] = StructuredOutput(json_schema=schema).faults("agents.a.structured_output")
    assert told.key == "agents.a.structured_output.json_schema"
    assert re.search(fault, told.what), told.what


@pytest.mark.parametrize("schema", [
    nested(40), {"$defs": {"d0": {"type": "string"}} | DOUBLED, "$ref": "#/$defs/d24"},
    {"type": "string", "pattern": "(x+x+)+y"}, {"type": "string", "maxLength": 10**9}, {"type": "object"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
], ids=lambda schema: str(schema)[:40])  # fmt: skip
def test_what_looks_hostile_and_is_not_is_taken(schema):
    assert fault_of_grammar(StructuredOutput(json_schema=schema).text) is None


def test_an_object_that_lists_its_properties_has_no_others_unless_it_says_so():
    inner = {"properties": {"x": {"const": {"properties": {}}}}}
    schema = {
        "properties": {"properties": inner, "open": {"properties": {}, "additionalProperties": True}},
        "$defs": {"d": inner},
    }
    shut = inner | {"additionalProperties": False}
    wanted = {
        "properties": {"properties": shut, "open": schema["properties"]["open"]},
        "$defs": {"d": shut},
        "additionalProperties": False,
    }
    assert {key: one for key, one in as_written(schema).items() if key != "x-guidance"} == wanted
    joined = {"allOf": [inner, {"properties": {"y": {}}}]}
    assert as_written(joined)["allOf"] == joined["allOf"], "each part of it would refuse the other's"


@pytest.mark.parametrize("regex", ["a/b", r"a\/b", "a[/]b", "a[x/]b", r"a[\/]b"])
def test_a_slash_ends_no_expression(regex):
    assert try_grammar(StructuredOutput(regex=regex).text) in ({"example": "a/b"}, {"example": "axb"})


def test_a_schema_of_a_file_is_read_once(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}')
    form = StructuredOutput(json_schema=str(file))
    text = form.text
    file.write_text('{"type": "boolean"}')
    assert form.text == text and form == StructuredOutput(json_schema=str(file))


def test_other_faults_of_structured_outputs(model_of, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text("[1]")
    for form, said in (
        ({"regex": "(?=a)b"}, "look-around"), ({"grammar": "start: foo"}, "unknown name"),
        ({"json_schema": str(tmp_path / "none.json")}, "No such file"), ({"json_schema": str(file)}, "expected a JSON"),
    ):  # fmt: skip
        [told] = StructuredOutput(**form).faults("here")
        assert told.key == f"here.{next(iter(form))}" and said in told.what
    with pytest.raises(ValueError, match="one of json_schema, regex and grammar"):
        StructuredOutput(regex="a", grammar="start: a")
    tokenizer = model_of()[1]
    with pytest.raises(GrammarError, match="stop_token: none"):
        grammars_of(tokenizer, len(tokenizer)).matcher(Grammar(LETTERS, ()))
