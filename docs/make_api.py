"""Writes docs/api.md from the signatures and docstrings of the public names: ``python docs/make_api.py``.

The page is Markdown, so that it reads in a checkout and on GitHub without building a site. A test compares it with what
this program writes.
"""

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import maporl
import trl_ext
from maporl.advantages import Baseline, Return, Scale
from maporl.config.engines import EngineEntry

ROOT = Path(__file__).resolve().parents[1]

OURS = ("maporl", "trl_ext", "reward_server")
SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields", "Example", "Examples")

GROUPS: list[tuple[str, str, str]] = [
    (
        "Build a team",
        "An agent has a name and a policy. A team is a list of agents. Tiny models need no download.",
        "Agent Team TinySection build_tiny_tokenizer build_tiny_model LoraSection",
    ),
    (
        "Give it questions",
        "A task gives questions and grades answers. [Your own task](howto/task.md) shows how to write one.",
        "Task TASKS Lessons Arithmetic Skills GSM8K Mathematics HotpotQA TinyHops Parts MBPP HumanEval TinyPrograms "
        "Triplets Verifiers ANLI TinyGSM FANToM Prompts PromptDataset Mixture Documents Episodes Example Grade "
        "TaskError",
    ),
    (
        "Say who speaks when",
        "A protocol decides who speaks when, and what each speaker sees. [Your own protocol](howto/protocol.md) "
        "shows how to write one. A dialogue is the record of what was said.",
        "Protocol PROTOCOLS Debate Chain Collaboration Refine Forum CallReturn Code Attempts Design Propose Route "
        "Orchestrate PlayGame PlayWorld Program Ask Wait Sampling StructuredOutput TeamSampling Utterance Stop "
        "Dialogue to_json from_json",
    ),
    (
        "Play games",
        "[Games](games.md) says what each game is, and how to write one.",
        "Game GAMES IllegalMove",
    ),
    (
        "Let agents act",
        "[Agents that call tools](howto/tools.md), and [environments](howto/environments.md).",
        "Tool Toolbox Environment check_environment maporl.environments.trial.Trial TOOLS ENVIRONMENTS ToolSection "
        "EnvironmentSection CallLimits CallTexts Act Call Result",
    ),
    (
        "Tools and environments of others",
        "[A team that searches](howto/search.md), [an orchestrator](howto/orchestrator.md), and [tools from an MCP "
        "server](howto/mcp.md). A class for TRL's `environment_factory` needs no adapter of its own: "
        "[tools](howto/tools.md) names it.",
        "maporl.datasets.search.bm25 maporl.datasets.search.QuestionSearch "
        "maporl.integrations.mcp.MCPTools maporl.integrations.mcp.MCPEnvironment "
        "maporl.integrations.mcp_server.ServerOptions maporl.integrations.open_env.OpenEnv "
        "maporl.integrations.trl.TRLEnvironment",
    ),
    (
        "Reward what was said",
        "Sources score utterances, and rules turn the scores into credit. [Rewards](rewards.md) explains every "
        "rule with numbers. [Your own reward](howto/reward.md) shows how to write one.",
        "RewardSection RewardSource SOURCES RewardFailure Rule RULES share_scores collaboration_bonus "
        "BonusSection PenaltySection BrevitySection VerifierSection JudgeSection ArenaSection "
        "maporl.rewards.assign_credit maporl.verifier.model.Verifier maporl.verifier.encoding.chat_of",
    ),
    (
        "Branch, and compute advantages",
        "[Advantages](advantages.md) explains returns, baselines, scales, transforms and keys. [Your own "
        "advantage](howto/advantage.md) shows how to write one.",
        "BranchingSection AblateSection AdvantageConfig AdvantageTerm Algorithm estimate TurnBatch RETURNS Return "
        "BASELINES Baseline SCALES Scale TRANSFORMS Transform",
    ),
    (
        "Train in Python",
        "The README has a first script. These options have the names of the YAML keys.",
        "MultiAgentPPOTrainer MultiAgentPPOConfig RayBackend ClusterSection GroupSection LearnerPlaces EnginePlaces "
        "FailuresSection Schedule Freeze Swap RoundRobin OpponentPool Stage Growth Span recipe_parts warm_start "
        "WarmStartSection PupilSection",
    ),
    (
        "Run a configuration",
        "`configs/ppo/base.yaml` shows every key of a configuration with its default and a comment.",
        "load from_dict check train build_trainer build_player Config AgentSection EvaluationSection RunFolder "
        "ConfigError UserError RunError maporl.protocols.turns_of",
    ),
    (
        "Sample answers",
        "An engine samples the answers of agents. [Your own model](howto/model.md) and [scaling](scaling.md) say "
        "how to choose one.",
        "Engine ENGINES Request Reply Decoding ApiSection VLLMSection ColocateSection",
    ),
    (
        "Evaluate and look",
        "A player plays and evaluates without a trainer. The report of a run is a page.",
        "Player Evaluation Share CrossPlay CrossTeam maporl.studies.crossplay.alpha_rank.alpha_rank read_run Run "
        "write_report maporl.report.failures.failures "
        "maporl.report.story.story",
    ),
    (
        "PPO for one policy",
        "`trl_ext` is PPO for a single policy. It never imports `maporl`. [PPO for one policy](howto/ppo.md) shows how "
        "to use it.",
        "trl_ext.PPOv2Trainer trl_ext.PPOv2Config trl_ext.PPOOptions trl_ext.LearnerOptions trl_ext.Policy "
        "trl_ext.Learner trl_ext.ValueHead "
        "trl_ext.OBJECTIVES trl_ext.ppo.losses.objective_of trl_ext.ppo.losses.importance_ratio "
        "trl_ext.ppo.maths.masked_mean "
        "trl_ext.ppo.maths.masked_var trl_ext.ppo.maths.masked_whiten trl_ext.ppo.maths.gae "
        "trl_ext.ppo.maths.policy_loss_terms trl_ext.ppo.maths.value_loss_terms trl_ext.ppo.maths.kl_estimate "
        "trl_ext.ppo.maths.token_logprobs trl_ext.ppo.maths.token_entropies ServedReward VLLMSampler trl_ext.Sampler "
        "trl_ext.sampling.engine.TokenEngine trl_ext.sampling.engine.Ready trl_ext.sampling.request.TokenRequest "
        "trl_ext.sampling.request.Draw trl_ext.sampling.options.Sampled trl_ext.ppo.batch.Completion",
    ),
]
"""The groups of the page: a heading, what it is for, and its names. A name without a dot is one of ``maporl``."""

