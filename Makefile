# Everything here works from an empty clone: what a target needs, it sets up first.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint bench soak chaos sanitize wheels clean packages

# Name another Python with `make test PYTHON=python3.13`; each one named gets an environment of its own.
VENV ?= .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CORE := emqtimerd/devnode/jobcore
SANITIZE := build/sanitize
# More arguments for pytest: `make test ARGS='-k devnode'`.
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) $(CORE).so ## watch jobs move: a node, a restart in the middle, sweeps, a summary
	@$(BIN)/emqtimerd demo

# Four processes also on two cores: half of a test's time is waiting for servers. More gain nothing.
test: packages $(READY) $(CORE).so ## run the tests, four at a time
	@$(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)

lint: $(READY) ## check style, types, and the C code with warnings as errors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(CC) -std=c11 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -Werror -c -o /dev/null $(CORE).c

bench: $(READY) $(CORE).so ## measure job core, daemon and scrapes beside their baselines (takes minutes)
	$(BIN)/python bench/drain.py
	$(BIN)/python bench/daemon.py idle
	$(BIN)/python bench/daemon.py idle --queues 10
	$(BIN)/python bench/daemon.py lateness
	$(BIN)/python bench/daemon.py drain
	$(BIN)/python bench/scrape.py

# A seed repeats the schedule of faults: `make chaos SEED=7 SECONDS=600`. SERVERS is alone, sentinel
# or cluster; ONLY names kinds of faults (docs/chaos.md).
SEED ?=
JOBS ?= 200000
SECONDS ?= 180
SERVERS ?= alone
ONLY ?=
soak: $(READY) $(CORE).so ## an hour's work in a minute: 200,000 jobs, three server kills, and every number adds up
	@$(BIN)/python -m chaos soak --jobs $(JOBS) $(SEED:%=--seed %)

chaos: $(READY) $(CORE).so ## two daemons at work while a random hand breaks servers, networks, clocks and daemons
	@$(BIN)/python -m chaos storm --seconds $(SECONDS) --servers $(SERVERS) $(SEED:%=--seed %) $(if $(ONLY),--only $(ONLY))

# The runtime is not linked into the server, so it is preloaded, for the servers alone.
sanitize: packages $(READY) $(SANITIZE)/jobcore.so $(SANITIZE)/dlopen.so ## run the tests with the job core under AddressSanitizer and UBSan
	@rm -rf $(SANITIZE)/reports && mkdir -p $(SANITIZE)/reports
	@EMQ_JOBCORE='$(abspath $(SANITIZE)/jobcore.so)' \
	EMQ_SERVER_WRAPPER="env \
	    LD_PRELOAD='$(abspath $(SANITIZE)/dlopen.so):$(shell $(CC) -print-file-name=libasan.so)' \
	    ASAN_OPTIONS='verify_asan_link_order=0:log_path=$(abspath $(SANITIZE)/reports/report)' \
	    UBSAN_OPTIONS='print_stacktrace=1'" \
	$(BIN)/python -m pytest -n 4 $(ARGS); status=$$?; \
	if ls $(SANITIZE)/reports/* >/dev/null 2>&1; then cat $(SANITIZE)/reports/*; exit 1; fi; \
	exit $$status

wheels: $(READY) ## make the packages of a release, in dist/: source, x86_64, aarch64 (tried under QEMU)
	@.ci/wheels $(BIN)/python

clean: ## remove all that the other targets made, environments included
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis $(CORE).so
	find emqtimerd tests bench chaos -name __pycache__ -prune -exec rm -rf {} +

# What judges the conformance suite, the page, the alerts, the units and the completion. Does nothing
# where it is installed or cannot be.
packages:
	@.ci/packages redis-server chromium prometheus systemd zsh fish

$(READY): pyproject.toml setup.py
	@for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Setting up $(VENV) with $$("$$python" --version)"; \
	        "$$python" -m venv $(VENV) && exit; exit 1; \
	    fi; \
	done; \
	echo "emqtimerd needs Python 3.11 or newer; found: $$($(or $(PYTHON),python3) --version 2>&1)." >&2; \
	echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1
	@$(BIN)/python -m pip install --quiet --editable '.[embedded,dev]'
	@touch $@

$(CORE).so: $(CORE).c setup.py | $(READY)
	@$(BIN)/python setup.py --quiet build_jobcore --inplace
	@test -f $@

$(SANITIZE)/jobcore.so: $(CORE).c
	@mkdir -p $(SANITIZE)
	@$(CC) -std=c11 -O1 -g -fPIC -shared -fvisibility=hidden -fno-omit-frame-pointer \
	    -fsanitize=address,undefined -fno-sanitize-recover=undefined -o $@ $<

$(SANITIZE)/dlopen.so: tests/dlopen.c
	@mkdir -p $(SANITIZE)
	@$(CC) -std=c11 -O1 -Wall -Wextra -Werror -fPIC -shared -o $@ $<
