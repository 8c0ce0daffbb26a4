# make gate    the whole gate on the configured host (gate.toml; the embedded one unless told otherwise)
# make test    the suite's own tests, then the gate on the embedded host
# make contract  record what the real SGLang answers, for the tests of its client and of its stand-in (root)
#
#   make gate DRAFTER=path/to/checkpoint   judge this checkpoint
#   make gate PROMPTS=40                   use the first 40 prompts
#   make gate ARGS="--profile box"         any other options of pytest

VENV := .venv
BIN := $(VENV)/bin
REPORTS := .taugate/reports
STAMP := $(VENV)/.installed
PARITY := $(VENV)/.parity
CONTRACT := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/taugate/sglang-0.5.23
OK := 'import sys; sys.exit(sys.version_info < (3, 11))'
# The first Python that is new enough, python3 preferred; PYTHON=… on the command line decides otherwise.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c $(OK) 2>/dev/null && echo $$p && exit; done; echo python3)

.SHELLFLAGS := -ec
.PHONY: install gate test test-all numerics lint parity contract clean

install: $(STAMP)

# torch comes first and alone: its build for this machine is settled before anything else can ask for another one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c $(OK) 2>/dev/null || { echo "taugate needs Python 3.11 or newer: install it, or name one" \
		"with make PYTHON=/path/to/python3.11 ($(PYTHON) is $$($(PYTHON) --version 2>&1))" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "cannot create $(VENV): install the venv module of $(PYTHON) (Debian: apt-get install python3-venv)" >&2; \
		exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

gate: $(STAMP)
	$(BIN)/pytest -m gpu_window --junitxml=$(REPORTS)/gate.xml \
		$(if $(DRAFTER),--drafter='$(DRAFTER)') $(if $(PROMPTS),--set completions.limit=$(PROMPTS)) $(ARGS)

test: $(STAMP) $(PARITY)
	$(BIN)/pytest -n 2 --dist loadfile --junitxml=$(REPORTS)/test.xml
	$(BIN)/pytest -m gpu_window --profile embedded --junitxml=$(REPORTS)/gate.xml

test-all: $(STAMP) $(PARITY)
	$(BIN)/pytest -n 2 --dist loadfile -m "not gpu_window" --junitxml=$(REPORTS)/test.xml
	$(BIN)/pytest -m gpu_window --profile embedded --junitxml=$(REPORTS)/gate.xml

numerics: $(STAMP)
	$(BIN)/pytest tests_numerics -m "numerics and not slow and not gpu_window" --junitxml=$(REPORTS)/numerics.xml $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .

# The public DFlash implementation, to compare with. Its own pins contradict ours, so it is installed without them.
parity: $(PARITY)

$(PARITY): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0
	@touch $@

# The real server on a CPU, in an environment of its own outside this directory (2.7 GB). Most of its requirements
# are for GPUs, so it is installed without them.
contract: $(STAMP) $(CONTRACT)/.installed
	$(BIN)/python -m tools.contract $(ARGS)

$(CONTRACT)/.installed: tools/contract/requirements.txt tools/contract/model.py
	$(PYTHON) -m venv --clear $(CONTRACT)
	$(CONTRACT)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(CONTRACT)/bin/python -m pip install --quiet --disable-pip-version-check -r tools/contract/requirements.txt
	$(CONTRACT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	$(CONTRACT)/bin/python -m tools.contract.model $(CONTRACT)/model
	@touch $@

clean:
	rm -rf $(VENV) .taugate .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
