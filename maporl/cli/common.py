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

from maporl.config.schema import Config
from maporl.errors import ConfigError, UserError
from maporl.validation.checks import check
from maporl.validation.load import load
from trl_ext.interruptions import Interrupted

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
    from maporl.team.pretrained import read_team, weights_of

    settings, folder = read_team(given, [*(set_ or []), *_overrides(values)])
    check(settings, str(folder / "config.yaml"))
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
        if isinstance(error, Interrupted):  # it has said where the run is saved
            sys.exit(130)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if full or isinstance(error, UserError):
            typer.echo(f"error: {error}", err=True)
            sys.exit(error.exit_status if isinstance(error, UserError) else 1)
        return False
