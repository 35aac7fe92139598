from setuptools import find_packages, setup

# the recipes are configurations like any other, and installed with the package
setup(
    packages=[*find_packages(include=["maporl*", "trl_ext*", "reward_server*"]), "maporl.recipe_files"],
    package_dir={"maporl.recipe_files": "configs/ppo/recipes"},
    package_data={"maporl": ["py.typed", "report/assets/*", "report/assets/vendor/*"], "trl_ext": ["py.typed"], "maporl.recipe_files": ["*.yaml"]},
)
