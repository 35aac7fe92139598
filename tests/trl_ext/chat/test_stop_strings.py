"""Stop strings: where they end a completion, in every way of sampling, and what is trained on."""

import random
from concurrent.futures import Future

import pytest
import torch
from chat_models import FAMILIES
from one_policy import trainer_of
from tiny_models import sample
from transformers import MambaConfig, MambaForCausalLM
from vllm_engines import fake, fake_vllm  # noqa: F401  # fixtures

from maporl import Agent, Arithmetic, Debate, MultiAgentPPOConfig, MultiAgentPPOTrainer, Team
from maporl.config.schema import ApiSection, TinySection
from maporl.engines.base import Request
from maporl.engines.openai import OpenAIEngine
from maporl.engines.text import reply_of
from maporl.engines.transcript import Transcript
from maporl.rewards.scoring import grade_answers
from maporl.team.agents import Voice
from maporl.tiny import build_tiny_tokenizer
from maporl.types import Ask, Dialogue, Example, Stop, Utterance
from trl_ext.chat.stop_strings import StopStrings
from trl_ext.ppo.options import Decoding, PPOOptions
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import Draw, TokenRequest


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_ends_with_the_first_token_whose_text_contains_a_string(family):
    """Token by token, as a sampler asks, and at once, as for the answer of a server: both find the first place."""
    tokenizer = FAMILIES[family]()
    generator = random.Random(0)
    found = 0
    for _ in range(40):
        ids = [generator.randrange(len(tokenizer)) for _ in range(40)]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        start = generator.randrange(max(1, len(text) - 3))
        strings = [s for s in (text[start : start + generator.randint(1, 6)], "never said") if "\ufffd" not in s and s]
        stops = StopStrings.of(tokenizer, strings)
        first = next(
            (n for n in range(1, 41) if any(s in tokenizer.decode(ids[:n], skip_special_tokens=True) for s in strings)),
            None,
        )
        assert stops.length(ids) == first
        assert next((n for n in range(1, 41) if stops.end(ids[:n])), None) == first
        found += first is not None
    assert found > 20


def test_a_character_of_several_tokens_and_special_tokens_within_a_string():
    tokenizer = FAMILIES["chatml"]()
    ids = tokenizer.encode("a\N{SNOWMAN}b", add_special_tokens=False)
    assert len(ids) > 3 and StopStrings.of(tokenizer, ["\N{SNOWMAN}"]).length(ids) == len(ids) - 1
    a, b, special = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", "<|im_start|>"))
    apart = [b, a, *[special] * 30, b]
    stops = StopStrings.of(tokenizer, ["ab"])
    assert stops.length(apart) == len(apart) and stops.end(apart) and not stops.end(apart[:-1])


def one_policy(tiny, folder, **options):
    options |= {"response_length": 30, "temperature": 1.0, "stop_token": "none"}
    return trainer_of(tiny, folder, reward_funcs=lambda p, c, **k: [0.0] * len(c), **options)


def test_what_is_sampled_until_the_string_is_what_is_trained_on(tiny, tmp_path):
    free = one_policy(tiny, tmp_path)
    whole = free.collect(free.next_batch()).completions
    trainer = one_policy(tiny, tmp_path, stop_strings=["7", "+a"], missing_eos_penalty=2.0)
    batch = trainer.advantage(trainer.score(trainer.collect(trainer.next_batch())))
    rows, tokenizer = batch.token_batches["policy"], trainer.learners["policy"].tokenizer
    assert {c.ended for c in batch.completions} == {True, False}
    for row, (before, done) in enumerate(zip(whole, batch.completions, strict=True)):
        prefixes = [tokenizer.decode(before.response_ids[:n], skip_special_tokens=True) for n in range(1, 31)]
        expected = next((n for n, text in enumerate(prefixes, 1) if "7" in text or "+a" in text), 30)
        assert done.response_ids == before.response_ids[:expected] and done.text == prefixes[expected - 1]
        assert done.ended == done.text.endswith(("7", "+a"))
        assert done.score == (0.0 if done.ended else -2.0)
        assert rows.input_ids[row][rows.sampled_mask[row]].tolist() == done.response_ids
    assert batch.metrics["val/num_eos_tokens"] == sum(c.ended for c in batch.completions)
    trainer.update(batch)


