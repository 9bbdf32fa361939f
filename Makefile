# Everything a newcomer needs: `make demo` (the main job) and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
JOBS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Tests start a hundred processes that import qkeel: compiled modules are kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

SEED ?= 0

.PHONY: claims ladder drawn setup demo test machines slow trackers mutation zoo foreign suites programs gpu gpu-train check lint docs notebooks gallery bench roofline assets clean

$(VENV)/.lab: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.lab
	$(PIP) -e '.[dev]'
	touch $@

setup: $(VENV)/.dev  ## the environment with all that tests need

demo: $(VENV)/.lab  ## six remedies x three learning rates on real text, and a page that shows what happened
	$(BIN)/qkeel demo --out demo --jobs $(JOBS)

test: $(VENV)/.dev  ## everything but slow and GPU tests
	$(ONE_THREAD) $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu and not zoo'

machines: $(VENV)/.dev  ## quick tests as on other processors, users, paths, locales, Pythons; writes docs/internals/machines.md; hours
	$(BIN)/python -m tools.machines --jobs $(JOBS)

slow: $(VENV)/.dev  ## compile tests, 20 SIGKILLs, the published orderings on the micro configuration
	$(PIP) -e '.[cluster,cross]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tools/trainers.txt
	$(ONE_THREAD) $(BIN)/pytest -m slow --timeout 1800
	$(MAKE) trackers

TRACKERS := .venv-trackers

$(TRACKERS)/.done: pyproject.toml constraints.txt
	test -x $(TRACKERS)/bin/python || $(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev,track,frames,plot,lightning]' nbclient ipykernel
	touch $@

trackers: $(TRACKERS)/.done  ## the tests of trackers, trainers, tables and figures, and what a newcomer tries first, with all their libraries
	$(ONE_THREAD) $(TRACKERS)/bin/pytest -n $(JOBS) --dist loadfile tests/integrations tests/frames tests/packaging

SEEDS ?= 11

mutation: $(VENV)/.dev  ## mutants of every room against its direct tests; needs two hours
	$(ONE_THREAD) nice -n 10 $(BIN)/python -m tests.mutation --seeds $(SEEDS) --out benchmarks/results/mutation.json

zoo: $(VENV)/.dev  ## 423 architectures of transformers, tiny; writes docs/internals/zoo.md
	$(ONE_THREAD) $(BIN)/python -m tools.zoo.census --jobs $(JOBS) --out docs/internals/zoo.md

suites: $(VENV)/.dev  ## peers' own tests with qkeel in them (QKEEL_TRANSFORMERS: a checkout of transformers); writes docs/internals/suites.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check expecttest==0.3.0 parameterized==0.9.0 httpx==0.28.1  # of torch's and transformers' tests
	$(ONE_THREAD) $(BIN)/python -m tools.suites --out docs/internals/suites.md

PROGRAMS := .venv-programs

$(PROGRAMS)/.done: tools/programs/requirements.txt constraints.txt pyproject.toml
	test -x $(PROGRAMS)/bin/python || $(PYTHON) -m venv $(PROGRAMS)
	$(PROGRAMS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(PROGRAMS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tools/programs/requirements.txt
	touch $@

programs: $(PROGRAMS)/.done  ## others' training programs, plain and watched, from checkouts in QKEEL_PROGRAMS; writes docs/internals/programs.md
	test -e "$(QKEEL_PROGRAMS)/data/tinyllama" || PYTHONPATH=tools/programs/shims:. $(PROGRAMS)/bin/python -m tools.programs.data "$(QKEEL_PROGRAMS)"
	$(ONE_THREAD) $(PROGRAMS)/bin/python -m tools.programs --out docs/internals/programs.md

FOREIGN := .venv-foreign

# Each package without its dependencies: theirs would bring other versions of torch.
$(FOREIGN)/.done: tools/foreign/requirements.txt constraints.txt pyproject.toml
	test -x $(FOREIGN)/bin/python || $(PYTHON) -m venv $(FOREIGN)
	$(FOREIGN)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf]' pillow pyyaml tqdm pandas scipy
	$(FOREIGN)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tools/foreign/requirements.txt
	touch $@

foreign: $(FOREIGN)/.done  ## models of 30 packages against a reference of their own, attention at random and in other idioms; writes docs/internals/foreign.md
	$(ONE_THREAD) $(FOREIGN)/bin/python -m tools.foreign.census --cases 2000 --idioms 500 --out docs/internals/foreign.md

# A GPU machine needs torch >= 2.11, Triton and pytest and no environment of ours: jaxtyping's annotations have a stand-in.
GPU_PATH = src:.$(shell $(PYTHON) -c "import jaxtyping" 2>/dev/null || echo :tests/gpu/stand_ins)

gpu:  ## on a CUDA device, in ten minutes: kernels against the oracle, every table, goals; into benchmarks/results
	PYTHONPATH=$(GPU_PATH) $(PYTHON) -m benchmarks.on_gpu

MINUTES ?= 10
STEPS ?= 30000
DATA ?= stdlib

gpu-train:  ## MINUTES (10) of training the 100M recipes for STEPS (30000) on DATA (stdlib); goes on where it stopped
	PYTHONPATH=$(GPU_PATH) $(PYTHON) -m benchmarks.on_gpu.train --minutes $(MINUTES) --steps $(STEPS) --data $(DATA)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint  ## lint, types, import floors
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(VENV)/.dev
	$(PIP) -e '.[docs]'
	rm -rf docs/_build docs/reference/generated
	$(BIN)/sphinx-build -E -W --keep-going -q docs docs/_build/html
	$(BIN)/python docs/check_site.py docs/_build/html

notebooks: $(VENV)/.dev  ## run the notebooks of the docs and write their output into them
	$(BIN)/python docs/run_notebooks.py

gallery: $(VENV)/.dev  ## the pictures of docs/gallery.md, light and dark; needs chromium and some minutes
	$(PIP) -e '.[plot,docs]'
	$(BIN)/python tools/gallery.py

bench: $(VENV)/.dev  ## ratios to peers, side by side in one run
	$(PIP) -e '.[bench]'
	$(BIN)/python -m benchmarks

claims: $(VENV)/.dev  ## the studies of the claims, as far as they are not done; writes experiments/claims/results.json, experiments/notes/claims.md and docs/what-we-found.md
	$(ONE_THREAD) $(BIN)/python -m experiments.claims --jobs $(JOBS)

ladder: $(VENV)/.dev  ## runs of 0.13M to 124M parameters, as far as they are not done (some 20 core-hours); stop it and start it at will
	$(ONE_THREAD) $(BIN)/python -m experiments.ladder.run --idle
	$(BIN)/python -m experiments.ladder

drawn: $(VENV)/.dev  ## the autopilot's last drawn test: 560 runs, as far as they are not done, in idle time; stop it and start it at will
	$(ONE_THREAD) $(BIN)/python -m experiments.ladder.drawn run --idle
	$(BIN)/python -m experiments.ladder.drawn judge

roofline: $(VENV)/.dev  ## operators under the measured peaks of this machine, and the picture of docs/benchmarks.md
	$(BIN)/python -m benchmarks.roofline
	$(BIN)/python -m benchmarks.charts benchmarks/results/roofline-$$(date +%F).json docs/images/roofline.svg

assets:  ## rebuild the vendored chart library (needs Node); its result is committed
	cd assets && npm ci --no-audit --no-fund && npm run build

clean:
	rm -rf $(VENV) $(FOREIGN) $(TRACKERS) demo docs/_build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
