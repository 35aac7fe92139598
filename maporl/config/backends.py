"""Where a run may train besides the launcher's processes, by name. To add a backend, add a line here.

Imports nothing heavy, because configurations are checked against it before anything is loaded.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """A value of ``cluster.backend``. The parts are texts ``MODULE:OBJECT``, because backends are extensions.

    Args:
        home: a :class:`maporl.training.home.TeamHome`, which is built with the section ``cluster`` and whether to be
            quiet.
        check: yields why a run cannot be trained there, and what of the backend a run sets that is trained elsewhere.
        lines: returns what a run is there, as lines of text, for a run and the prompts of its dry run
            (:class:`maporl.validation.rehearsal.Measured`).
        distills: whether the policies can be asked for log-probabilities in the trainer's own process.
    """

    home: str
    check: str
    lines: str
    distills: bool = False


BACKENDS = {
    "ray": Backend(
        "maporl.integrations.ray.ray_backend:RayBackend",
        "maporl.integrations.ray.check:check",
        "maporl.integrations.ray.check:group_lines",
    ),
    "tinker": Backend(
        "maporl.integrations.tinker.tinker_backend:TinkerHome",
        "maporl.integrations.tinker.check:check",
        "maporl.integrations.tinker.prices:lines",
        distills=True,
    ),
}
