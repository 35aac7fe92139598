"""vLLM in this process. In the trainer's own process, the GPU holds both vLLM's weights and those that are trained.

Where vLLM's sleep mode works, vLLM gives its memory back after the dialogues, and takes it again for the next ones.
"""

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from maporl.errors import ConfigError, install_command, one_line
from maporl.integrations.vllm.section import ColocateSection
from maporl.integrations.vllm.server import WHOLE, Server, VLLMFailure, held_to, seed_of
from maporl.team.team import Policy
from maporl.types import Stop
from trl_ext.models.adapters import base_state
from trl_ext.models.forward import base_of
from trl_ext.process import distributed
from trl_ext.process.random_states import forked_generators, forked_rng
from trl_ext.sampling.options import Sampled
from trl_ext.sampling.request import TokenRequest

HERE = "vLLM in this process"
"""The beginning of the name of such a server in messages, where other servers have a URL."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters that vLLM has room for. It takes adapters up to the one that it is told."""
SHARE = 0.3
"""The share of the device's memory that vLLM takes beside weights that are trained."""
DUMMY = "dummy"
"""How vLLM loads weights that :meth:`ColocatedServer.load_weights` will replace. It reads no file: a folder of a
trained policy also has its critic's head, which vLLM would take for a part of the model."""


class ColocatedServer(Server):
    """One ``vllm.LLM`` for the base of ``policies``. It takes adapters from folders, and other weights from the model.

    A quantised base is read from its folder, and all others are copied.

    Args:
        section: the options of vLLM.
        policies: the policies that it samples from. They share one base.
        share: the number of such servers in this process, which share ``section.gpu_memory_utilization``.

    Raises:
        ConfigError: the package ``vllm`` is not installed, or several processes train together.
        VLLMFailure: vLLM does not start.
    """

    def __init__(self, section: ColocateSection, policies: Sequence[Policy], share: int = 1):
        self.url = f"{HERE} ({', '.join(policy.name for policy in policies)})"
        if find_spec("vllm") is None:
            raise ConfigError(
                f"vllm.colocate needs the package vllm; install it with: {install_command('vllm')}, or give engine: "
                "transformers and vllm: null"
            )
        if distributed.size() > 1:
            raise ConfigError(
                f"vllm.colocate: expected a single process, got {distributed.size()}; start servers and give their "
                "urls instead"
            )
        # vLLM would start a process of its own, which could not read the weights of this one
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM
        from vllm.platforms import current_platform

        base: Any = base_of(policies[0].model)
        self._sleeps = section.sleep and current_platform.is_sleep_mode_available()
        options = llm_options(section, base, policies, share) | {"enable_sleep_mode": self._sleeps} | section.options
        try:
            with forked_rng(), forked_generators():  # vLLM seeds them all when it starts
                self._llm = LLM(**options)
        except Exception as error:  # whatever vLLM raises
            raise VLLMFailure(
                f"{self.url}: does not start ({_words(error)}); check vllm.colocate (options {section.options}, "
                f"gpu_memory_utilization {section.gpu_memory_utilization or SHARE} for all {share} of them, "
                f"max_model_len {section.max_model_len}), or use engine: transformers and vllm: null"
            ) from error
        self._base: str = options["model"]
        self._asleep = False
        self.has_weights = options["load_format"] != DUMMY
        """Whether vLLM has the weights of the base. If not, :meth:`load_weights` comes first."""
        self._adapters: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self._running: dict[str, tuple[int, Future[Sampled]]] = {}
        # with async_depth, dialogues are played in one thread, while a judge speaks in another
        self._lock = threading.RLock()

    @property
    def base(self) -> str:
        """Return the folder or the hub name of the base model."""
        return self._base

    def submit(self, requests: Sequence[TokenRequest]) -> list[Future[Sampled]]:
        """Begin to sample one completion for each request. :meth:`advance` does the work.

        Raises:
            VLLMFailure: vLLM does not take a request, for example because its prompt is too long.
        """
        with self._lock:
            self._wake()
            return [self._begin(request) for request in requests]

    def _begin(self, request: TokenRequest) -> Future[Sampled]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        draw, held = request.draw, {}
        if draw.grammar is not None:
            from vllm.sampling_params import StructuredOutputsParams

            held = {"structured_outputs": StructuredOutputsParams(**held_to(draw.grammar))}
        parameters = SamplingParams(
            max_tokens=draw.max_tokens, temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k,
            stop_token_ids=sorted(draw.stop_ids), ignore_eos=True, logprobs=0, seed=seed_of(request),
            detokenize=bool(draw.stop), stop=list(draw.stop), include_stop_str_in_output=True,
            output_kind=RequestOutputKind.FINAL_ONLY, **held,
        )  # fmt: skip
        name, future = str(next(self._numbers)), Future[Sampled]()
        future.set_running_or_notify_cancel()  # nothing but release ends a request early
        adapter = self._adapters.get(request.policy)
        prompt = {"prompt_token_ids": request.prompt_ids}
        try:
            self._llm.llm_engine.add_request(name, prompt, parameters, lora_request=adapter)
        except Exception as error:  # for example, the prompt is longer than vLLM's max_model_len
            raise VLLMFailure(f"{self.url}: {request.label}: {_words(error)}") from error
        self._running[name] = threading.get_ident(), future
        return future

    def advance(self) -> bool:
        """Sample one more token of every running completion. Return whether some are still running."""
        with self._lock:
            for output in self._llm.llm_engine.step() if self._running else ():
                if output.finished and output.request_id in self._running:
                    [completion] = output.outputs
                    future = self._running.pop(output.request_id)[1]
                    if Stop.of(completion.finish_reason) not in WHOLE:
                        ended = f"a completion ended for the reason {completion.finish_reason!r}"
                        future.set_exception(VLLMFailure(f"{self.url}: {ended}, and is not whole"))
                        continue
                    ids = list(completion.token_ids)
                    logprobs = [by_id[token].logprob for token, by_id in zip(ids, completion.logprobs, strict=True)]
                    future.set_result(Sampled(ids, logprobs))
            return bool(self._running)

    def release(self) -> None:
        """End the requests of this thread that are still running, and give vLLM's memory back until the next request.

        While requests of another thread are running, vLLM keeps its memory.
        """
        with self._lock:
            left = [name for name, (thread, _) in self._running.items() if thread == threading.get_ident()]
            if left:
                self._llm.llm_engine.abort_request(left)
            for name in left:
                self._running.pop(name)[1].set_exception(VLLMFailure(f"{self.url}: the request was given up"))
            if self._sleeps and not self._asleep and not self._running:
                self._llm.sleep(
                    level=1
                )  # the weights move to main memory; level 2 would lose those of the base of adapters
                self._asleep = True

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of ``text`` by vLLM's own tokenizer."""
        return self._llm.get_tokenizer().encode(text, add_special_tokens=False)

    def load(self, name: str, folder: Path, what: str) -> None:
        """Load the adapter ``name`` at once, because its folder is removed afterwards.

        Raises:
            VLLMFailure: vLLM does not take the adapter.
        """
        from vllm.lora.request import LoRARequest

        self._wake()
        request = LoRARequest(name, next(self._numbers), str(folder))
        try:
            self._llm.llm_engine.add_lora(request)
        except Exception as error:  # whatever vLLM raises
            raise VLLMFailure(f"{self.url}: {what}: {_words(error)}") from error
        self._adapters[name] = request

    def unload(self, name: str, what: str) -> None:
        """Remove the adapter ``name`` from vLLM."""
        self._llm.llm_engine.remove_lora(self._adapters.pop(name).lora_int_id)

    def load_weights(self, model: Any, what: str) -> None:
        """Copy all weights of ``model`` but its adapters into vLLM, and check that they have arrived.

        vLLM also forgets the prefixes that it has cached, because the old weights computed them. ``what`` describes
        the weights in errors.

        Raises:
            VLLMFailure: vLLM does not take the weights, or holds other ones afterwards.
        """
        from transformers.core_model_loading import revert_weight_conversion

        self._wake()
        base: Any = base_of(model)
        # vLLM reads the names and shapes of files, which are not always those in memory
        state = revert_weight_conversion(base, base_state(base))
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(state.items())})
            forgotten = self._llm.reset_prefix_cache()
            comparisons = self._llm.apply_model(lambda module: compare(dict(module.named_parameters()), state))
        except Exception as error:  # whatever vLLM raises
            raise VLLMFailure(f"{self.url}: did not take {what}: {_words(error)}") from error
        if not forgotten:
            raise VLLMFailure(f"{self.url}: still uses prefixes of earlier weights, because requests are running")
        for compared, different in comparisons:
            if different or not compared:
                raise VLLMFailure(
                    f"{self.url}: was sent {what}, and holds other ones: "
                    f"{', '.join(different[:3]) or 'no tensor can be compared'}; this version of vLLM does not take "
                    "the weights of such a model: use engine: transformers and vllm: null"
                )
        self.has_weights = True

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False


