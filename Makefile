# On a fresh machine: `make demo` to try it, `make test` to check it. CONTRIBUTING.md has the others.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The variable, not the option: it also holds for what the package is built with.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without cached bytecode each of the many processes of the tests would compile torch's source for five seconds.
unexport PYTHONDONTWRITEBYTECODE
# pip would compile on one core.
PIP := $(BIN)/pip install --quiet --no-compile
# Tests wait for processes now and then: four more than there are cores.
PYTEST := $(BIN)/python -m pytest -n $(shell echo $$(($$(nproc) + 4))) --no-loadscope-reorder
NEW := "Open the file in a new window." "The password is not valid." "Show all packages that need to be updated."

.PHONY: demo quick test test-system lint local system parts packages kubernetes arm64 coverage mutants benchmarks clean

demo: $(VENV)/train
	$(BIN)/packtrain run examples/translate.yaml
	@echo
	@for sentence in $(NEW); do echo "  $$sentence"; done
	@echo "in German, by the model that was just trained:"
	@$(BIN)/packtrain predict en-de $(NEW) | sed 's/^/  /'

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

$(VENV)/train $(VENV)/test $(VENV)/dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) --editable '.[$(@F)]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # some packages have files for other versions
	@touch $@

$(BIN)/pip:
	$(if $(shell $(PYTHON) -c 'import ensurepip, venv; print(1)' 2>/dev/null),,$(error $(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv))
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) store
