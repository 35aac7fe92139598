"""Steps of decoding that a CUDA device repeats. A CPU takes the same steps one by one, with the same fixed places."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import build, build_any, lively, sample
from torch import nn

from trl_ext.sampling import batch, recorded_step
from trl_ext.sampling.kv_cache import KVCache
from trl_ext.sampling.recorded_step import records
from trl_ext.sampling.request import Draw

PROMPTS = [[5], [6, 7, 8, 9], [10, 11], [6, 7, 8, 9], [12, 13, 14, 15, 16, 17, 18], [10, 11]]
STOP = frozenset({2, 9, 11})
KEYS = [(0, row) for row in range(6)]


@pytest.fixture
def recording(monkeypatch):
    """A function that turns recorded steps on and off, which the device decides otherwise."""

    def turn(on, room=512):
        monkeypatch.setattr(batch, "records", lambda base, steps: on)
        monkeypatch.setattr(recorded_step, "ROOM", room)

    return turn


def assert_equal(found, expected, apart=1e-5):
    assert [completion.ids for completion in found] == [completion.ids for completion in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=apart)


@pytest.mark.parametrize("room", [1, 3, 512])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral", "olmo2"])
def test_recorded_steps_sample_what_steps_sample(tiny, recording, kind, room):
    model = build_any(tiny, kind)[0] if kind in ("qwen3", "mistral", "olmo2") else lively(build(tiny, kind)[0])
    recording(False)
    expected = sample(model, PROMPTS, Draw(20, 1.0, stop_ids=STOP), KEYS)
    assert len({len(completion.ids) for completion in expected}) > 2, "rows end at different times"
    recording(True, room)
    assert_equal(sample(model, PROMPTS, Draw(20, 1.0, stop_ids=STOP), KEYS), expected)


def test_a_conversation_goes_on_from_the_states_of_recorded_steps(tiny, recording):
    model = lively(build(tiny, "llama")[0])
    found = {}
    for on in (False, True):
        recording(on, 5)
        states = KVCache()
        first = sample(model, PROMPTS, Draw(12, 1.0, stop_ids=STOP), KEYS, states=states)
        longer = [prompt + answer.ids + [20, 21] for prompt, answer in zip(PROMPTS, first, strict=True)]
        known = [len(prompt) - 3 for prompt in longer]  # the last token of an answer was not read
        assert len(states) == 6 - (len(PROMPTS) - len({tuple(p[:k]) for p, k in zip(longer, known, strict=True)}))
        found[on] = sample(model, longer, Draw(12, 1.0, stop_ids=STOP), KEYS, states=states, read=known)
        recording(on)
        assert_equal(found[on], sample(model, longer, Draw(12, 1.0, stop_ids=STOP), KEYS), 1e-4)
    assert_equal(found[True], found[False])


def test_rows_of_several_adapters_are_read_in_one_recording(tiny, recording):
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(lively(build(tiny, "llama")[0]), config, adapter_name="x")
    model.add_adapter("y", config)
    model.eval()
    found = []
    for on in (False, True):
        recording(on)
        found.append(sample(model, PROMPTS, Draw(12, 1.0, stop_ids=STOP), KEYS, adapters=["x", "y"] * 3))
    assert_equal(*found)


def test_rows_that_have_ended_stay_until_half_have(tiny, recording):
    """Fewer rows are another step to record, which takes as long as several steps."""
    model = lively(build(tiny, "llama")[0])
    sizes = []
    model.register_forward_hook(
        lambda module, arguments, options, output: sizes.append(len(options["input_ids"])), with_kwargs=True
    )
    own = [Draw(length, 1.0) for length in (4, 8, 12, 16)]
    widths = {}
    for on in (False, True):
        recording(on)
        sizes.clear()
        sample(model, [[5], [6], [7], [8]], own, KEYS[:4])
        widths[on] = sizes[-15:]
    assert widths[False] == [4] * 3 + [3] * 4 + [2] * 4 + [1] * 4
    assert widths[True] == [4] * 7 + [2] * 4 + [1] * 4


class Base(nn.Module):
    """A model that says that it is on a CUDA device."""

    def __init__(self, rope="default"):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        text = SimpleNamespace(rope_parameters={"rope_type": rope}, layer_types=None)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def parameters(self, recurse=True):
        return iter([SimpleNamespace(device=torch.device("cuda", 0))])


def test_what_is_recorded(monkeypatch):
    assert not records(nn.Linear(2, 2), 100), "a CPU launches its own operations"
    assert records(Base(), 8)
    assert not records(Base(), 7), "recording would take as long"
    assert not records(Base("dynamic"), 100), "angles that depend on the length are not in the recording"
    gathered = Base()
    gathered.inner.register_forward_pre_hook(lambda module, arguments: None)
    assert not records(gathered, 100), "hooks may gather weights"
    refused = Base()
    recorded_step._refused.add(refused)
    assert not records(refused, 100)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert not records(Base(), 100), "autocast keeps copies of weights"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_a_cuda_device_repeats_what_it_was_told(tiny, recording, kind):
    model = (build_any(tiny, kind, dtype=torch.float32)[0] if kind == "qwen3" else lively(build(tiny, kind)[0])).cuda()
    assert records(model, 40)
    recording(False)
    expected = sample(model, PROMPTS, Draw(40, 1.0, stop_ids=STOP), KEYS)
    recording(True, 16)
    assert_equal(sample(model, PROMPTS, Draw(40, 1.0, stop_ids=STOP), KEYS), expected, 1e-3)


@pytest.mark.gpu
def test_a_step_that_waits_for_the_host_is_not_recorded_but_sampled(tiny, recording):
    model = lively(build(tiny, "llama")[0]).cuda()
    recording(False)
    expected = sample(model, PROMPTS, Draw(20, 1.0, stop_ids=STOP), KEYS)
    model.model.layers[0].register_forward_hook(lambda module, arguments, output: output.sum().item() and None)
    recording(True)
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph"):
        found = sample(model, PROMPTS, Draw(20, 1.0, stop_ids=STOP), KEYS)
    assert_equal(found, expected, 1e-3)
    assert model in recorded_step._refused
    assert_equal(sample(model, PROMPTS, Draw(20, 1.0, stop_ids=STOP), KEYS), expected, 1e-3)
