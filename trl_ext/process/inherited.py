"""Which environment variables a process of the library's own inherits: those that it needs, and no secrets. Imports no
torch.

A user's environment holds keys of APIs, of trackers and of the hub. A process that trains or renders a template needs
none of them, and everything that it starts or writes down would have them too.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

NAMES = {
    "ALL_PROXY", "COLUMNS", "CURL_CA_BUNDLE", "DYLD_LIBRARY_PATH", "HOME", "HOSTNAME", "HTTPS_PROXY", "HTTP_PROXY",
    "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOGNAME", "NO_COLOR", "NO_PROXY", "PATH", "PWD",
    "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "REQUESTS_CA_BUNDLE", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "TEMP", "TERM", "TMP",  # noqa: E501
    "TMPDIR", "TOKENIZERS_PARALLELISM", "TZ", "USER", "VIRTUAL_ENV",
}  # fmt: skip
"""What processes need of the system, in upper case."""
PREFIXES = (
    "ACCELERATE_", "AMD_", "ASCEND_", "BNB_", "CCL_", "CONDA_", "CUBLAS", "CUDA", "CUDNN", "DATASETS_",
    "DEEPSPEED_", "DS_", "FI_", "FSDP_", "GLOO_", "GOMP_", "HCCL_", "HF_", "HIP_", "HSA_", "HUGGINGFACE_", "KMP_",
    "LC_", "MALLOC_", "MAPORL_", "MIOPEN_", "MKL_", "MUSA_", "NCCL_", "NPU_", "NUMBA_", "NUMEXPR_", "NVIDIA_",
    "NVTE_", "OMP_", "ONEAPI_", "OPENBLAS_", "PEFT_", "PJRT_", "PYTHON", "PYTORCH_", "RAY_", "RCCL_", "ROCM_",
    "ROCR_", "SAFETENSORS_", "SYCL_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "VECLIB_", "VLLM_", "XDG_",
    "ZE_",
)  # fmt: skip
"""How the names of settings begin that libraries read which train and sample."""
SECRET = re.compile("TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|KEY(S|$|_)")
"""What marks a secret in a name."""
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
"""The variables with the token of the hub. Only a process that reads a model from there needs it."""


def inherited(environment: Mapping[str, str] | None = None, more: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of ``environment`` that a process inherits: those above without secrets, and those that are
    named in ``more``.

    The default is the environment of this process.

    >>> inherited({"PATH": "/bin", "OPENAI_API_KEY": "k", "HF_HOME": "/h", "HF_TOKEN": "t", "EDITOR": "vi"}, more=["EDITOR"])
    {'PATH': '/bin', 'HF_HOME': '/h', 'EDITOR': 'vi'}
    """  # noqa: E501
    variables = os.environ if environment is None else environment
    return {name: value for name, value in variables.items() if name in more or _needed(name.upper())}


def _needed(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not SECRET.search(name))


@contextmanager
def only_inherited(more: Collection[str] = ()) -> Iterator[None]:
    """Take from this process's environment, while the block runs, what the processes that it starts must not
    inherit."""
    allowed = inherited(more=more)
    held = {name: value for name, value in os.environ.items() if name not in allowed}
    for name in held:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(held)
