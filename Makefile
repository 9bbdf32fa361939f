# Everything a newcomer needs: `make demo` (the main job) and `make test`. Each sets up what it needs.
# What maintainers run by hand is in tools/README.md and experiments/README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Tests start a hundred processes that import qkeel: compiled modules are kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test check slow docs bench gpu clean

$(VENV)/.lab: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.lab
	$(PIP) -e '.[dev]'
	touch $@

setup: $(VENV)/.dev  ## the environment with all that tests need

demo: $(VENV)/.lab  ## remedies x learning rates on real text, and a page that shows what happened
	$(BIN)/qkeel demo --out demo --jobs $(JOBS)

test: $(VENV)/.dev  ## everything but slow and GPU tests
	$(ONE_THREAD) $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu and not zoo'

check: $(VENV)/.dev  ## lint, types, import floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Trackers and trainers bring their own versions of what tests use, so their tests have an environment of their own.
TRACKERS := .venv-trackers

$(TRACKERS)/.done: pyproject.toml constraints.txt
	test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev,track,frames,plot,lightning]' nbclient ipykernel
	touch $@

slow: $(VENV)/.dev $(TRACKERS)/.done  ## tests of compilation, killed processes, trainers, trackers and several processes; an hour
	$(PIP) -e '.[cluster,cross]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tools/trainers.txt
	$(ONE_THREAD) QKEEL_TYPE_CHECKS=0 $(BIN)/pytest -m slow --timeout 1800
	$(ONE_THREAD) $(TRACKERS)/bin/pytest -n $(JOBS) --dist loadfile tests/contract/integrations tests/integrations tests/frames tests/packaging

docs: $(VENV)/.dev  ## the site, without a warning or a dead link
	$(PIP) -e '.[docs]'
	rm -rf docs/_build docs/reference/generated
	$(BIN)/sphinx-build -E -W --keep-going -q docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

bench: $(VENV)/.dev  ## ratios to peers, side by side in one run
	$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks

# A GPU machine needs torch >= 2.11, Triton and pytest and no environment of ours: jaxtyping's annotations have a stand-in.
GPU_PATH = src:.$(shell $(PYTHON) -c "import jaxtyping" 2>/dev/null || echo :tests/gpu/stand_ins)

gpu:  ## on a CUDA device, in five minutes: kernels against the oracle, every table, goals; into benchmarks/results
	PYTHONPATH=$(GPU_PATH) $(PYTHON) -m benchmarks.on_gpu

clean:
	rm -rf $(VENV) $(TRACKERS) .venv-foreign .venv-programs demo docs/_build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