SERVER = """## Serve a verifier

`python -m reward_server`, or `maporl serve`, serves a verifier over HTTP. It has no Python API of its own: [the reward
server](reward_server.md) documents its options, its requests and its replies.
"""
SAME = {f"trl_ext.{name}": name for name in trl_ext.__all__ if name in maporl.__all__}
"""Public names of ``trl_ext`` that are the same object as a name of ``maporl``, which the page has."""


def full(name: str) -> str:
    """Return the name with its package, as it is written in code."""
    return name if "." in name else f"maporl.{name}"


def first_sentence(prose: str) -> str:
    """Return the first sentence of a text on one line."""
    line = " ".join(prose.partition("\n\n")[0].split())
    return re.split(r"(?<!al\.)(?<=[.!?])\s(?=[A-Z`])", line, maxsplit=1)[0]


def find(name: str) -> Any:
    """Return the object that a name of :data:`GROUPS` means."""
    module, _, last = full(name).rpartition(".")
    return getattr(import_module(module), last)


def page() -> str:
    """Return the text of docs/api.md."""
    parts = [
        "# Python API\n",
        "Every public name, by what you want to do. `from maporl import NAME` works for each name that stands without "
        "a module. Names\nload on first use, so `import maporl` is quick. `make reference` writes this page from the "
        "signatures and docstrings.\n",
        "| to | names |\n|---|---|",
    ]
    for heading, _, names in GROUPS:
        links = ", ".join(f"[{name.rpartition('.')[2]}](#{anchor(name)})" for name in names.split())
        parts.append(f"| [{heading}](#{heading.lower().replace(',', '').replace(' ', '-')}) | {links} |")
    for heading, purpose, names in GROUPS:
        parts.append(f"\n## {heading}\n\n{purpose}\n")
        parts += [entry(name, find(name)) for name in names.split()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*parts, SERVER]))


def anchor(name: str) -> str:
    """Return the anchor that GitHub and MkDocs give to the heading of a name."""
    return name.replace(".", "").lower()


