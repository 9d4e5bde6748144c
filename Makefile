# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The variable, not the option: it also holds for what the package is built with.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without cached bytecode each of the many processes of the tests would compile torch's source for five seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/pip install --quiet
NEW := "Open the file in a new window." "The password is not valid." "Show all packages that need to be updated."

.PHONY: demo test ready lint parts packages kubernetes arm64 clean

demo: $(VENV)/train
	$(BIN)/packtrain run examples/translate.yaml
	@echo
	@for sentence in $(NEW); do echo "  $$sentence"; done
	@echo "in German, by the model that was just trained:"
	@$(BIN)/packtrain predict en-de $(NEW) | sed 's/^/  /'

# Installing waits for disk and network, and checking the types does not.
test:
	$(MAKE) --jobs 3 ready
	$(BIN)/python -m pytest -n 3 --no-loadscope-reorder --durations 30

lint: $(VENV)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

ready: lint parts

parts: packages $(if $(filter true,$(CI)),kubernetes arm64)

packages:
	bash tests/parts/install

# The cluster of the tests takes a quarter of an hour to compile, once; without it they use a simulated API server alone.
kubernetes: packages
	bash tests/parts/kubernetes-build

# The arm64 machine of the tests takes a minute to make, once.
arm64: $(VENV)/dev packages
	bash tests/parts/arm64-build

$(VENV)/train: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --editable '.[dev,train]'  # of 400 MB of source, most is never imported
	@touch $@

clean:
	rm -rf $(VENV) store
