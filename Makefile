# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := -m pip --disable-pip-version-check install --quiet
COMPAT_TRITON := 3.6.0 3.9.0
TWO := -n 2 --dist worksteal  # processes; the suite is made for two cores
# A limit by the clock can run out by accident on a shared machine. What failed beside other tests runs
# once more, alone, and a second failure counts. The first one stays in the output.
ALONE := --last-failed --last-failed-no-failures none --exitfirst

# Every process of a test run needs the same bytecode: where an environment forbids to store it, pytest
# rewrites 340 files per process, and each process that a test starts compiles sundog again.
test test-long test-compat test-nodes: export PYTHONDONTWRITEBYTECODE :=

.PHONY: assets demo test lint format docs wheel test-long test-compat test-nodes gpu-wheels clean
demo: $(VENV)/.installed
	$(BIN)/python scripts/assets.py --within=60 --or-say-why
	$(BIN)/python -m sundog demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest tests $(TWO) || { echo "== once more, alone, what failed"; \
	  $(BIN)/python -m pytest tests $(ALONE); }

# The longest tests, of which each takes many seconds.
test-long: $(VENV)/.installed
	$(BIN)/python -m pytest tests -m long $(TWO) || { echo "== once more, alone, what failed"; \
	  $(BIN)/python -m pytest tests -m long $(ALONE); }

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports
	$(BIN)/python scripts/prose.py

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation site, into build/site. A warning, such as a broken link or anchor, ends it.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python scripts/site/offline.py build/site

# The page of `sundog report`: frontend/ bundled by npm into sundog/report/assets.
assets: $(VENV)/.installed
	$(BIN)/python scripts/assets.py

# The wheels of sundog and sundog-dataset, into dist/, each tried in a clean environment.
wheel: $(VENV)/.installed
	$(BIN)/python scripts/wheels.py dist

# The tests that touch Triton's internals, against the oldest and newest Triton that we support.
test-compat: $(COMPAT_TRITON:%=.venv-triton-%/.installed)
	set -e; for v in $(COMPAT_TRITON); do echo "== triton $$v"; \
	  .venv-triton-$$v/bin/python -c "import triton; assert triton.__version__ == '$$v', triton"; \
	  .venv-triton-$$v/bin/python -m pytest tests -m compat $(TWO) || { echo "== once more, alone"; \
	  .venv-triton-$$v/bin/python -m pytest tests -m compat $(ALONE); }; done

# Several machines, made of network namespaces. Where those are not possible it says why, and passes.
test-nodes: $(VENV)/.installed
	$(BIN)/python -m pytest tests/nodes -m namespaces -rs || { echo "== once more, what failed"; \
	  $(BIN)/python -m pytest tests/nodes -m namespaces $(ALONE); }

# helion asks for no torch of its own; it is in the test set because the dataset supports it.
$(VENV)/.installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt torch==2.13.0 triton==3.7.1
	$(BIN)/python $(PIP) -c constraints.txt -e '.[test,lint,helion]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python $(PIP) -c constraints.txt -e '.[docs]'
	touch $@

# Another Triton before all else of .venv: 0.6 and 1.0 GB; environments of their own took 2.0 and 2.4.
# --no-deps: a torch that ships its own triton must not pull that one back in.
.venv-triton-%/.installed: $(VENV)/.installed
	$(PYTHON) -m venv --without-pip .venv-triton-$*
	$(BIN)/python -m pip --python .venv-triton-$*/bin/python --disable-pip-version-check install --quiet --no-deps triton==$*
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
	  > $$(.venv-triton-$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/everything_else.pth
	touch $@

# What a GPU machine that can install nothing lacks (scripts/gpu-check unpacks it). Python there: 3.12.
GPU_WHEELS := greenlet pytest-timeout hypothesis sortedcontainers
gpu-wheels:
	$(PYTHON) -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
	  --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
	  --platform manylinux2014_x86_64 -c constraints.txt -d wheels $(GPU_WHEELS)

clean:
	rm -rf .venv .venv-triton-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