def entry(name: str, found: Any) -> str:
    """Return the part of the page about one name."""
    lines = [f"### {name}\n"]
    if isinstance(found, Mapping):
        return "\n".join([*lines, registry(name, found)])
    if not isinstance(found, type | types.FunctionType):
        return "\n".join([*lines, alias(name)])
    prose, sections = split(inspect.getdoc(found) or "")
    explained = dataclasses.is_dataclass(found) and isinstance(found, type)
    if not explained or "__init__" in vars(found):
        explained = explained and own_fields(found)
    if not explained and (called := signature(name, found)):
        lines.append(f"```py\n{called}\n```\n")
    lines.append(prose + "\n")
    if explained:
        lines.append(field_table(found, {**inherited_arguments(found), **arguments(sections)}))
    elif told := arguments(sections):
        lines += [f"- `{argument}`: {text}" for argument, text in told.items()] + [""]
    lines += raised(sections)
    if isinstance(found, type):
        lines += values_of(found) if issubclass(found, enum.Enum) else members(found)
        if bases := [f"[{base}](#{anchor(base)})" for base in told_elsewhere(found) if base != "UserError"]:
            lines.append(f"What it inherits is described under {', '.join(bases)}.\n")
    return "\n".join(lines)


def split(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the prose of a docstring as Markdown, and the text of each of its sections."""
    pieces = re.split(rf"^({'|'.join(SECTIONS)}):\s*$", docstring, flags=re.MULTILINE)
    sections = dict(zip(pieces[1::2], (textwrap.dedent(text.strip("\n")) for text in pieces[2::2]), strict=True))
    return markdown(pieces[0].strip()), sections


def markdown(text: str) -> str:
    """Return a docstring's text as Markdown: roles and double backticks become code, and examples become blocks."""
    text = re.sub(r":\w+:`~?(?:(?:maporl|trl_ext)\.(?:[a-z_0-9]+\.)*)?([\w.]+)`", r"`\1`", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        if block.lstrip().startswith(">>>"):
            block = f"```py\n{textwrap.dedent(block)}\n```"
        blocks.append(block)
    return "\n\n".join(blocks)


def arguments(sections: Mapping[str, str]) -> dict[str, str]:
    """Return what the docstring says of each argument or attribute, on one line."""
    return entries(sections.get("Args", "") + "\n" + sections.get("Attributes", ""))


def entries(text: str) -> dict[str, str]:
    """Return the ``name: text`` entries of a section. The lines of an entry after the first are indented."""
    found: dict[str, str] = {}
    for item in re.split(r"\n(?=\S)", text.strip("\n")):
        name, colon, rest = item.partition(":")
        if colon:
            found[name.strip()] = markdown(" ".join(rest.split()))
    return found


def raised(sections: Mapping[str, str]) -> list[str]:
    """Return a line for each exception that a docstring names."""
    return [f"Raises `{error}`: {text}\n" for error, text in entries(sections.get("Raises", "")).items()]


def inherited_arguments(kind: type) -> dict[str, str]:
    """Return what the docstrings of base classes in this project say of their arguments."""
    told: dict[str, str] = {}
    for base in reversed(ours(kind)):
        told |= arguments(split(inspect.cleandoc(base.__doc__ or ""))[1])
    return told


def ours(kind: type) -> list[type]:
    """Return the class and its bases, those of this project only."""
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] in OURS]


def told_elsewhere(kind: type) -> dict[str, type]:
    """Return the bases of a class that have an entry of their own, by its name."""
    entries_of = {id(find(name)): name for _, _, names in GROUPS for name in names.split()}
    return {entries_of[id(base)]: base for base in ours(kind)[1:] if id(base) in entries_of}


def new_here(kind: type) -> list[type]:
    """Return the class and its bases in this project, without those that have an entry of their own."""
    covered = {above for base in told_elsewhere(kind).values() for above in ours(base)}
    return [base for base in ours(kind) if base not in covered]


def own_fields(kind: type) -> list[dataclasses.Field]:
    """Return the fields that classes of this project declare, in order."""
    declared = {name for base in new_here(kind) for name in vars(base).get("__annotations__", {})}
    return [field for field in dataclasses.fields(kind) if field.name in declared and field.init]


def field_table(kind: type, told: Mapping[str, str]) -> str:
    """Return a table of a dataclass's fields: type, default, and what it is where something says so."""
    rows = [(f, told.get(f.name) or help_of(f) or comments(kind).get(f.name, "")) for f in own_fields(kind)]
    if not rows:
        return ""
    explained = any(text for _, text in rows)
    lines = ["| field | type | default |" + (" what it is |" if explained else "")]
    lines.append("|---|---|---|" + ("---|" if explained else ""))
    for field, text in rows:
        cells = [f"`{field.name}`", f"`{type_name(field.type)}`", default_of(field)] + ([text] if explained else [])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def help_of(field: dataclasses.Field) -> str:
    """Return the help text that a field carries (:func:`trl_ext.ppo.options.option`)."""
    return field.metadata.get("help") or ""


