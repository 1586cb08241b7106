# Every target sets up what it needs: Python 3.11+ is all that a fresh clone asks for.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Without bytecode each program compiles its modules at each start, and pytest rewrites all tests in each run.
unexport PYTHONDONTWRITEBYTECODE

bin := .venv/bin
# Levels 0 and 1, which `make check` runs in two lots.
unit_tests := tests/unit tests/helm
simulation_tests := tests/properties tests/simulation
# Level 2, which `make test` runs in two lots: whole local services, and single programs.
service_tests := tests/integration/cli tests/examples
program_tests := tests/integration $(addprefix --ignore=,$(service_tests))
# Levels 3 and 4, which `make test-kubernetes` runs in three lots.
node_tests := tests/kubernetes/nodes
monitoring_tests := tests/kubernetes/monitoring tests/kubernetes/browser
control_plane_tests := tests/kubernetes $(addprefix --ignore=,$(node_tests) $(monitoring_tests))

.PHONY: help play test test-compiled test-kubernetes test-engines test-all check generate verify lock cli engine bench docs web clean \
	setup-kubernetes setup-engines check-format check-lint check-types check-contracts check-simulation check-unit-tests \
	test-services test-programs test-nodes test-control-planes test-monitoring

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

play: .venv/.play ## the whole loop on this machine, live; ARGS="--load bursty" passes options
	@$(bin)/fulcrum play $(ARGS)

test: check ## check, and the tests of local processes: no root, nothing installed outside this folder; 6 min
	@$(MAKE) --no-print-directory -j2 -O test-services test-programs
	@echo "LEFT OUT levels 3 and 4, a real Kubernetes: make test-kubernetes; level 5, real vLLM: make test-engines"

test-services: .venv/.dev
	@tools/test services $(service_tests) $(ARGS)

test-programs: .venv/.dev
	@tools/test programs $(program_tests) $(ARGS)

test-compiled: .venv/.dev ## the router's tests of local processes, compiled; the simulator's results, compiled; needs a C compiler; 6 min
	@PYTHONPATH=$$($(bin)/python -m tools.compiled.build) \
	    tools/test compiled -q tests/integration/router tests/integration/fuzz tests/compiled --fuzz-seconds=2 $(ARGS)

test-kubernetes: setup-kubernetes ## a real Kubernetes on this machine; root; prints first what it installs and builds; 15 min
	@$(MAKE) --no-print-directory -j2 test-nodes test-control-planes test-monitoring

# The longest lot, beside which the other two run one after the other: all of them mostly wait.
test-nodes: .venv/.dev
	@tools/test nodes $(node_tests) $(ARGS)

test-control-planes: .venv/.dev
	@tools/test control-planes $(control_plane_tests) $(ARGS)

test-monitoring: .venv/.dev
	@tools/test monitoring -q $(monitoring_tests) $(ARGS)

test-engines: setup-engines ## real vLLM on this machine's CPUs; prints first that it downloads 6 GB; 6 min
	@tools/test engines tests/engines $(ARGS)

test-all: ## all of the tests above, one after the other
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-compiled
	@$(MAKE) --no-print-directory test-engines
	@$(MAKE) --no-print-directory test-kubernetes

setup-kubernetes: .venv/.dev
	@tools/kubernetes/setup

setup-engines: .venv/.dev
	@tools/engine/setup

# Each on its own and two at a time, the longest first, so that `make -k check` shows all failures soon.
check: .venv/.dev ## the inner loop: format, lint, types, import contracts, generated files, fast tests
	@$(MAKE) --no-print-directory -j2 -O check-simulation check-format check-lint check-types check-contracts verify check-unit-tests

check-format: .venv/.dev
	$(bin)/ruff format --check --quiet .

check-lint: .venv/.dev
	$(bin)/ruff check --quiet .

check-types: .venv/.dev
	$(bin)/mypy

check-contracts: .venv/.dev
	$(bin)/lint-imports --cache-dir .cache/import-linter --no-logo

check-simulation: .venv/.dev
	@tools/test simulation -q $(simulation_tests)

check-unit-tests: .venv/.dev
	@tools/test unit -q $(unit_tests)

generate: .venv/.dev ## rewrite generated files: crds/, CRDs, dashboards and table of values in the chart, docs/reference/
	$(bin)/python -m fulcrum_core.api.crds crds
	$(bin)/python tools/generate_chart.py crds helm/fulcrum
	$(bin)/python -m tools.reference docs/reference
	$(bin)/python -m tools.dashboards helm/fulcrum/dashboards

verify: .venv/.dev ## fail if `make generate` would change a file, or the documentation has a warning or a dead link
	tools/verify

web: ## build the live page from web/ again, after a change there; needs Node.js and npm
	@cd web && npm ci --ignore-scripts --no-audit --no-fund && npm run build

docs: .venv/.dev ## the documentation as a site, in .cache/site
	$(bin)/zensical build --strict

lock: ## resolve requirements/*.lock again; ARGS=--upgrade takes newer versions
	tools/lock $(ARGS)

cli: .venv/.cli ## fulcrum and kubectl-fulcrum in .venv/bin, for clusters too

engine: ## real engines on this machine, once: vLLM, NIXL and LMCache for CPUs, and a tiny model (6 GB)
	@tools/engine/engine-env $(ARGS)

# A measurement that compiles needs mypyc.
bench: $(if $(findstring --compiled,$(ARGS))$(filter scheduling,$(NAME)),.venv/.dev,.venv/.play) ## list the measurements; NAME=one ARGS="…" runs one
	@tools/bench $(NAME) $(ARGS)

clean: ## remove caches and build leftovers; environments stay
	rm -rf .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find core cluster router autoscaler operator simulator cli tests tools bench -name __pycache__ \
	    -prune -exec rm -rf {} + 2>/dev/null || true

# A changed lock or a changed pyproject installs again; an unchanged one costs nothing.
.venv/.play: requirements/play.lock pyproject.toml tools/install
	@tools/install play
	@touch $@

.venv/.cli: requirements/image.lock .venv/.play
	@tools/install image
	@touch $@

.venv/.dev: requirements/dev.lock pyproject.toml tools/install
	@tools/install dev
	@touch .venv/.play .venv/.cli $@
