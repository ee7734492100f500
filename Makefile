# Everything happens in .venv, which the first target that needs it makes. Another Python: make test PYTHON=python3.12

PYTHON ?= python3
DEMO ?= --scheme shared --workers 2
# The short set: ten minutes, also on two cores.
BENCH ?= --payloads E,S,M,L,T --workers 2 --verify default,layout --seconds 15
# What is measured on a GPU, and where the results are kept: `make docs` renders them. Each payload's are written at once,
# since the time on a GPU may end; and a scheme that fails with one does not keep the others from being measured.
GPU_PAYLOADS ?= L T S M G
GPU_BENCH ?= --workers 1,2,8 --schemes shared,process,torchrl-multiprocess,torchrl-shared --verify default --seconds 5
GPU_RESULTS ?= docs/performance/one-gpu.json
# How many processes share the tests: on two cores three are faster than two, since tests wait for processes that they start.
WORKERS ?= 3
# The same examples in every run; `dev` and `nightly` look elsewhere each time.
export HYPOTHESIS_PROFILE ?= ci
# How long `make fuzz` looks at each decoder.
FUZZ_SECONDS ?= 60
# torch asks the name server about every connection to a store, also to this machine: one that is slow is not waited for.
export RES_OPTIONS ?= timeout:1 attempts:1
# Each of the many processes would compile the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadscope
# Newer than what it was installed from, or the environment is brought up to date.
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test tests test-loaded test-matrix fuzz smoke verify verify-quick demo bench bench-gpu check check-all lint lint-types lint-rest format generate docs protocol clean

help:
	@echo 'make test       lint, types, and the tests that need no model checker: 10 minutes'
	@echo 'make test-loaded  the same tests on a machine that is busy with twice as many processes as it has cores'
	@echo 'make test-matrix  tests on each Python, with the two newest torch and tensordict, and the lowest: more than an hour (TESTS=: which)'
	@echo 'make smoke      the wheel and the sdist in an empty environment: 2 minutes'
	@echo 'make fuzz       atheris and Hypothesis at each decoder, FUZZ_SECONDS=60 each: 6 minutes'
	@echo 'make verify-quick  all proofs again, the second checker, the tests with TLC: 14 minutes'
	@echo 'make verify     and the large graphs, and the mutants of model and code: 38 minutes'
	@echo 'make demo       train CartPole while workers act with the synchronised policy'
	@echo 'make bench      the schemes against the floors of this machine, a short set: 10 minutes'
	@echo 'make bench-gpu  the same on one GPU, in all three directions; keeps the results for the docs'
	@echo 'make check      the quick set of the model checker'
	@echo 'make check-all  all of it'
	@echo 'make lint       generated files, ruff, mypy, import-linter'
	@echo 'make format     let ruff format and fix'
	@echo 'make generate   render tables and docs from spec/protocol.toml, and the module map'
	@echo 'make docs       the docs site, in site/; warnings are errors'
	@echo 'make protocol   and pin all that follows from it, and say what a person must still write (QUICK=1: without the long runs)'
	@echo 'make install    only make .venv'
	@echo 'make clean      remove .venv and caches'

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, and this is " + sys.version.split()[0] + ": make PYTHON=python3.11")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo 'No venv could be made (Debian: apt-get install python3-venv).'; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt uv
	# Compiled now: importing torch from sources takes three times as long, in each of many processes.
	$(BIN)/uv pip install --compile-bytecode --python $(BIN)/python -c constraints.txt -b constraints.txt -e '.[dev]'
	@touch $@

# mypy takes half a minute of one core: before the tests, the other core would have nothing to do meanwhile.
test: lint-rest
	@$(MAKE) --no-print-directory --jobs 2 tests lint-types

tests: $(INSTALLED)
	$(PYTEST) -m 'not slow and not tlc'

test-loaded: $(INSTALLED)
	$(BIN)/python tests/busy.py $(PYTEST) -m 'not slow and not tlc'

test-matrix: $(INSTALLED)
	$(BIN)/python spec/packages.py matrix $(TESTS)

smoke: $(INSTALLED)
	$(BIN)/python spec/packages.py smoke

fuzz: $(INSTALLED)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(BIN)/uv pip install --python $(BIN)/python -c constraints.txt 'atheris>=3.0'
	$(BIN)/python tests/fuzz.py $(FUZZ_SECONDS)

verify-quick: $(INSTALLED)
	$(BIN)/python spec/check.py model --all --second quick
	$(PYTEST) -m 'tlc and not slow'

verify: $(INSTALLED)
	$(BIN)/python spec/check.py model --all --second all
	$(PYTEST) -m 'tlc and not slow'
	$(PYTEST) -m slow
	$(BIN)/python spec/check.py mutants

demo: $(INSTALLED)
	$(BIN)/weightsync demo $(DEMO)

bench: $(INSTALLED)
	$(BIN)/weightsync bench $(BENCH)

bench-gpu: $(INSTALLED)
	failed=0; for device in cuda cuda-to-cpu cpu-to-cuda; do for payload in $(GPU_PAYLOADS); do \
		$(BIN)/weightsync bench --device $$device --payloads $$payload $(GPU_BENCH) \
			--json $(GPU_RESULTS) --append || failed=1; \
	done; done; exit $$failed

check: $(INSTALLED)
	$(BIN)/weightsync check

check-all: $(INSTALLED)
	$(BIN)/weightsync check --all

# mypy takes most of the time, beside the rest.
lint: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint-types lint-rest

lint-types: $(INSTALLED)
	$(BIN)/mypy

lint-rest: $(INSTALLED)
	$(BIN)/python spec/generate.py --check
	$(BIN)/python spec/assurance.py --check
	$(BIN)/python spec/architecture.py --check
	$(BIN)/python spec/performance.py --check
	$(BIN)/python spec/scale.py --check
	$(BIN)/python spec/troubleshooting.py --check
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

generate: $(INSTALLED)
	$(BIN)/python spec/generate.py
	$(BIN)/python spec/assurance.py
	$(BIN)/python spec/architecture.py
	$(BIN)/python spec/performance.py
	$(BIN)/python spec/scale.py
	$(BIN)/python spec/troubleshooting.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f spec/site/mkdocs.yml

protocol: $(INSTALLED)
	$(BIN)/python spec/follow.py $(if $(QUICK),--quick) $(if $(SINCE),--since $(SINCE))

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