def comments(kind: type) -> dict[str, str]:
    """Return the texts that stand below the fields of a class and of its bases in this project."""
    found: dict[str, str] = {}
    for base in reversed(new_here(kind)):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for above, below in pairwise(body):
            target = above.target if isinstance(above, ast.AnnAssign) else None
            if isinstance(target, ast.Name) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[target.id] = markdown(" ".join(str(below.value.value).split()))
    return found


def default_of(field: dataclasses.Field) -> str:
    """Return a field's default as code; empty where it must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return f"`{short(field.default_factory())}`"
    return "" if field.default is dataclasses.MISSING else f"`{short(field.default)}`"


def short(value: Any) -> str:
    """Return a value as code on one line. An object of this project is shown as a call without arguments."""
    if type(value).__module__.split(".")[0] in OURS and not isinstance(value, str):
        return f"{type(value).__name__}()"
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return repr(value)


def type_name(annotation: Any) -> str:
    """Return an annotation as a reader writes it, with the limits of numbers."""
    if isinstance(annotation, str):
        return annotation
    if annotation in (None, type(None)):
        return "None"
    if annotation is Ellipsis:
        return "..."
    if isinstance(annotation, list):  # the arguments of a callable
        return f"[{', '.join(type_name(part) for part in annotation)}]"
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return f"{type_name(parts[0])}{limits(parts[1:])}"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(part) for part in parts)
    if origin is typing.Literal:
        return " | ".join(repr(part) for part in parts)
    if origin is not None:
        return f"{type_name(origin)}[{', '.join(type_name(part) for part in parts)}]"
    if isinstance(annotation, typing.ForwardRef):
        return annotation.__forward_arg__
    return getattr(annotation, "__name__", str(annotation))


def limits(constraints: tuple) -> str:
    """Return the limits of a number as text, such as `` >= 1``."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f" {sign} {getattr(part, name)}"
        for constraint in constraints
        for part in getattr(constraint, "metadata", [constraint])
        for name, sign in signs.items()
        if getattr(part, name, None) is not None
    ]
    return ",".join(found)


def signature(name: str, found: Any) -> str:
    """Return how a class or a function is called, as its source has it; empty for a class that is not called."""
    function = found
    if isinstance(found, type):
        function = next((vars(base)["__init__"] for base in ours(found) if "__init__" in vars(base)), None)
        if function is None or issubclass(found, BaseException):
            return ""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    shown = [part for part in parameters(node.args) if part not in ("self", "cls")]
    arrow = f" -> {ast.unparse(node.returns)}" if node.returns and not isinstance(found, type) else ""
    last = full(name).rpartition(".")[2]
    one_line = f"{last}({', '.join(shown)}){arrow}"
    if len(one_line) <= 100:
        return one_line
    return f"{last}(\n" + "".join(f"    {part},\n" for part in shown) + f"){arrow}"


def all_of_ours(kind: type) -> set[str]:
    """Return the names that a class of this project or its bases in this project define."""
    return {name for base in ours(kind) for name in vars(base)}


