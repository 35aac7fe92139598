"""Check what a configuration says of models against their shapes and alphabets. No weights are read."""

from collections.abc import Sequence

from maporl.config.parse import unknown
from maporl.config.schema import Config
from maporl.errors import ConfigError
from maporl.protocols import speakers
from maporl.tasks import Task
from maporl.text import check_pattern, matches
from maporl.validation import memory


def check_lora(config: Config) -> None:
    """Check that every module that a LoRA names is in its model. PEFT would leave out those that are not.

    Raises:
        ConfigError: it is not. The message names the module and those that the model has.
    """
    for name, section in config.agents.items():
        targets = None if section.lora is None or not section.weights else section.lora.target_modules
        if targets is None or targets == "all-linear":
            continue
        where, modules = f"agents.{name}.lora.target_modules", memory.shape_of(section).matrices
        known = sorted({module.rpartition(".")[2] for module in modules})
        if isinstance(targets, str):
            _check_pattern_of_modules(targets, modules, known, where)
        elif not targets:
            raise ConfigError(f"{where}: expected all-linear or at least one of {', '.join(known)}, got []")
        for target in targets if isinstance(targets, list) else []:
            if not any(f".{module}".endswith(f".{target}") for module in modules):
                raise ConfigError(f"{where}: {unknown(target, known)}; or all-linear in place of the list")


def _check_pattern_of_modules(pattern: str, modules: Sequence[str], known: list[str], where: str) -> None:
    try:
        check_pattern(where, pattern)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not any(next(matches(rf"\A(?:{pattern})\Z", module), None) for module in modules):
        raise ConfigError(
            f"{where}: the regular expression {pattern!r:.80} is the whole name of no module, such as {modules[-1]!r}; give a "
            f"list of some of {', '.join(known)}, or all-linear"
        )


def check_alphabets(config: Config, splits: Sequence[Task]) -> None:
    """Check that the alphabets of all tiny models that play have every character of every question.

    Raises:
        ConfigError: a question has a character that a player's alphabet lacks.
    """
    players = ((name, config.agents[name].tiny) for name in speakers(config.protocol, tuple(config.agents)))
    tinies = {name: tiny for name, tiny in players if tiny is not None}
    if not tinies:
        return
    used = {character for task in splits for example in task for character in task.question(example)}
    for name, tiny in tinies.items():
        if missing := used - set(tiny.alphabet):
            raise ConfigError(
                f"agents.{name}.tiny.alphabet: questions have characters that {tiny.alphabet!r:.80} lacks: "
                f"{''.join(sorted(missing))!r:.80}; add them"
            )
