"""The section ``vllm`` of an agent: vLLM that answers for it. Imports no torch."""

from typing import Annotated, Any

from pydantic import Field

from maporl.hosts import check_urls
from maporl.sections import AboveZero, Natural, Positive, section
from trl_ext.ppo.options import option


@section()
class ColocateSection:
    """vLLM in the trainer's process, or in the processes that sample for a group (``cluster.backend: ray``)."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = option(
        None,
        "Share of the GPU's memory. None: 0.3 beside weights that are trained, and 0.85 on a device of its own. "
        "Agents whose policies have different bases share it in equal parts.",
    )
    max_model_len: Positive | None = option(None, "Longest conversation, in tokens.")
    sleep: bool = option(True, "Give the memory back between rollouts, where the device allows this and others use it.")
    options: dict[str, Any] = option({}, "Keyword arguments of vllm.LLM.")


@section()
class VLLMSection:
    """vLLM that answers for an agent whose weights are trained here (``maporl.integrations.vllm``).

    Raises:
        ValueError: not exactly one of ``urls`` and ``colocate`` is given, or a URL is not valid.
    """

    urls: list[str] = option(
        [],
        "Servers of the agent's base model, e.g. [http://127.0.0.1:8000]. Give either this or `colocate`.",
    )
    colocate: ColocateSection | None = option(
        None,
        "vLLM in this process, or in the processes that sample for a group (cluster.backend: ray).",
    )
    base: str | None = option(None, "The servers' name of the model. None: the one that they list.")
    folder: str | None = option(None, "Where adapters are written for the servers to read. None: in the run's folder.")
    seeds: bool = option(
        True,
        "Send a seed with every request, so that a run repeats as far as the server does. vLLM 0.32 crashes on "
        "CPUs if requests have seeds.",
    )
    key_variable: str = option("VLLM_API_KEY", "Name of the environment variable with the servers' key.")
    concurrency: Positive = option(64, "Most requests at a time.")
    timeout: AboveZero = option(120.0, "Seconds for a whole exchange.")
    retries: Natural = option(3, "How often a failed request is repeated.")

    def __post_init__(self):
        if bool(self.urls) == (self.colocate is not None):
            raise ValueError(f"expected either urls or colocate, got urls {self.urls} and colocate {self.colocate}")
        check_urls(self.urls)
