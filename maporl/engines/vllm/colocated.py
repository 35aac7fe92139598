"""vLLM in the trainer's own process. The GPU then holds both vLLM's weights and the weights that are trained."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from maporl.config.schema import ColocateSection
from maporl.engines.vllm.server import Asked
from maporl.errors import ConfigError, install_command
from maporl.team.team import Policy
from trl_ext import distributed
from trl_ext.forward import base_of
from trl_ext.sampling import Sampled

HERE = "vLLM in this process"
"""The name of this server in messages, where other servers have a URL."""


class ColocatedServer:
    """One ``vllm.LLM`` for the base of ``policies``. It loads adapters from folders, as a server does.

    Args:
        section: the options of vLLM.
        policies: the policies that it samples from. They share one base.

    Raises:
        ConfigError: the package ``vllm`` is not installed, or several processes train together.
    """

    url = HERE

    def __init__(self, section: ColocateSection, policies: Sequence[Policy]):
        if find_spec("vllm") is None:
            raise ConfigError(f"vllm.colocate needs the package vllm; install it with: {install_command('vllm')}")
        if distributed.size() > 1:
            raise ConfigError(
                f"vllm.colocate: expected a single process, got {distributed.size()}; start servers and give their urls instead"
            )
        from vllm import LLM

        base: Any = base_of(policies[0].model)
        ranks = [config.r for p in policies for config in getattr(p.model, "peft_config", {}).values()]
        # vLLM supports these ranks only, and accepts adapters up to max_lora_rank
        highest = next(
            (r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= max(ranks, default=1)), max(ranks, default=1)
        )
        options: dict[str, Any] = {
            "model": base.config._name_or_path,
            "dtype": str(base.dtype).removeprefix("torch."),
            "logprobs_mode": "processed_logprobs",
            "gpu_memory_utilization": section.gpu_memory_utilization,
            "enable_lora": bool(ranks),
        }
        options |= {"max_loras": len(policies), "max_lora_rank": highest} if ranks else {}
        options |= {"max_model_len": section.max_model_len} if section.max_model_len is not None else {}
        self._engine = LLM(**options | section.options)
        self.base = options["model"]
        self._adapters: dict[str, Any] = {}
        self._loaded = 0

    def answer(self, asked: Sequence[Asked]) -> list[Sampled]:
        """Sample one completion for each request, all in one batch."""
        from vllm import SamplingParams

        outputs = self._engine.generate(
            [{"prompt_token_ids": request.prompt} for request in asked],
            [
                SamplingParams(
                    max_tokens=request.most, temperature=request.decoding.temperature, top_p=request.decoding.top_p,
                    top_k=request.decoding.top_k, stop_token_ids=sorted(request.stop_ids),
                    ignore_eos=True, logprobs=0, seed=request.seed, detokenize=bool(request.stop_strings),
                    stop=list(request.stop_strings), include_stop_str_in_output=True,
                )
                for request in asked
            ],
            lora_request=[self._adapters.get(request.model) for request in asked],
            use_tqdm=False,
        )  # fmt: skip
        completions = [output.outputs[0] for output in outputs]
        return [
            Sampled(
                list(completion.token_ids),
                [by_id[token].logprob for token, by_id in zip(completion.token_ids, completion.logprobs, strict=True)],
            )
            for completion in completions
        ]

    def tokenize(self, model: str, text: str) -> list[int]:
        """Return the token ids of ``text`` by vLLM's own tokenizer."""
        return self._engine.get_tokenizer().encode(text, add_special_tokens=False)

    def load(self, name: str, folder: Path, what: str) -> None:
        """Load the adapter ``name`` at once, because its folder is removed afterwards."""
        from vllm.lora.request import LoRARequest

        self._loaded += 1
        self._adapters[name] = LoRARequest(name, self._loaded, str(folder))
        self._engine.llm_engine.add_lora(self._adapters[name])

    def unload(self, name: str, what: str) -> None:
        """Remove the adapter ``name`` from vLLM."""
        self._engine.llm_engine.remove_lora(self._adapters.pop(name).lora_int_id)
