"""Sends whole weights to a vLLM server, over a GPU group (NCCL) of this process and the server's workers.

This is vLLM's own weight transfer, as it stands in vLLM 0.27.1 and 0.33.0: requests say what will come, and the group
carries it. ``trl vllm-serve`` of TRL 1.11 and later starts the same server. A request that another part answers in the
group is posted while a thread does that part, so that a server that refuses is heard of, although NCCL would wait for
it for ever.

This was written without a GPU. The exchange was tested with a stand-in for the server and the group.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from torch import Tensor

from maporl.integrations.vllm.server import RemoteServer, VLLMFailure
from trl_ext.process.waits import Threads, pause, result, until

FORGETTING_SECONDS = 30.0
"""How long a server may take until no request holds what it has cached."""

Done = TypeVar("Done")


class WeightSender:
    """Sends whole weights to one server. Making it opens the group, which stays open.

    Args:
        server: the server.
        port: the port of this machine at which the server's workers meet this process.
        device: the GPU of this process in the group. The server uses others.

    Raises:
        VLLMFailure: the server was not started for this or does not answer, or vLLM's package here has no such group.
    """

    def __init__(self, server: RemoteServer, port: int, device: torch.device):
        self.server, self.device = server, device
        open_group, address = _parts_of_vllm()
        if not server.ask("asking for its weight transfer", "/server_info?config_format=json", _transfers):
            raise VLLMFailure(f"{server.url}: was started without --weight-transfer-config")
        workers = server.ask("asking for the number of its workers", "/get_world_size", _workers)
        meeting = {"master_address": address(), "master_port": port, "world_size": workers + 1}

        def join() -> Any:
            with torch.cuda.device(device):
                return open_group(meeting)

        init_info = {**meeting, "rank_offset": 1}  # this process is number 0
        self.group = self._together(
            "opening a GPU group", "/init_weight_transfer_engine", {"init_info": init_info}, join
        )

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the server's weights by ``weights``, which has the model's parameters by name.

        Raises:
            VLLMFailure: the server refuses, or requests go on that hold what was cached under the old weights.
            TimeoutError: the group did not take the weights within the server's ``timeout``.
        """
        update_info = {
            "names": list(weights),
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
            "shapes": [list(weight.shape) for weight in weights.values()],
        }
        self.server.command("beginning to take weights", "/start_weight_update", {})
        self._together(
            "taking weights", "/update_weights", {"update_info": update_info}, lambda: self._broadcast(weights)
        )
        self.server.command("loading the weights it took", "/finish_weight_update", {})
        if not until(self._forgets, FORGETTING_SECONDS):
            raise VLLMFailure(
                f"{self.server.url}: has requests that did not end within {FORGETTING_SECONDS:g} s, and keeps what it "
                "has cached under the old weights; let no one else use it"
            )

    def _forgets(self, seconds: float) -> bool:
        """Return whether the server has dropped what it has cached. It cannot while requests hold it."""
        done = self.server.command("dropping its cache", "/reset_prefix_cache", {}, lambda answer: answer["success"])
        if not done:
            pause(seconds)
        return bool(done)

    def _together(self, what: str, path: str, body: dict[str, Any], work: Callable[[], Done]) -> Done:
        """Post ``body``, which is answered when ``work`` has done the part of this process, and return its result."""
        with Threads(1, "sends weights to vLLM") as threads:
            done = threads.submit(work)
            self.server.command(what, path, body)
            return result(done, self.server.section.timeout)

    def _broadcast(self, weights: Mapping[str, Tensor]) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()  # another thread has computed the weights, perhaps in another stream
            stream = torch.cuda.current_stream()
            sent = [weight.detach().to(self.device).contiguous() for weight in weights.values()]
            for weight in sent:
                self.group.broadcast(weight, src=0, stream=stream)
            stream.synchronize()


def _parts_of_vllm() -> tuple[Callable[[dict[str, Any]], Any], Callable[[], str]]:
    """Return what opens the group, and what returns the address of this machine."""
    try:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.utils.network_utils import get_ip
    except ImportError as error:
        try:
            have = f"vLLM {version('vllm')} is installed, and 0.27.1 and 0.33.0 have it"
        except PackageNotFoundError:
            have = "vLLM is not installed"
        raise VLLMFailure(f"this process cannot join a GPU group with the server ({error}); {have}") from error
    return trainer_init, get_ip


def _transfers(answer: Any) -> bool:
    return answer["vllm_config"]["weight_transfer_config"] is not None


def _workers(answer: Any) -> int:
    return int(answer["world_size"])
