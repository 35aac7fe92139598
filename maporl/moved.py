"""Modules under their names of release 0.1, which go on working for one release with a warning."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

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
    "maporl.environments.games.exchange": "maporl.methods.games.exchange",
    "maporl.environments.games.gymnasium": "maporl.integrations.gymnasium",
    "maporl.environments.games.kuhn": "maporl.methods.games.kuhn",
    "maporl.environments.games.path_plans": "maporl.methods.games.path_plans",
    "maporl.environments.games.petting_zoo": "maporl.integrations.petting_zoo",
    "maporl.environments.games.plan_path": "maporl.methods.games.plan_path",
    "maporl.environments.games.plans": "maporl.methods.games.plans",
    "maporl.environments.games.prisoners": "maporl.methods.games.prisoners",
    "maporl.environments.games.signals": "maporl.methods.games.signals",
    "maporl.environments.games.sokoban": "maporl.methods.games.sokoban",
    "maporl.environments.games.spaces": "maporl.integrations.spaces",
    "maporl.environments.games.sudoku": "maporl.methods.games.sudoku",
    "maporl.environments.games.text_arena": "maporl.integrations.text_arena",
    "maporl.environments.games.tictactoe": "maporl.methods.games.tictactoe",
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
    "maporl.runs.loop": "maporl.loops.run",
    "maporl.runs.loop_stage": "maporl.loops.run_stage",
    "maporl.runs.sharing": "maporl.studies.comparing.study",
    "maporl.tasks.anli": "maporl.datasets.anli",
    "maporl.tasks.documents": "maporl.methods.documents",
    "maporl.tasks.fantom": "maporl.methods.fantom",
    "maporl.tasks.grading": "maporl.grading",
    "maporl.tasks.gsm8k": "maporl.datasets.gsm8k",
    "maporl.tasks.hotpotqa": "maporl.datasets.hotpotqa",
    "maporl.tasks.mathematics": "maporl.datasets.mathematics",
    "maporl.tasks.programs": "maporl.datasets.programs",
    "maporl.tasks.sentence_encoder": "maporl.methods.fantom",
    "maporl.tasks.tinygsm": "maporl.datasets.tinygsm",
    "maporl.tasks.triplets": "maporl.methods.triplets",
    "maporl.tasks.verifiers": "maporl.integrations.verifiers",
    "maporl.training.role_gradients": "maporl.methods.role_gradients",
    "maporl.training.sft": "maporl.loops.sft",
    "maporl.training.sft_options": "maporl.loops.sft_options",
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
