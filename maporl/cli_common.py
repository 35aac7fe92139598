"""What the commands share: reading their configuration, quieting libraries, one line and an exit code for an error."""

import errno
import os
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from maporl.config import Config, ConfigError, load

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")]


def load_config(values: list[str] | None, config: Path | None, set_: list[str] | None) -> Config:
    """The one configuration among ``values`` and ``config``; the other values, and ``set_``, override it."""
    files = _files(values) + ([str(config)] if config is not None else [])
    if len(files) != 1:
        raise ConfigError(
            f"expected one configuration file, got {' and '.join(map(repr, files)) or 'none'}; other words are KEY=VALUE, for example: "
            "configs/ppo/quickstart.yaml updates=10"
        )
    return load(files[0], [*(set_ or []), *_overrides(values)])


def _overrides(values: list[str] | None) -> list[str]:
    """Those of the command's words that are KEY=VALUE, and no file with such a name."""
    return [v for v in values or [] if re.match(r"[\w.]+=", v) and not Path(v).exists()]


def _files(values: list[str] | None) -> list[str]:
    overrides = _overrides(values)
    return [v for v in values or [] if v not in overrides]


def load_team_config(
    values: list[str] | None, config: Path | None, set_: list[str] | None, checkpoint: Path | None
) -> tuple[Config, Path | None]:
    """As :func:`load_config`; where a run's folder or a team on the hub is named, its configuration and final weights."""
    given = next(iter(_files(values)), None)
    if config is not None or given is None or not names_a_team(given):
        return load_config(values, config, set_), checkpoint
    quiet_libraries()
    from maporl.pretrained import team_config, weights_of

    settings, folder = team_config(given, [*(set_ or []), *_overrides(values)])
    return settings, checkpoint or weights_of(folder)


def names_a_team(given: str) -> bool:
    """Whether ``given`` is a folder, or can only be a hub name: no file here, no recipe."""
    file = Path(given)
    return file.is_dir() or ("/" in given and not file.exists() and file.suffix not in (".yaml", ".yml"))


def quiet_libraries() -> None:
    """Libraries' own progress bars and notices would bury ours."""
    quiet_environment()
    import warnings

    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def quiet_environment() -> None:
    """What libraries read before they are imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))):
        # else DeepSpeed, where it is installed, says on stdout that it chose that
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


class known_errors:
    """Known errors become one line and an exit code: 2 for a configuration, 1 for a run; others keep their trace.

    ``quiet``: what is printed on standard output meanwhile is not shown.
    """

    def __init__(self, quiet: bool = False):
        self._stdout = redirect_stdout(StringIO() if quiet else sys.stdout)

    def __enter__(self) -> None:
        self._stdout.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Literal[False]:
        self._stdout.__exit__(kind, error, trace)
        if error is None or isinstance(error, (typer.Exit, SystemExit)):
            return False
        if _is(error, "trl_ext.interruptions", "Interrupted"):  # it has said where the run is saved
            sys.exit(130)
        code = 2 if _is(error, "maporl.config", "ConfigError") or _is(error, "maporl.tasks.base", "TaskError") else 1
        known = code == 2 or any(
            _is(error, module, name)
            for module, name in (
                ("maporl.agents", "PromptTooLong"),
                ("maporl.engines.openai", "ApiFailure"),
                ("maporl.engines.vllm", "VLLMFailure"),
                ("maporl.records", "DamagedRecord"),
                ("maporl.report.read", "RunError"),
                ("maporl.run_folder", "RunExists"),
                ("maporl.rewards.sources", "RewardFailure"),
                ("maporl.verifier.data", "DataError"),
                ("maporl.verifier.model", "VerifierError"),
                ("trl_ext.checkpoint", "CheckpointError"),
                ("trl_ext.learner", "NonFiniteError"),
                ("trl_ext.scoring", "RewardError"),
                ("trl_ext.world", "WorldError"),
            )
        )
        known = known or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        if known:
            typer.echo(f"error: {error}", err=True)
            sys.exit(code)
        return False


def _is(error: BaseException, module: str, name: str) -> bool:
    """Whether ``error`` is of that class; a module never loaded cannot have raised it."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(error, getattr(loaded, name))
