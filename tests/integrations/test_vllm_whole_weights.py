"""Whole weights for vLLM: every request, and what the group carries. The server and the GPU group are stand-ins."""

import importlib.machinery
import json
import sys
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, SimpleNamespace

import pytest
import torch

from maporl.integrations.vllm import whole_weights
from maporl.integrations.vllm.section import VLLMSection
from maporl.integrations.vllm.server import RemoteServer, VLLMFailure
from maporl.integrations.vllm.whole_weights import WeightSender

WEIGHTS = {
    "model.embed": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16),
    "model.norm": torch.arange(6.0).view(2, 3).T,  # not contiguous, which NCCL cannot send
}


class Routes(BaseHTTPRequestHandler):
    """The routes of vLLM's weight transfer.

    Two of them are answered when the group has done its part, as vLLM's are.
    """

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self._say(self.path, None)

    def do_POST(self):
        self._say(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _say(self, path, body):
        server = self.server
        server.requests.append((path, body))
        status, content = server.says[path].pop(0) if isinstance(server.says[path], list) else server.says[path]
        if status == 200 and path in server.together:
            assert server.together[path].wait(20), f"nobody came to the group of {path}"
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Group:
    """The GPU group, with this process as number 0."""

    def __init__(self, server):
        self.server, self.received, self.goes_on = server, [], threading.Event()
        self.goes_on.set()

    def broadcast(self, tensor, src, stream):
        assert tensor.is_contiguous()
        self.goes_on.wait(20)
        self.received.append((src, stream, tensor.tolist()))
        if len(self.received) % len(WEIGHTS) == 0:
            self.server.together["/update_weights"].set()


@pytest.fixture
def stage(monkeypatch):
    """A server, its stand-in, the group, and in ``met`` how the group was opened.

    A package ``vllm`` has what is needed.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    server.requests, done = [], (200, {"message": "done"})
    server.together = {"/init_weight_transfer_engine": threading.Event(), "/update_weights": threading.Event()}
    server.says = {
        "/server_info?config_format=json": (200, {"vllm_config": {"weight_transfer_config": {"backend": "nccl"}}}),
        "/get_world_size": (200, {"world_size": 2}),
        "/reset_prefix_cache": (200, {"success": True}),
        **dict.fromkeys([*server.together, "/start_weight_update", "/finish_weight_update"], done),
    }
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    group, met = Group(server), []

    def trainer_init(meeting):
        met.append(meeting)
        server.together["/init_weight_transfer_engine"].set()
        return group

    parts = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.nccl_common": {"trainer_init": trainer_init},
        "vllm.utils": {},
        "vllm.utils.network_utils": {"get_ip": lambda: "10.1.2.3"},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    url = f"http://127.0.0.1:{server.server_port}"
    yield SimpleNamespace(
        server=server, group=group, met=met, remote=RemoteServer(url, VLLMSection(urls=[url], retries=0, timeout=20))
    )
    group.goes_on.set()
    server.shutdown()


def opened(stage):
    return WeightSender(stage.remote, 51217, torch.device("cpu"))


def test_requests_say_what_the_group_carries(stage):
    sender = opened(stage)
    meeting = {"master_address": "10.1.2.3", "master_port": 51217, "world_size": 3}
    assert stage.met == [meeting]
    sender.send(WEIGHTS)
    carried = {"names": [*WEIGHTS], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 2], [3, 2]]}
    assert stage.server.requests == [
        ("/server_info?config_format=json", None),
        ("/get_world_size", None),
        ("/init_weight_transfer_engine", {"init_info": meeting | {"rank_offset": 1}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": carried}),
        ("/finish_weight_update", {}),
        ("/reset_prefix_cache", {}),
    ]
    assert [(source, values) for source, _, values in stage.group.received] == [
        (0, [[1.0, 2.0], [3.0, 4.0]]),
        (0, [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]),
    ]
    sender.send(WEIGHTS)
    assert len(stage.met) == 1, "the group stays open"


@pytest.mark.parametrize(
    "says, message",
    [
        ({"/server_info?config_format=json": (404, {})}, "asking for its weight transfer: answered 404"),
        (
            {"/server_info?config_format=json": (200, {"vllm_config": {"weight_transfer_config": None}})},
            "was started without --weight-transfer-config",
        ),
        (
            {"/get_world_size": (200, {})},
            "asking for the number of its workers: its answer is not that of a vLLM server .*world_size",
        ),
        ({"/init_weight_transfer_engine": (500, {"error": "busy"})}, "opening a GPU group: answered 500 .*busy"),
    ],
)
def test_a_server_that_takes_no_weights_says_so_before_any_is_sent(stage, says, message):
    stage.server.says |= says
    with pytest.raises(VLLMFailure, match=rf"^{stage.remote.url}: {message}"):
        opened(stage)
    assert not stage.group.received


def test_a_refusal_is_heard_of_although_the_group_would_wait_for_ever(stage):
    sender = opened(stage)
    stage.group.goes_on.clear()
    stage.server.says["/update_weights"] = (500, {"error": "no parameter model.norm"})
    with pytest.raises(VLLMFailure, match=r"taking weights: answered 500 .*no parameter model\.norm"):
        sender.send(WEIGHTS)
    assert not stage.group.received
    paths = [path for path, _ in stage.server.requests]
    assert paths.count("/update_weights") == 1, "a second one would find the server in the middle of the first"


def test_the_cache_is_dropped_when_the_last_request_has_ended(stage, monkeypatch):
    sender = opened(stage)
    stage.server.says["/reset_prefix_cache"] = [(200, {"success": done}) for done in (False, False, True)]
    sender.send(WEIGHTS)
    assert stage.server.says["/reset_prefix_cache"] == []
    monkeypatch.setattr(whole_weights, "FORGETTING_SECONDS", 0.0)
    stage.server.says["/reset_prefix_cache"] = (200, {"success": False})
    with pytest.raises(VLLMFailure, match=r"has requests that did not end within 0 s, and keeps what it has cached"):
        sender.send(WEIGHTS)


@pytest.mark.parametrize(
    "installed, message",
    [(None, r"vLLM is not installed$"), ("0.20.0", r"vLLM 0\.20\.0 is installed, and 0\.27\.1 and 0\.33\.0 have it$")],
)
def test_what_is_missing_of_vllm_here_is_named(stage, monkeypatch, installed, message):
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", None)
    if installed is not None:
        monkeypatch.setattr(whole_weights, "version", lambda name: installed)
    with pytest.raises(VLLMFailure, match=rf"this process cannot join a GPU group .*nccl_common.*; {message}"):
        opened(stage)
    assert stage.server.requests == []