def test_a_recurrent_model_ends_there_too():
    tokenizer = FAMILIES["tiny"]()
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, state_size=4))
    stops = StopStrings.of(tokenizer, ["a", "1"])
    prompts, keys = [tokenizer.encode("1"), tokenizer.encode("12a")] * 8, [(n,) for n in range(16)]
    free = sample(model, prompts, Draw(40, 1.0), keys)
    until = sample(model, prompts, Draw(40, 1.0, stop=stops.strings), keys, tokenizer=tokenizer)
    assert any(len(one.ids) < 40 for one in until)
    assert [one.ids for one in until] == [one.ids[: stops.length(one.ids)] for one in free]


def team_trainer(tiny, folder, **options):
    model, tokenizer = tiny()
    args = MultiAgentPPOConfig(
        output_dir=str(folder), per_device_train_batch_size=8, total_episodes=8, response_length=20, temperature=1.0,
        report_to=[], use_cpu=True, save_steps=0, eval_questions=2, disable_tqdm=True, **options,
    )  # fmt: skip
    return MultiAgentPPOTrainer(args, Team([Agent("ann", model, tokenizer)]), Arithmetic(), Debate(turns=2))


def test_an_agent_of_a_team_ends_there_and_its_conversation_goes_on(tiny, tmp_path):
    trainer = team_trainer(tiny, tmp_path, stop_strings=["7", "a"])
    batch = trainer.collect(trainer.next_batch())
    tokenizer = trainer.team.policies["ann"].tokenizer
    said = [u for d in batch.dialogues for u in d.utterances]
    by_string = [u for u in said if tokenizer.decode(u.response_ids, skip_special_tokens=True).endswith(("7", "a"))]
    assert len(by_string) > 4 and all(u.stop is Stop.STOP for u in by_string)
    for u in said:
        text = tokenizer.decode(u.response_ids[:-1], skip_special_tokens=True)
        assert "7" not in text and "a" not in text, "nothing is said after a stop string"
    for d in batch.dialogues:
        first, second = d.utterances
        ids = [*first.prompt_ids, *first.response_ids]
        assert second.prompt_ids[: len(ids)] == ids, "the transcript keeps what was sampled"
        if first in by_string:  # the template's own end of a message follows, because the agent did not say it
            assert second.prompt_ids[len(ids)] == tokenizer.eos_token_id
    batch = trainer.update(trainer.advantage(trainer.score(batch)))
    assert batch.token_batches["ann"].sampled_mask.sum() == sum(len(u.response_ids) for u in said)


ASK = Ask("ann", [{"role": "user", "content": "4"}])
REQUEST = Request(ASK, Example("1", "4", "4"), 0, 0, Transcript(), "one", "ann")


def test_vllm_is_asked_to_stop_and_what_it_says_after_that_is_cut(fake, tmp_path):  # a fixture
    _, engine, team = fake
    voice = team.policies["ann"].voice
    engine = engine(tmp_path)
    engine.generate([REQUEST], Decoding(0.7))
    voice.end_at(voice.stop_ids, ["46", "ox"])
    ids = voice.tokenizer.encode("a fox 46", add_special_tokens=False)
    said = Future()
    said.set_result(Sampled(ids, [-0.5] * len(ids)))
    engine.tokens._servers[next(iter(engine.tokens._servers))].submit = lambda asked: [said]
    [reply] = engine.generate([REQUEST], Decoding(0.7))
    assert (reply.text, reply.stop, reply.logprobs) == ("a fox", Stop.STOP, [-0.5] * 5)
    assert reply.response_ids == ids[:5]


