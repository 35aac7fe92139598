import sys

from setuptools import find_packages, setup

# Configurations are files in plain sight, and installed with the package. An editable install reads them where they
# lie, so it is a path on sys.path and needs no finder. Python asks a finder last, so that a script beside a clone
# that is called maporl would find the clone first, an empty namespace.
FILES = {"maporl.recipe_files": "configs/ppo/recipes", "maporl.configurations": "configs/ppo"}
FOLDERS = {"": "."} if "editable_wheel" in sys.argv else FILES

setup(
    packages=[*find_packages(include=["maporl*", "trl_ext*", "reward_server*"]), *filter(None, FOLDERS)],
    package_dir=FOLDERS,
    package_data={
        "maporl": ["py.typed", "report/assets/*", "report/assets/vendor/*", "integrations/exporting/texts/*"],
        "trl_ext": ["py.typed"],
        "maporl.recipe_files": ["*.yaml"],
        "maporl.configurations": ["*.yaml"],
    },
)