def parameters(args: ast.arguments) -> Iterator[str]:
    """Yield the parameters of a definition as they stand in a signature."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + args.defaults
    yield from (parameter(arg, default) for arg, default in zip(plain, defaults, strict=True))
    if args.vararg:
        yield f"*{parameter(args.vararg, None)}"
    elif args.kwonlyargs:
        yield "*"
    yield from (parameter(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True))
    if args.kwarg:
        yield f"**{parameter(args.kwarg, None)}"


def parameter(arg: ast.arg, default: ast.expr | None) -> str:
    """Return one parameter as it stands in a signature."""
    typed = f": {ast.unparse(arg.annotation)}" if arg.annotation else ""
    given = "" if default is None else f"{' = ' if typed else '='}{ast.unparse(default)}"
    return f"{arg.arg}{typed}{given}"


def values_of(kind: type) -> list[str]:
    """Return a line with the members of an enumeration."""
    return [f"Its members: {', '.join(f'`{member}`' for member in kind.__members__)}.\n"]  # type: ignore[attr-defined]


def members(kind: type) -> list[str]:
    """Return a line for each public method, property and declared attribute of a class."""
    lines = []
    fields = {f.name for f in own_fields(kind)} if dataclasses.is_dataclass(kind) else set()
    noted = {name: text for name, text in comments(kind).items() if name not in fields}
    for name, text in noted.items():
        lines.append(f"- `{name}`: {text}")
    for name, found in public_members(kind):
        if name in fields or name in noted:
            continue
        prose, sections = split(documentation(kind, name))
        first = first_sentence(prose)
        errors = entries(sections.get("Raises", ""))
        ending = f" Raises {', '.join(f'`{error}`' for error in errors)}." if errors else ""
        lines.append(f"- `{shape(name, found)}`: {first}{ending}")
    return [*lines, ""] if lines else []


def public_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that classes of this project define, and ``__call__``."""
    seen = {name for base in told_elsewhere(kind).values() for name in all_of_ours(base)}
    for base in new_here(kind):
        for name, found in vars(base).items():
            kinds = types.FunctionType | property | classmethod | staticmethod | types.MethodType
            if (not name.startswith("_") or name == "__call__") and name not in seen and isinstance(found, kinds):
                if not documentation(kind, name):
                    continue
                seen.add(name)
                yield name, found


def documentation(kind: type, name: str) -> str:
    """Return the docstring of a member, that of a base class in this project if it has none."""
    for base in ours(kind):
        if name in vars(base) and vars(base)[name].__doc__:
            return inspect.cleandoc(vars(base)[name].__doc__)
    return ""


def shape(name: str, found: Any) -> str:
    """Return a member's name; with the names of its arguments if it is called."""
    if isinstance(found, property):
        return name
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    shown = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    return f"{name}({', '.join(p.name for p in shown)})"


def alias(name: str) -> str:
    """Return what the source says of a type that is only a name: its definition, and the text that stands below it."""
    module, _, last = full(name).rpartition(".")
    home = getattr(import_module(module), "_EXPORTS", {}).get(last, module)
    body = ast.parse(inspect.getsource(import_module(home))).body
    for node, below in pairwise(body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == last:
            told = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            return f"```py\n{ast.unparse(node)}\n```\n\n{markdown(str(told))}\n"
    raise ValueError(f"{name}: no assignment to it stands in {home}")


NAMES = {name.rpartition(".")[2] for _, _, names in GROUPS for name in names.split()}
"""The names that have a section."""


def registry(name: str, found: Mapping[str, Any]) -> str:
    """Return a table of what a dict of choices names, or the names alone where nothing describes them."""
    kind = "a dict" if isinstance(found, dict) else "used as a dict"
    intro = f"`{full(name)}` is {kind}. Each key is a name for a configuration; add an entry to add a choice."
    texts = {key: described(value) for key, value in found.items()}
    if not all(texts.values()):
        return f"{intro} It has {', '.join(f'`{key}`' for key in texts)}.\n"
    options = {key: choices(value) for key, value in found.items()}
    if any(options.values()):
        rows = [f"| `{key}` | {text} | {options[key]} |" for key, text in texts.items()]
        return "\n".join([intro, "", "| name | what it is | options and defaults |", "|---|---|---|", *rows]) + "\n"
    rows = [f"| `{key}` | {text} |" for key, text in texts.items()]
    return "\n".join([intro, "", "| name | what it is |", "|---|---|", *rows]) + "\n"


def choices(value: Any) -> str:
    """Return the options of a registered class that has no section of its own, and their defaults."""
    if not (dataclasses.is_dataclass(value) and isinstance(value, type)) or value.__name__ in NAMES:
        return ""
    told = [f"`{f.name}` {default_of(f) or '(needed)'}" for f in dataclasses.fields(value)]
    return ", ".join(told).replace("|", "\\|")


def described(value: Any) -> str:
    """Return the first sentence about a registered choice. A class is named before it."""
    if isinstance(value, EngineEntry):
        file = ROOT / (value.module.replace(".", "/") + ".py")
        told = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    elif isinstance(value, Return | Baseline | Scale):
        told = "Computed by the trainer, for each token." if value.compute is None else value.compute.__doc__ or ""
    else:
        told = value.__doc__ or ""
    label = f"`{value.__name__}`: " if isinstance(value, type) else ""
    return (label + first_sentence(split(inspect.cleandoc(told))[0])).replace("|", "\\|")


if __name__ == "__main__":
    (ROOT / "docs/api.md").write_text(page(), encoding="utf-8")
