"""Modules under their names of release 0.1, which go on working for one release with a warning."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

GAMES = "exchange kuhn path_plans plan_path plans prisoners signals sokoban sudoku tictactoe"
DATASETS = "anli gsm8k hotpotqa mathematics programs tinygsm"
MOVED = {
    "maporl.backends": "maporl.integrations.ray",
    "maporl.cli.crossplay": "maporl.studies.crossplay.command",
    "maporl.cli.plan": "maporl.studies.planning.command",
    "maporl.cli.sharing": "maporl.studies.sharing.command",
    "maporl.cli.verifier": "maporl.verifier.command",
    "maporl.config.cluster": "maporl.integrations.ray.section",
    "maporl.config.loops": "maporl.loops.section",
    "maporl.config.numbers": "maporl.sections",
    "maporl.crossplay": "maporl.studies.crossplay",
    "maporl.engines.vllm": "maporl.integrations.vllm",
    "maporl.environments.adapters": "maporl.integrations",
    "maporl.environments.games.gymnasium": "maporl.integrations.gymnasium",
    "maporl.environments.games.petting_zoo": "maporl.integrations.petting_zoo",
    "maporl.environments.games.spaces": "maporl.integrations.spaces",
    "maporl.environments.games.text_arena": "maporl.integrations.text_arena",
    "maporl.environments.search": "maporl.datasets.search",
    "maporl.environments.search_words": "maporl.datasets.search_words",
    "maporl.environments.triplets": "maporl.methods.triplets",
    "maporl.environments.trl": "maporl.integrations.trl",
    "maporl.evaluation.crossplay": "maporl.studies.crossplay.result",
    "maporl.hub": "maporl.integrations.hub",
    "maporl.planning": "maporl.studies.planning",
    "maporl.playground.hops": "maporl.datasets.hops",
    "maporl.playground.parts": "maporl.methods.parts",
    "maporl.playground.tiny_programs": "maporl.datasets.tiny_programs",
    "maporl.playground.tiny_versions": "maporl.methods.tiny_versions",
    "maporl.programs": "maporl.serving",
    "maporl.protocols.program": "maporl.serving.program",
    "maporl.rewards.verifier": "maporl.verifier",
    "maporl.rewards.verifier.identity": "maporl.rewards.identity",
    "maporl.rewards.verifier.lengths": "maporl.verifier.check",
    "maporl.rewards.verifiers_rewards": "maporl.integrations.verifiers_rewards",
    "maporl.rollout.tree_search": "maporl.methods.tree_search",
    "maporl.runs.doctor_groups": "maporl.integrations.ray.doctor",
    "maporl.runs.export": "maporl.integrations.exporting.plain",
    "maporl.runs.loop": "maporl.loops.run",
    "maporl.runs.loop_stage": "maporl.loops.run_stage",
    "maporl.runs.parts": "maporl.runs.build",
    "maporl.runs.sharing": "maporl.studies.comparing.study",
    "maporl.tasks.documents": "maporl.methods.documents",
    "maporl.tasks.fantom": "maporl.methods.fantom",
    "maporl.tasks.grading": "maporl.grading",
    "maporl.tasks.sentence_encoder": "maporl.methods.fantom",
    "maporl.tasks.triplets": "maporl.methods.triplets",
    "maporl.tasks.verifiers": "maporl.integrations.verifiers",
    "maporl.training.role_gradients": "maporl.methods.role_gradients",
    "maporl.training.sft": "maporl.loops.sft",
    "maporl.training.sft_options": "maporl.loops.sft_options",
    **{f"maporl.environments.games.{name}": f"maporl.methods.games.{name}" for name in GAMES.split()},
    **{f"maporl.tasks.{name}": f"maporl.datasets.{name}" for name in DATASETS.split()},
}
"""Old name -> new name. The modules within a package move with it, but for those that are named themselves."""


class MovedModules:
    """A finder that Python asks first: a package under its old name would find its modules' files a second time."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return how an old name is loaded, or None for any other name."""
        if not name.startswith("maporl."):  # thousands of modules of others are asked for here
            return None
        old, within = name, ""
        while old and old not in MOVED:
            old, _, last = old.rpartition(".")
            within = f".{last}{within}"
        return ModuleSpec(name, self, loader_state=MOVED[old] + within, is_package=True) if old else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module, which :meth:`exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of ``module``, and say its name once."""
        old, new = module.__name__, module.__spec__.loader_state  # type: ignore[union-attr]
        if old in MOVED:  # who imports a module of a package is told of the package
            warnings.warn(f"{old} is {new} now; its old name goes with the next release", FutureWarning, stacklevel=2)
        sys.modules[old] = import_module(new)
