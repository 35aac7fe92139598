"""Find a team on the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from maporl.errors import RunError, one_line
from trl_ext.process import hub


def download(name: str) -> Path:
    """Return the folder of a download of the hub's ``ORG/NAME``.

    Raises:
        RunError: no such team exists, or it cannot be read.
    """
    try:
        validate_repo_id(name)
        with hub.asking(name):
            return Path(
                snapshot_download(
                    name, allow_patterns=["*.json", "*.yaml", "*.safetensors", "*.jinja", "*.txt", "*.model"]
                )
            )
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        if missing := hub.not_cached(name, error):
            raise RunError(missing) from None
        raise RunError(
            f"{name}: neither a folder here nor a team on the hub that can be read ({one_line(error, 200)})"
        ) from None