def llm_options(section: ColocateSection, base: Any, policies: Sequence[Policy], share: int) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for ``policies`` on the model ``base``."""
    ranks = [config.r for p in policies for config in getattr(p.model, "peft_config", {}).values()]
    highest = max(ranks, default=1)
    options: dict[str, Any] = {
        "model": base.config._name_or_path,
        "dtype": str(base.dtype).removeprefix("torch."),
        "logprobs_mode": "processed_logprobs",
        "structured_outputs_config": {"backend": "guidance"},
        "gpu_memory_utilization": (section.gpu_memory_utilization or SHARE) / share,
        "enable_lora": bool(ranks),
        "load_format": "auto" if policies[0].is_quantized else DUMMY,
        "max_model_len": section.max_model_len or -1,  # -1: as long as the model allows and the memory has room for
    }
    if ranks:
        room = next((rank for rank in RANKS if rank >= highest), highest)
        options |= {"max_loras": len(policies), "max_lora_rank": room}
    return options


def compare(held: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> tuple[int, list[str]]:
    """Compare the tensors that vLLM holds with those that it was sent.

    Tensors can be compared that have the same name and shape in both. vLLM joins some matrices, packs or quantises
    others, and adds rows to embeddings.

    Returns:
        How many tensors were compared, and the names of those that differ.
    """
    compared, different = 0, []
    held = {name.replace(".base_layer.", "."): tensor for name, tensor in held.items()}
    for name in sorted(held.keys() & sent.keys()):
        actual, expected = held[name].detach(), sent[name].detach()
        precise = actual.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if precise and actual.dim() and actual.shape[1:] == expected.shape[1:] and len(actual) >= len(expected):
            compared += 1
            if not torch.equal(actual[: len(expected)], expected.to(actual.device, actual.dtype)):
                different.append(name)
    return compared, different


def _words(error: Exception) -> str:
    """Return an error of vLLM in one line. Its own may have pages."""
    return f"{type(error).__name__}: {one_line(error)}"[:600]
