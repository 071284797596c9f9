# dsec: everything a person or CI runs. `make help` lists the targets.
SHELL := /bin/bash
GO ?= go
PYTHON ?= python3
VENV := .venv
BIN := bin
export CGO_ENABLED ?= 0
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
LDFLAGS := -s -w -X main.version=$(VERSION)

# Their own tree may belong to somebody else (sudo, a mounted directory), and git then refuses to tell go its state.
export GOFLAGS := $(GOFLAGS) -buildvcs=false
# Tiers share one machine: at once they would disturb each other's figures and find each other's mounts.
.NOTPARALLEL:

.PHONY: help
help: ## this list
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The collector that is Go 1.26's new default costs a heap of a few hundred KiB 70 KiB more. Later versions may have no choice.
AETHER_ENV := $(if $(filter go1.26%,$(shell $(GO) env GOVERSION)),GOEXPERIMENT=nogreenteagc)

# ---- building -------------------------------------------------------------------------------------------------------

.PHONY: build deps deps-test venv generate
build: deps ## dsec, aether and stage into bin/
	@mkdir -p $(BIN)
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/dsec ./cmd/dsec
	$(AETHER_ENV) $(GO) build -trimpath -ldflags '-s -w' -o $(BIN)/aether ./cmd/aether
	$(MAKE) --no-print-directory $(BIN)/stage

$(BIN)/stage: internal/edge/driver/container/stage/stage.c
	@mkdir -p $(BIN)
	musl-gcc -static -Os -std=gnu11 -Wall -Wextra -Werror -idirafter /usr/include -idirafter /usr/include/x86_64-linux-gnu -o $@ $<

deps: ## install what running and building need (Debian packages; needs root only if something is missing)
	@scripts/deps.sh run
deps-test: deps ## install what the tests need as well
	@scripts/deps.sh test
venv: deps-test
	@scripts/venv.sh $(VENV)
generate: ## regenerate committed code: contracts, sync client, package lists
	api/generate.sh
	internal/edge/network/bpf/generate.sh
	$(PYTHON) sdk/python/scripts/unasync.py

.PHONY: dist
dist: venv ## wheel and sdist of libdsec into dist/
	$(VENV)/bin/python -m build --no-isolation --outdir dist sdk/python

# ---- the platform on this machine ------------------------------------------------------------------------------------

.PHONY: quickstart stop
N ?= 50
quickstart: build ## build, start a local platform, run the demo (N=50 sandboxes in its burst)
	@N=$(N) scripts/quickstart.sh
stop: ## end the local platform and remove all that it made
	@scripts/stop.sh

# ---- checks ----------------------------------------------------------------------------------------------------------

.PHONY: lint test test-unit test-root lab test-e2e test-long bench fuzz
lint: venv ## formatting, vet, types, drift of generated code
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -d $$(git ls-files '*.go') | head -50; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags rootful ./...
	scripts/check-drift.sh
	cd sdk/python && ../../$(VENV)/bin/ruff check . && ../../$(VENV)/bin/ruff format --check . && ../../$(VENV)/bin/mypy
	$(VENV)/bin/ruff check --config test/ruff.toml examples test && $(VENV)/bin/ruff format --config test/ruff.toml --check examples test
	for part in examples test/conftest.py test/e2e test/hostile; do $(VENV)/bin/mypy --config-file test/mypy.ini $$part || exit 1; done

test: lint test-unit test-root test-e2e ## every tier

# Above the budgets, as Go's -timeout is, for slower machines: what passes this hangs. An interrupt, so that platforms end in
# order and pytest says where it was.
bound = timeout --foreground --signal=INT --kill-after=3m $(1)

# The unit tier runs without any capability, so that a test which needs one shows.
test-unit: build venv ## no privileges, with the race detector; 4 min
	CGO_ENABLED=1 $(GO) run ./test/gotest -race -timeout 20m -exec '$(CURDIR)/scripts/unprivileged.sh' ./...
	cd sdk/python && PYTHONPATH=../../test $(call bound,20m) ../../$(VENV)/bin/python -m pytest -q -p no_skips

test-root: build deps-test ## needs root and this kernel; 8 min
	$(GO) run ./test/gotest -tags rootful -p 1 -timeout 20m -run "$$(scripts/root-tests.sh names)" $$(scripts/root-tests.sh packages)

KERNEL ?= 6.1
lab: deps-test ## the root tier on Debian's kernel under QEMU, with cgroup v2; KERNEL=6.12 for the newer one; 8 min
	@scripts/deps.sh lab
	$(GO) run ./test/lab -kernel $(KERNEL)

test-e2e: build venv ## through the SDK and real daemons; 8 min
	DSEC_BIN=$(CURDIR)/$(BIN) $(call bound,45m) $(VENV)/bin/python -m pytest -q test/e2e test/hostile -m "not long"

test-long: build venv ## what does not fit the budgets: soak, churn, all kill points, fuzzing
	DSEC_BIN=$(CURDIR)/$(BIN) $(call bound,2h) $(VENV)/bin/python -m pytest -q test/e2e test/hostile
	$(MAKE) fuzz

FUZZTIME ?= 60s
fuzz: ## every fuzz target for FUZZTIME
	scripts/fuzz.sh $(FUZZTIME)

B ?= all
bench: build venv ## figures against the alternatives, same run; B=name for one
	DSEC_BIN=$(CURDIR)/$(BIN) $(GO) run ./test/bench -run $(B)
