"""What the commands share: the words that name a configuration, reading it, quieting libraries, and a console that is
safe for untrusted texts."""

import gc
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from maporl.config.schema import Config
from maporl.errors import ConfigError
from maporl.text import printable


class Screen(Console):
    """A console that makes the control characters of every text visible (:func:`maporl.text.printable`)."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of ``renderable``. Colours are Rich's own, and not part of a segment's text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")]
Values = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG|KEY=VALUE",
        help="A YAML file or a recipe (eval: or a run's folder, or a team on the hub), and values to override.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="The YAML file, in place of CONFIG.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a value: --set training.learning_rate=1e-4", show_default=False
    ),
]


def echo(text: object, newline: bool = True, err: bool = False) -> None:
    """Print ``text`` with its control characters made visible (:func:`maporl.text.printable`).

    ``err`` prints it on standard error.
    """
    typer.echo(printable(str(text)), nl=newline, err=err)


def load_config(values: list[str] | None, config: Path | None, set_: list[str] | None, trains: bool = True) -> Config:
    """The one configuration among ``values`` and ``config``; the other values, and ``set_``, override it.

    ``trains`` says whether it is to be trained, so that somebody must learn.

    Raises:
        ConfigError: no file is named, or more than one, or the configuration is wrong.
    """
    from maporl.validation.load import load  # with NumPy, which a help page can do without

    files = _files(values) + ([str(config)] if config is not None else [])
    if len(files) != 1:
        got = " and ".join(map(repr, files)) or "none"
        raise ConfigError(
            f"expected one configuration file, got {got}; other words are KEY=VALUE, without spaces, for example: "
            "configs/ppo/quickstart.yaml updates=10, and with the launcher: accelerate launch --config_file "
            "configs/accelerate/single.yaml train_multi_agent.py --config configs/ppo/quickstart.yaml --set updates=10"
        )
    return load(files[0], [*(set_ or []), *_overrides(values)], trains)


def load_team_config(
    values: list[str] | None, config: Path | None, set_: list[str] | None, checkpoint: Path | None
) -> tuple[Config, Path | None]:
    """(configuration, folder of weights or None): as :func:`load_config`, and for teams that were trained.

    Where the user names a run's folder or a team on the hub, the configuration is that team's, and so are the weights
    unless ``checkpoint`` names others.

    Raises:
        ConfigError: as for :func:`load_config`.
        UserError: no such team exists, or it cannot be read.
    """
    team = next(iter(_files(values)), None)
    if config is not None or team is None or not names_a_team(team):
        return load_config(values, config, set_, trains=False), checkpoint
    quiet_libraries()
    from maporl.storage.run_folder import weights_of
    from maporl.team.saved import read_team
    from maporl.validation.load import check

    settings, folder = read_team(team, [*(set_ or []), *_overrides(values)])
    if lacking := [key for key in ("task", "protocol") if not getattr(settings, key)]:
        raise ConfigError(f"{team}: was saved without a {' and a '.join(lacking)}; give them, such as task.name=gsm8k")
    check(settings, str(folder / "config.yaml"), trains=False)
    return settings, checkpoint or weights_of(folder)


def names_a_team(given: str) -> bool:
    """Whether ``given`` is a folder, or can only be a name on the hub: it is neither a file here nor a recipe."""
    # of a text that is too long for a name, os.path says that it does not exist, and pathlib raises
    return os.path.isdir(given) or (
        "/" in given and not os.path.exists(given) and not given.endswith((".yaml", ".yml"))
    )


def quiet_libraries() -> None:
    """Silence the progress bars and notices of the libraries, which would bury ours. Imports transformers."""
    quiet_environment()
    import warnings

    import transformers

    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def load_libraries() -> None:
    """Import torch and peft quietly. What they make stays, so it is not looked through for garbage, now or later."""
    quiet_libraries()
    if "peft" not in sys.modules:
        gc.disable()
        import peft  # noqa: F401

        gc.freeze()
        gc.enable()


def quiet_environment() -> None:
    """Set the variables that libraries read when they are imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "30")  # seconds between two lines of a bar that nobody watches
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))):
        # without it DeepSpeed, where it is installed, prints on stdout that it chose the CPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _overrides(values: list[str] | None) -> list[str]:
    """The words that are KEY=VALUE. The name of an existing file is not an override, whatever it looks like."""
    return [
        v for v in values or [] if re.match(r"[\w.:]+=", v) and not os.path.exists(v)
    ]  # False for what is too long for a name


def _files(values: list[str] | None) -> list[str]:
    return split_words(values)[0]


def split_words(values: list[str] | None) -> tuple[list[str], list[str]]:
    """Return the words that name something, and those that are KEY=VALUE."""
    overrides = _overrides(values)
    return [v for v in values or [] if v not in overrides], overrides
