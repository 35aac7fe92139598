"""Why servers end completions, as each of their clients reads it: an API's, that of vllm serve, and vLLM in the process."""

from concurrent.futures import Future
from threading import RLock
from types import SimpleNamespace

import pytest

from maporl.engines.openai import NotWhole, is_whole, reader
from maporl.http_client import HttpClient, HttpFailure
from maporl.integrations.vllm.colocated import ColocatedServer
from maporl.integrations.vllm.server import VLLMFailure, _sampled
from maporl.types import Stop
from trl_ext.sampling.options import Sampled

REASONS = {
    Stop.EOS: ["stop", "STOP", "eos", "eos_token", "stop_sequence", "end_turn", "COMPLETE", "tool_calls", "tool_use"],
    Stop.LENGTH: ["length", "MAX_TOKENS", "model_length", "model_context_window_exceeded"],
    Stop.FILTERED: ["content_filter", "SAFETY", "refusal", "sensitive", "RECITATION", "PROHIBITED_CONTENT", "SPII"],
    None: [
        *("abort", "error", "insufficient_system_resource", "network_error", "MALFORMED_FUNCTION_CALL", "OTHER"),
        *("repetition", "pause_turn", "load", "incomplete", "in_progress", "someday", "x" * 1000, "", None, 7, ["stop"]),
    ],
}  # fmt: skip
ROWS = [(reason, stop) for stop, reasons in REASONS.items() for reason in reasons]


@pytest.mark.parametrize(("reason", "stop"), ROWS, ids=lambda value: repr(value)[:30])
def test_every_client_takes_the_same_completions_for_whole(reason, stop):
    assert Stop.of(reason) is stop
    choice = {
        "message": {"content": "4"},
        "finish_reason": reason,
        "token_ids": [7],
        "logprobs": {"token_logprobs": [-0.5]},
    }
    read = reader(HttpClient("http://h", 1.0), 64)
    if stop is None:
        with pytest.raises(NotWhole, match="not whole: finish_reason") as caught:
            read({"choices": [choice]})
        assert caught.value.passing
    else:
        record = read({"choices": [choice]})
        assert record["text"] == "4" and is_whole(record)
    assert is_whole({"text": "4", "stop": reason, "prompt_tokens": 0, "completion_tokens": 0}) is (stop is not None)

    here = ColocatedServer.__new__(ColocatedServer)  # its engine is a stand-in: vLLM's own cannot be asked to break off
    here.url, here._lock, here._running = "vLLM here", RLock(), {"1": (0, future := Future())}
    completion = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-0.5)}], finish_reason=reason)
    output = SimpleNamespace(finished=True, request_id="1", outputs=[completion])
    here._llm = SimpleNamespace(llm_engine=SimpleNamespace(step=lambda: [output]))
    assert not here.advance()
    if stop in (Stop.EOS, Stop.LENGTH):
        assert _sampled({"choices": [choice]}, 1) == Sampled([7], [-0.5]) == future.result()
    else:
        with pytest.raises(HttpFailure, match="its completion ended for the reason"):
            _sampled({"choices": [choice]}, 1)
        with pytest.raises(VLLMFailure, match=r"a completion ended for the reason .*, and is not whole"):
            future.result()
