# Every target sets itself up: it needs python3 (3.11 or newer), make and PyPI, nothing else.
# The environment in .venv is made again when pyproject.toml or the Python version changes, and left alone otherwise.

PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# Stamps are named after what the environment was made from, so that a mere checkout (a new time stamp) reinstalls nothing.
STATE := $(shell { cat pyproject.toml; $(PYTHON) --version; pwd; } 2>&1 | sha256sum | cut -c1-16)
BASE := $(VENV)/.base-$(STATE)
DEV := $(VENV)/.dev-$(STATE)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --no-input

PROTOS := $(sort $(wildcard proto/kvtierd/v1/*.proto))
PROTOC := $(BIN)/python -m grpc_tools.protoc -I proto
BASELINE := proto/baseline.binpb

# Tests wait for daemons more than they compute: a few at a time finish sooner even on one core.
JOBS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
DISTRIBUTION = worksteal
SIDE_BY_SIDE = --numprocesses $(JOBS) --dist $(DISTRIBUTION)
PYTEST := $(BIN)/python -m pytest
TIMING := tests/daemon/test_tenant_timing.py
# Engines are tested in environments of their own: they decide on torch, protobuf and much else.
VLLM_VERSION ?= 0.32.0
VLLM_OLDEST := 0.23.0
VLLM_VENV := .venv-vllm
VLLM_OLDEST_VENV := .venv-vllm-oldest
SGLANG_VERSION ?= 0.5.23
SGLANG_VENV := .venv-sglang
LOWEST_VENV := .venv-lowest
# Images are looked after in an environment of its own too, and tried with the Python that they have.
TOOLS := .venv-tools
TOOLS_STAMP := $(TOOLS)/.$(shell sha256sum deploy/docker/locks/tools.txt 2>/dev/null | cut -c1-16)
VARIANT ?= cpu
IMAGE_PYTHON ?=
# 2,000 seeds take about four minutes on two free cores.
SEEDS ?= 2000
FIRST ?= 0
SIMULATE_ARGS ?=
MINUTES ?= 10
FUZZ_ARGS ?=
# 300 kills take about fifteen minutes.
KILLS ?= 300
CAMPAIGN_ARGS ?=
SOAK_MINUTES ?= 30
OVERLOAD_ARGS ?=
LOAD_FAULTS ?= 20:kill:1 32:stop:2 44:client 54:disk-full:5 66:disk-errors:5
LOAD_ARGS ?= --tenants 4 --system-prompts 2 --contexts 100
DEMO_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=

.PHONY: help venv demo demo-vllm test fuzz simulate campaign soak overload load test-slow test-helm test-lowest test-prometheus test-sglang test-vllm test-vllm-oldest lock container-check audit lint format proto proto-check proto-baseline docs chart bench bench-peers build clean

help: ## show this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)$$/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

$(BASE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "kvtierd needs Python 3.11 or newer as $(PYTHON); name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "== making $(VENV)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -e '.[plot]'
	@touch $@

$(DEV): $(BASE)
	@echo "== adding the development tools to $(VENV)"
	@$(PIP) install -e '.[dev,plot]'
	@touch $@

venv: $(DEV) ## make .venv with the package and the development tools

demo: $(BASE) ## see the daemon at work: kvtierd demo
	$(BIN)/kvtierd demo $(DEMO_ARGS)

demo-vllm: $(BASE) ## see a chat through a real vLLM, without and with kvtierd, and a restart half-way
	@bash tests/vllm/install.sh $(VLLM_VENV) $(VLLM_VERSION) $(PYTHON)
	$(BIN)/python -m loadtest.vllm.demo --python $(VLLM_VENV)/bin/python $(DEMO_ARGS)

test: $(DEV) ## run the quick tests
	$(PYTEST) -m "not slow and not gpu" $(SIDE_BY_SIDE) $(TEST_ARGS)

test-lowest: $(DEV) ## run a part of the tests with the lowest versions of packages that the bounds allow
	@rm -rf $(LOWEST_VENV)
	@$(PYTHON) -m venv $(LOWEST_VENV)
	@$(BIN)/python -m tests.packaging.lowest > $(LOWEST_VENV)/requirements.txt
	@$(LOWEST_VENV)/bin/python -m pip --disable-pip-version-check --quiet --no-input install -r $(LOWEST_VENV)/requirements.txt
	$(LOWEST_VENV)/bin/python -m pytest -m "not slow and not gpu" tests/cli tests/client tests/service tests/tiers $(SIDE_BY_SIDE) $(TEST_ARGS)

# A bug that the simulation is to find is looked for on one core. What compares times runs alone. TEST_ARGS may choose nothing of one (5).
test-slow: JOBS = 2
test-slow: $(DEV) ## run the slow tests, those of Helm and Prometheus apart
	$(PYTEST) -m "slow and not gpu" --ignore=tests/helm --ignore=tests/observability --ignore=$(TIMING) $(SIDE_BY_SIDE) $(TEST_ARGS) || [ $$? -eq 5 ]
	$(PYTEST) $(TIMING) $(TEST_ARGS) || [ $$? -eq 5 ]

test-helm: $(DEV) ## render the Helm chart and check the manifests
	$(PYTEST) tests/helm $(TEST_ARGS)

test-prometheus: $(DEV) ## check metrics, rules and dashboard with Debian's prometheus
	@bash tests/observability/install.sh .prometheus
	$(PYTEST) tests/observability $(TEST_ARGS)

# An engine takes more than one core and a few GiB of memory. Tests of one file share engines.
test-vllm test-vllm-oldest: JOBS = 2
test-vllm test-vllm-oldest: DISTRIBUTION = loadfile

test-vllm: ## run the connector inside real vLLM engines on CPU, in an environment of their own
	@bash tests/vllm/install.sh $(VLLM_VENV) $(VLLM_VERSION) $(PYTHON)
	$(VLLM_VENV)/bin/python -m pytest -m "not gpu" tests/vllm tests/connectors $(SIDE_BY_SIDE) $(TEST_ARGS)

test-vllm-oldest: ## the same with the oldest vLLM that is supported
	@bash tests/vllm/install.sh $(VLLM_OLDEST_VENV) $(VLLM_OLDEST) $(PYTHON)
	$(VLLM_OLDEST_VENV)/bin/python -m pytest -m "not gpu" tests/vllm tests/connectors $(SIDE_BY_SIDE) $(TEST_ARGS)

test-sglang: ## run the storage backend under SGLang's own cache on CPU memory, in an environment of its own
	@bash tests/hicache/install.sh $(SGLANG_VENV) $(SGLANG_VERSION) $(PYTHON)
	$(SGLANG_VENV)/bin/python -m pytest tests/hicache $(TEST_ARGS)

fuzz: $(DEV) ## fuzz all that reads bytes from outside for MINUTES (with Atheris where there is a wheel of it)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) install -e '.[dev,plot,fuzz]' || \
	    echo "there is no Atheris for this machine: Hypothesis changes the corpus instead"
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ_ARGS)

simulate: $(DEV) ## simulate SEEDS runs of a whole daemon with faults and crashes (or tell one: SEED=k)
	$(BIN)/python -m kvtierd.testing.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST)) $(SIMULATE_ARGS)

campaign: $(DEV) ## kill a real daemon KILLS times over a disk that fails (docs/faults.md; SEED=k)
	$(BIN)/python -m kvtierd.testing.faults --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(CAMPAIGN_ARGS)

soak: $(DEV) ## work for SOAK_MINUTES and look whether anything grows (docs/faults.md)
	$(BIN)/python -m kvtierd.testing.soak --minutes $(SOAK_MINUTES)

overload: $(DEV) ## offer a daemon more than it can take from 200 sessions (docs/faults.md)
	$(BIN)/python loadtest/overload.py $(OVERLOAD_ARGS)

load: $(BASE) ## work as many engines for 80 s, with faults; a report with charts in loadtest/out/engines
	$(BIN)/python -m loadtest.engines --faults "$(LOAD_FAULTS)" $(LOAD_ARGS)

lint: $(DEV) ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(DEV) ## regenerate kvtierd/v1 from proto/
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

proto-check: $(DEV) ## check that kvtierd/v1 is what proto/ makes, lint proto/, and refuse breaking changes
	@tmp=$$(mktemp -d); trap 'rm -rf "$$tmp"' EXIT; \
	$(PROTOC) --python_out="$$tmp" --pyi_out="$$tmp" --grpc_python_out="$$tmp" $(PROTOS); \
	diff -rq --exclude=__init__.py --exclude=__pycache__ "$$tmp/kvtierd/v1" kvtierd/v1 || \
	    { echo "kvtierd/v1 differs from what proto/ makes: run make proto" >&2; exit 1; }
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(BASELINE)

proto-baseline: $(DEV) ## record proto/ as the released protocol that later changes must not break
	$(BIN)/buf build --exclude-source-info -o $(BASELINE)

docs: $(DEV) ## make the reference pages from the code again
	$(BIN)/python -m kvtierd.service.metrics_reference > docs/metrics.md.new
	mv docs/metrics.md.new docs/metrics.md
	$(BIN)/python -m kvtierd.service.config_reference > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md

chart: ## copy rules and dashboard into the Helm chart again
	cp deploy/prometheus/rules.yaml helm/kvtierd/files/rules.yaml
	cp deploy/grafana/kvtierd.json helm/kvtierd/files/dashboard.json

bench: $(BASE) ## measure this machine: kvtierd bench
	$(BIN)/kvtierd bench $(BENCH_ARGS)

bench-peers: $(BASE) ## measure other KV cache stores in the same way
	bash loadtest/peers/run.sh

build: $(DEV) ## build and check the source distribution and the wheel
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

$(TOOLS_STAMP):
	@rm -rf $(TOOLS)
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip --disable-pip-version-check --quiet --no-input install -r deploy/docker/locks/tools.txt
	@touch $@

lock: $(TOOLS_STAMP) ## resolve the Python packages of the container images again, for deploy/docker/locks
	bash deploy/docker/lock.sh $(TOOLS)/bin/uv

container-check: $(TOOLS_STAMP) ## lint the Dockerfile and do its steps without Docker (VARIANT=cpu, cuda12 or cuda13)
	bash deploy/docker/check.sh $(TOOLS)/bin/hadolint $(VARIANT) $(IMAGE_PYTHON)

audit: $(TOOLS_STAMP) ## ask PyPI for known vulnerabilities of the packages in the images
	for lock in cpu cuda12 cuda13 build; do \
	    $(TOOLS)/bin/pip-audit --strict --require-hashes --disable-pip -r deploy/docker/locks/$$lock.txt; done

clean: ## remove what make has made
	rm -rf $(VENV) $(LOWEST_VENV) $(VLLM_VENV) $(VLLM_OLDEST_VENV) $(SGLANG_VENV) $(TOOLS) .prometheus build dist out .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find kvtierd tests loadtest -name __pycache__ -type d -prune -exec rm -rf {} +
