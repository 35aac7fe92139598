from setuptools import find_packages, setup

# configurations are files in plain sight, and installed with the package
setup(
    packages=[
        *find_packages(include=["maporl*", "trl_ext*", "reward_server*"]),
        "maporl.recipe_files",
        "maporl.configurations",
    ],
    package_dir={"maporl.recipe_files": "configs/ppo/recipes", "maporl.configurations": "configs/ppo"},
    package_data={
        "maporl": ["py.typed", "report/assets/*", "report/assets/vendor/*"],
        "trl_ext": ["py.typed"],
        "maporl.recipe_files": ["*.yaml"],
        "maporl.configurations": ["*.yaml"],
    },
)
