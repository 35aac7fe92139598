# make quickstart   install into .venv and watch two tiny specialists learn to listen (two to three minutes on two CPU cores)
# make test         install what the tests need and run those that take minutes
# make check        ruff, types and the fast tests, before a commit

PYTHON ?= python3
# versions to install: constraints.txt has the newest that were tried, constraints-oldest.txt the oldest
CONSTRAINTS ?= constraints.txt
# the build of PyTorch: cpu for processors alone, cu126 and others for a version of CUDA. Without it, pip takes what PyPI has:
# on Linux the build for the newest CUDA
TORCH ?=
VENV ?= .venv
BIN := $(VENV)/bin
# tests at a time, each on one thread: trainings that share cores wait for each other's threads. Many tests wait for processes
# that start, end or are killed, so that two cores have work for three
WORKERS ?= 3
QUICK := not slow and not gpu and not vllm
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Python compiles a module when it is first imported. Compiling all 25,000 of them, of which a fifth is ever imported,
# would be a third of the installation
INSTALL := $(PIP) install --no-compile -c $(CONSTRAINTS)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# tests start many processes, which need not compile the package again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart picture test test-core test-newest test-oldest test-slow test-vllm test-clients check bench format reference notebooks docs package clean

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) $(if $(TORCH),--extra-index-url https://download.pytorch.org/whl/$(TORCH)) torch
	$(INSTALL) -e .
	touch $@

# beside it, what every process of the tests imports is compiled, once, and so are the tests, whose asserts pytest writes
# anew: three processes that start together would each do all of it. Tests of packages that are not there yet are compiled, too
$(VENV)/installed-dev: $(VENV)/installed
	$(INSTALL) pytest
	{ $(BIN)/python -c "import maporl.cli.main, maporl.cli.train, maporl.loops.run, maporl.report.page"; \
		$(BIN)/python -m pytest -q --collect-only -m "$(QUICK)"; } > /dev/null 2>&1 & $(INSTALL) -e ".[dev]" && wait
	touch $@

quickstart: $(VENV)/installed
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		train_multi_agent.py --config configs/ppo/quickstart.yaml --set output_dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S)

# the pictures of the pages, for the README and the documentation: needs Chromium and its driver
RUN ?= runs/quickstart
picture: $(VENV)/installed-dev
	test -d $(RUN) || $(BIN)/maporl train configs/ppo/quickstart.yaml --set output_dir=$(RUN)
	$(BIN)/python benchmarks/picture.py $(RUN) docs/images/report.png --height 880
	$(BIN)/python benchmarks/picture.py $(RUN) docs/images/dialogues.png --height 860 --at when=train

test: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25 -m "$(QUICK)"

# those of the core alone: not of companions, of extensions, of pages, of whole systems and of hostile input
BESIDE := contract datasets fuzz grading guard integrations loops methods reward_server sandbox serving studies system verifier
test-core: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "$(QUICK)" $(BESIDE:%=--ignore=tests/%)

# the fast tests in an environment of their own, with the newest version of everything, and with the oldest that is supported
test-newest:
	rm -rf .venv-newest
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=/dev/null

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

# with a real vLLM: in the process if it is installed, and on the server that MAPORL_TEST_VLLM_URL names, which another
# terminal has started (see the head of tests/integrations/test_vllm_engine.py)
test-vllm: $(VENV)/installed-dev
	@test -n "$$MAPORL_TEST_VLLM_URL" -a -n "$$MAPORL_TEST_VLLM_MODEL" || $(BIN)/python -c "import vllm" || { echo "install vllm, or set MAPORL_TEST_VLLM_URL and MAPORL_TEST_VLLM_MODEL: tests/integrations/test_vllm_engine.py says how to start a server"; exit 2; }
	$(BIN)/python -m pytest -m vllm tests/integrations/test_vllm_engine.py tests/integrations/test_vllm_here.py tests/integrations/test_vllm_calling.py tests/integrations/test_exporting.py
	$(BIN)/python -m pytest -m vllm tests/system/test_ray_vllm.py  # by itself: vLLM imports Ray, which must begin with safe settings

# what works with which client of models behind an address, each in an environment of its own with its newest version: it
# writes the table of docs/howto/clients.md. CLIENTS="openai agno" tries these alone
test-clients: $(VENV)/installed-dev
	$(BIN)/python benchmarks/clients/table.py $(CLIENTS)

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -x -n $(WORKERS) --dist worksteal -m "$(QUICK)"

# whether this tree is slower than a commit, on a machine without other work: ten minutes on two cores
BASE ?= 0e81a74d
bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/bench.py --base $(BASE)

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the pages that are made from the code; a test says when they are stale
reference: $(VENV)/installed
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_base.py
	$(BIN)/python docs/make_architecture.py
	$(BIN)/python docs/make_licences.py
	$(BIN)/python -m maporl.report.metric_panels > docs/metrics.md
	$(BIN)/python -m maporl.config.recipes > docs/recipes.md

# run the notebooks of examples/ and store them with their outputs; some minutes
notebooks: $(VENV)/installed
	$(INSTALL) -e ".[notebooks]"
	$(BIN)/python examples/make_notebooks.py

# the site in build/docs; warnings, and links within it that lead nowhere, are errors
docs: $(VENV)/installed
	$(INSTALL) -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict

# the wheel and the sdist in dist/, and each in an environment of its own, away from the checkout, training two updates
package: $(VENV)/installed-dev
	rm -rf dist && $(BIN)/python -m build
	tests/install_and_run.sh dist/*.whl
	tests/install_and_run.sh dist/*.tar.gz

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
