# On a fresh machine: `make demo` to try it, `make test` to check it. CONTRIBUTING.md has the others.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without cached bytecode each of the many processes of the tests would compile torch's source for five seconds.
unexport PYTHONDONTWRITEBYTECODE
# The variable, not the option: it also holds for what the package is built with. Its path is relative, since pip splits
# it at spaces. pip would compile on one core.
PIP := PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --no-compile
# Tests wait for processes now and then: four more than there are cores.
PYTEST := $(BIN)/python -m pytest -n $(shell echo $$(($$(nproc) + 4))) --no-loadscope-reorder
# Never a store of the same name above this directory.
HERE := --store ./store
NEW := "Open the file in a new window." "The password is not valid." "Show all packages that need to be updated."

# Leaves an environment that is whole alone: pip's RECORD is the last file that venv writes.
define MAKE_ENVIRONMENT
import subprocess, sys
folder = sys.argv[1]
is_whole = "import sys, importlib.metadata as m; sys.exit(sys.version_info < (3, 11) or not m.files('pip'))"
try:
    if subprocess.call([folder + "/bin/python", "-c", is_whole], stderr=subprocess.DEVNULL) == 0:
        sys.exit()
except OSError:
    pass
if sys.version_info < (3, 11):
    sys.exit("Packtrain needs Python 3.11 or later, and $(PYTHON) is %d.%d; try `make PYTHON=python3.12`" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv")
venv.create(folder, clear=True, symlinks=True, with_pip=True)
endef
export MAKE_ENVIRONMENT

.PHONY: demo environment quick test test-system lint local lowest parts packages kubernetes arm64 coverage mutants benchmarks clean

# A second `make demo` continues the run of the first, or uses its model.
demo: $(VENV)/train
	@$(BIN)/packtrain show en-de $(HERE) >/dev/null 2>&1; \
	if [ $$? -eq 102 ]; then $(BIN)/packtrain run examples/translate.yaml; else $(BIN)/packtrain resume en-de $(HERE); fi
	@echo
	@for sentence in $(NEW); do echo "  $$sentence"; done
	@echo "in German, by the model that was just trained:"
	@$(BIN)/packtrain predict en-de $(HERE) $(NEW) | sed 's/^/  /'

quick: $(VENV)/test
	$(PYTEST) -m quick $(PYTEST_OPTIONS)

test: $(VENV)/test
	@$(MAKE) --no-print-directory --jobs 2 lint local

# Installing packages waits for disk and network, and building does not.
test-system: $(VENV)/dev
	@$(MAKE) --no-print-directory --jobs 3 parts
	$(PYTEST) -m system $(PYTEST_OPTIONS)

lint: $(VENV)/test
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --check
	@$(BIN)/mypy

local: $(VENV)/test
	$(PYTEST) -m 'not system' $(PYTEST_OPTIONS)

# The quick tests with the oldest versions that pyproject.toml allows.
lowest:
	@$(MAKE) --no-print-directory environment VENV=.venv-lowest
	@.venv-lowest/bin/python tests/lowest.py >.venv-lowest/constraints.txt
	@$(MAKE) --no-print-directory quick VENV=.venv-lowest CONSTRAINTS=.venv-lowest/constraints.txt

coverage: $(VENV)/dev
	$(PYTEST) -m 'not system' --cov=packtrain --cov-branch --cov-report=term:skip-covered

benchmarks: $(VENV)/dev
	$(BIN)/python benchmarks/all.py $(if $(SHORT),--short)

mutants: $(VENV)/dev
	$(BIN)/python tests/mutants.py

parts: packages kubernetes arm64

packages:
	bash tests/parts/install

# The cluster of the tests takes a quarter of an hour to compile, once.
kubernetes: packages
	bash tests/parts/kubernetes-build

# The arm64 machine of the tests takes a minute to make, once.
arm64: $(VENV)/dev packages
	bash tests/parts/arm64-build

$(VENV)/train $(VENV)/test $(VENV)/dev: pyproject.toml constraints.txt | environment
	@echo "installing Packtrain into $(VENV)"
	@$(PIP) --editable '.[$(@F)]' 2>$(VENV)/install.log || { cat $(VENV)/install.log >&2; \
	  if grep -qE 'NewConnectionError|ConnectTimeout|ProxyError|SSLError|name resolution' $(VENV)/install.log; then \
	    echo "pip cannot reach the package index; check the network and \`$(BIN)/python -m pip config list\`" >&2; fi; exit 1; }
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # some packages have files for other versions
	@touch $@

environment:
	@$(PYTHON) -c "$$MAKE_ENVIRONMENT" $(VENV)

# The store stays: it has the runs. A node that still works uses the environment.
clean:
	@[ "$$($(BIN)/packtrain ls --state running --state waiting --json $(HERE) 2>/dev/null || echo [])" = [] ] || { \
	  echo "a run in ./store uses $(VENV); stop it first: $(BIN)/packtrain stop"; exit 1; }
	rm -rf $(VENV) .venv-lowest .mypy_cache .pytest_cache .ruff_cache
