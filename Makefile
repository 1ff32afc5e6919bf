# Every command installs what it needs into .venv, from pinned and hash-checked lists, and touches nothing outside
# this folder. `install` and `demo` need requirements/run.txt; tests and checks add requirements/dev.txt.

PYTHON ?= python3
BIN := .venv/bin
RUN_STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev
BENCH_STAMP := .venv-bench/.installed
PEERS_STAMP := .venv-peers/.installed
# Tests run in more processes than there are cores: they wait for sockets and timers as much as they compute.
JOBS ?= 6
# More for pytest, such as OPTIONS=--no-new-skips, or for bench, such as OPTIONS=--all-peers.
OPTIONS ?=

.PHONY: install demo test test-all check format bench chaos clean requirements help

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

$(RUN_STAMP): requirements/run.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ComfyFleet needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "Cannot make a virtual environment. Is the venv module installed (Debian: python3-venv)?" >&2; exit 1; }
	@$(BIN)/python requirements/install.py requirements/run.txt
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(RUN_STAMP)

$(DEV_STAMP): requirements/dev.txt $(RUN_STAMP)
	@$(BIN)/python requirements/install.py requirements/dev.txt
	@touch $(DEV_STAMP)

install: $(RUN_STAMP) ## what the product needs to run, into .venv; the other commands do it too
	@echo "ComfyFleet is installed: .venv/bin/comfyfleet --help" >&2

demo: $(RUN_STAMP) ## a hub with fake servers at work, then yours until Ctrl-C (ONCE=1 ends by itself)
	@$(BIN)/comfyfleet demo $(if $(ONCE),--once)

# The programs under test start hundreds of times: their modules are compiled once, not each time.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup

# Every seed is fixed, the order of Python's sets too: one commit gives one result.
test: $(DEV_STAMP) ## everything that must hold, but for the slowest; about five minutes
	@PYTHONHASHSEED=0 $(PYTEST) -m "not slow" $(OPTIONS)

# Only what `test` leaves out. Where OPTIONS names tests of which none is slow or random, there is none to run (5).
PROFILE ?= full
test-all: test ## the same, then the slowest, and the random ones with new and more examples
	@$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=$(PROFILE) $(OPTIONS) || [ $$? -eq 5 ]

check: $(DEV_STAMP) ## format, lint, strict types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/tidy

format: $(DEV_STAMP) ## put the code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The peers of the benchmarks are installed apart, so that they never meet the product. Without node there is no BullMQ.
# Not `npm ci`: it refuses a lock file that does not name the optional parts of other platforms.
$(BENCH_STAMP): requirements/bench.txt bench/peers/bullmq/package-lock.json
	@echo "installing the peers into .venv-bench (once) …"
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements/bench.txt
	@if command -v npm >/dev/null; then cd bench/peers/bullmq && npm install --no-save --ignore-scripts --no-audit --no-fund --silent; \
		else echo "npm was not found: goals 3 and 7 are measured beside BullMQ and need it" >&2; fi
	@touch $(BENCH_STAMP)

# Once more apart: some of these ask for an older Redis client. Those that cannot be installed are told by the run.
$(PEERS_STAMP): requirements/peers.txt
	@echo "installing the further peers into .venv-peers (once) …"
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements/peers.txt \
		&& touch $(PEERS_STAMP) || echo "the further peers could not be installed, see above; the run says which are missing" >&2

bench: $(DEV_STAMP) $(BENCH_STAMP) $(if $(findstring --all-peers,$(OPTIONS)),$(PEERS_STAMP)) ## measure, and write bench/results.json
	$(BIN)/python -m bench $(OPTIONS)

chaos: $(DEV_STAMP) ## kill everything at random, for more than an hour, and write chaos/results.json
	$(BIN)/python -m chaos

requirements: ## pin anew (needs uv)
	uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header --extra all pyproject.toml requirements/dev.in -o requirements/dev.txt
	uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header --extra all --constraint requirements/dev.txt pyproject.toml requirements/run.in -o requirements/run.txt
	uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header requirements/bench.in -o requirements/bench.txt
	uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header requirements/peers.in -o requirements/peers.txt

clean: ## remove what was installed and cached
	rm -rf .venv .venv-bench .venv-peers bench/peers/bullmq/node_modules .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