def test_requests_to_vllm_have_the_strings(fake, fake_vllm, tmp_path, tiny):  # a fixture
    server, engine, team = fake
    voice = team.policies["ann"].voice
    voice.end_at(voice.stop_ids, ["46"])
    engine(tmp_path).generate([REQUEST], Decoding(0.7))
    asked = [body for path, body in server.requests if path == "/v1/completions"]
    assert [body.get("stop") for body in asked] == [None, ["46"]], "the probe has none"
    assert asked[-1]["include_stop_str_in_output"] is True
    colocated = fake_vllm(Team([Agent("ann", *tiny(), engine="vllm")]))
    for strings in ((), ("46",)):
        colocated.sample([TokenRequest("base", [1], Draw(5, 0.7, stop=strings))])
    assert [(p.stop, p.detokenize) for _, p in colocated._llm.told] == [([], False), (["46"], True)]


def test_an_api_is_asked_to_stop(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    engine = OpenAIEngine({"bob": ApiSection("m", cache=False)}, 5, ["46"])
    request = Request(Ask("bob", []), Example("1", "4", "4"), 0, 0, Transcript(), "one")
    assert engine._query(request, Decoding(0.7))["stop"] == ["46"]


def test_a_reply_that_ends_with_a_string_is_whole(tiny):
    _, tokenizer = tiny()
    ids = tokenizer.encode("1+a", add_special_tokens=False)
    for strings, stop in ((("+a",), Stop.STOP), (("a1",), Stop.LENGTH), ((), Stop.LENGTH)):
        voice = Voice("ann", tokenizer, stop_ids=frozenset([2]))
        request = Request(Ask("ann", []), Example("1", "4", "4"), 0, 0, Transcript(ids=[5]), "one", "ann")
        assert reply_of(request, voice, TokenRequest("ann", [5], Draw(5, stop=strings)), Sampled(ids)).stop is stop


def test_an_answer_that_is_cut_off_in_a_thought_of_the_prompt_is_none():
    """A template that ends prompts with <think>: the text of the answer says nothing of it."""
    alphabet = "".join(dict.fromkeys("<think>/ Answer: 0123456789+= Is"))
    tokenizer = build_tiny_tokenizer(TinySection(alphabet=alphabet, context=99))
    voice = Voice("ann", tokenizer, stop_ids=frozenset([1]))
    example = Example("1", "2+2=", "4")

    def graded(prompt, said, **more):
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        request = Request(Ask("ann", []), example, 0, 0, Transcript(ids=ids), "one", "ann")
        asked = TokenRequest("ann", ids, Draw(99))
        reply = reply_of(request, voice, asked, Sampled(tokenizer.encode(said, add_special_tokens=False)))
        tags = {} if reply.no_text is None else {"no_text": reply.no_text}
        utterance = Utterance(0, "ann", "ann", 0, 0, [], reply.text, tags=tags, **more)
        grade_answers([Dialogue(example, [utterance])], Arithmetic())
        return utterance.grade.answer, utterance.grade.correct

    assert graded("2+2=", "Answer: 4") == ("4", True) == graded("2+2= <think>", "5</think>Answer: 4")
    assert graded("2+2= <think>", "Answer: 4") == (None, False) == graded("2+2= <think> ", "is it 4")
    assert graded("<think>2</think>2+2=", "Answer: 4") == ("4", True) == graded("<think> 2+2=", "Answer: 4")
    assert graded("2+2= <think>", "Is it 3", restated="Answer: 4") == ("4", True), "the model has said it since"


@pytest.mark.parametrize("strings", ["\\n", [""], ["a", 3], [None], 5, {"a"}])
def test_strings_that_mean_nothing_are_refused(strings):
    with pytest.raises(ValueError, match="stop_strings: expected a list of texts that are not empty, got"):
        PPOOptions(stop_strings=strings)
