# Two commands do all the set-up: `make demo` runs the main job, `make test` passes the tests.
# On a fresh Debian or Ubuntu machine with Python 3.11 or newer nothing else is needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
KEEP_ENV := $(if $(SUDO),--preserve-env=CI,)
# the program that a package brings : the package
PACKAGES := nft:nftables openssl:openssl iptables-restore:iptables iptables-legacy-restore:iptables ip:iproute2 conntrack:conntrack curl:curl

# A second kernel, with IP_VS, and what its tests need.
UML_PACKAGES := linux.uml:user-mode-linux tcc:tcc modprobe:kmod setpriv:util-linux ipvsadm:ipvsadm ipset:ipset

# Programs of others that tests hold ours against.
WITNESS_PACKAGES := chromedriver:chromium-driver chromium:chromium kubectl:kubernetes-client dig:bind9-dnsutils netstat:net-tools jq:jq column:bsdextrautils node:nodejs npm:npm kdig:knot-dnsutils drill:ldnsutils promtool:prometheus groff:groff-base \
  $(shell uname -m)-linux-musl-gcc:musl-dev tcc:tcc

# The reference plugins and a container runtime, which the tests of our CNI plugins stand beside.
CNI_PACKAGES := /usr/lib/cni/bridge:containernetworking-plugins podman:podman runc:runc busybox:busybox-static

SPREAD := -n 5 --dist worksteal

# The page that runs the tracer in a browser, as files for any static host.
PLAYGROUND := playground/build/site/built.js
PLAYGROUND_PACKAGES := node:nodejs npm:npm

.PHONY: help setup system demo playground playground-tests test fuzz soak cnifaults howtos cluster cluster-programs lint unit kernel bench release-check docs man clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: system $(BIN)/.installed-tests  ## Install system packages and the virtual environment for development

system:
	@missing=""; \
	for pair in $(PACKAGES); do \
	  command -v "$${pair%%:*}" >/dev/null 2>&1 || [ -x "/usr/sbin/$${pair%%:*}" ] || missing="$$missing $${pair##*:}"; \
	done; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "narthex needs Python 3.11 or newer; set PYTHON=..."; exit 1; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -n "$$missing" ]; then \
	  echo "Installing system packages:$$missing"; \
	  $(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi

# What users install, and what developers need as well.
$(BIN)/.installed: EXTRA = all
$(BIN)/.installed-tests: EXTRA = test
$(BIN)/.installed $(BIN)/.installed-tests: pyproject.toml
	@echo "Installing Narthex into $(VENV)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$(EXTRA)]'
	@touch $@

demo: system $(BIN)/.installed  ## Run the main job: a Service on a network of two nodes, answered from pods
	@$(SUDO) $(BIN)/python scripts/demo.py

$(PLAYGROUND): $(shell find src/narthex playground -name build -prune -o -name __pycache__ -prune -o -type f -print) | setup
	$(BIN)/python playground/build.py --for-tests

playground: PACKAGES += $(PLAYGROUND_PACKAGES)
playground: setup $(PLAYGROUND)  ## Build the tracer as a static page, into playground/build/site

# The interpreter's stack is that of node. Tests with hostile nesting need a larger one.
playground-tests: PACKAGES += $(PLAYGROUND_PACKAGES)
playground-tests: setup $(PLAYGROUND)  ## Run unit tests of model, netfilter, and trace in WebAssembly
	$(BIN)/python playground/run_tests.py

# Many tests wait for the kernel, so there are more processes than processors. A process that has no tests left takes some of
# another's. The first run only compiles the modules that all of them import. The checks of style and types run beside the tests;
# their output follows that of the tests if they fail.
test: PACKAGES += $(UML_PACKAGES) $(CNI_PACKAGES) $(WITNESS_PACKAGES)
test: setup $(PLAYGROUND)  ## Pass all tests, the kernel's among them
	@$(SUDO) $(KEEP_ENV) $(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1 || true
	@$(MAKE) --no-print-directory lint > $(BIN)/.lint.log 2>&1 & lint=$$!; \
	$(SUDO) $(KEEP_ENV) $(BIN)/python scripts/run_tests.py $(SPREAD); tests=$$?; \
	wait $$lint && echo "make lint: passed" || { cat $(BIN)/.lint.log; echo "make lint: FAILED"; exit 1; }; exit $$tests

fuzz: SEED ?= $(shell $(PYTHON) -c 'import random; print(random.SystemRandom().randrange(10**9))')
fuzz: PACKAGES += $(UML_PACKAGES)
fuzz: setup  ## Run the randomized tests with new examples; SEED=N repeats a run
	@seed=$(SEED); echo "Seed $$seed. To repeat this run: make fuzz SEED=$$seed"; \
	$(SUDO) env NARTHEX_SEED=$$seed NARTHEX_SET_WALKS=1000 $(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-seed=$$seed && \
	$(SUDO) env NARTHEX_SEED=$$seed $(BIN)/python -m pytest -n 2 tests/netfilter/kernel/test_drawn_rules.py && \
	$(SUDO) env NARTHEX_SEED=$$seed NARTHEX_LAB_CASES=10 $(BIN)/python -m pytest -n 2 tests/trace/kernel/test_lab_law.py && \
	$(SUDO) env NARTHEX_SEED=$$seed NARTHEX_FAULTS=125 NARTHEX_CLASS_SCENARIOS=12 $(BIN)/python -m pytest -n 2 \
	  tests/trace/proof/test_planted_faults.py tests/trace/kernel/test_classes_kernel.py

soak: MINUTES ?= 60
soak: JSON ?= soak.json
soak: setup  ## Run both modes under load and faults for an hour; MINUTES=5 and JSON=FILE change that
	$(SUDO) $(BIN)/python -m tests.soak --minutes $(MINUTES) --json $(JSON) $(SOAK)

cnifaults: PACKAGES += $(CNI_PACKAGES)
cnifaults: setup  ## Make 1,000 racing CNI calls and kill plugins 200 times; `narthex cni gc` must find nothing then
	$(SUDO) env NARTHEX_TEST_CNI_CALLS=1000 NARTHEX_TEST_CNI_KILLS=200 $(BIN)/python -m pytest -q -n 0 \
	  tests/cni/kernel/test_cni_races.py tests/cni/kernel/test_cni_failpoints.py

howtos: setup  ## Run all how-tos as written, in labs; CONTROL_PLANE=DIR: with an official control plane, too
	$(SUDO) env NARTHEX_HOWTOS=1 $(if $(CONTROL_PLANE),NARTHEX_CONTROL_PLANE=$(CONTROL_PLANE)) $(BIN)/python -m pytest -q -n 0 tests/test_docs.py -k how_to

CLUSTER_PACKAGES := containerd:containerd runc:runc podman:podman debootstrap:debootstrap busybox:busybox-static kubectl:kubernetes-client unshare:util-linux

# Options beyond: CLUSTER='--rate 100 --operation drain', see `python -m tests.cluster --help`.
cluster: PACKAGES += $(CLUSTER_PACKAGES)
cluster: cluster-programs setup  ## Try deploy/ on three nodes with real kubelets; CONTROL_PLANE=DIR KUBELET=PATH, [CONTAINERD=DIR KUBE_PROXY=PATH E2E=PATH AGNHOST=PATH]
	@$(SUDO) env PYTHONPATH=. timeout 7200 $(BIN)/python -m tests.cluster --control-plane $(CONTROL_PLANE) --kubelet $(KUBELET) \
	  $(if $(CONTAINERD),--containerd $(CONTAINERD)) $(if $(KUBE_PROXY),--kube-proxy $(KUBE_PROXY)) \
	  $(if $(E2E),--e2e $(E2E)) $(if $(AGNHOST),--agnhost $(AGNHOST)) $(CLUSTER)

cluster-programs:
	@[ -n "$(CONTROL_PLANE)" ] && [ -n "$(KUBELET)" ] || { echo "give CONTROL_PLANE=DIR, with etcd and a control plane's programs, and KUBELET=PATH"; exit 2; }

lint: $(BIN)/.installed-tests  ## Check style, types, imports, and terms
	$(BIN)/ruff check src tests scripts benchmarks examples playground
	$(BIN)/ruff format --check --quiet src tests scripts benchmarks examples playground
	$(BIN)/mypy
	PYTHONPATH=src:. $(BIN)/lint-imports --no-cache > $(BIN)/.imports.log || { cat $(BIN)/.imports.log; exit 1; }
	$(BIN)/codespell --builtin clear --dictionary scripts/terms.txt --regex '[A-Za-z][a-z]+' src/narthex README.md ARCHITECTURE.md CONTRIBUTING.md

unit: TESTS ?= tests
unit: $(BIN)/.installed-tests  ## Run the tests that need no root; TESTS=tests/dns names a folder or file
	$(BIN)/python -m pytest -n 2 -m 'not kernel' $(TESTS)

kernel: PACKAGES += $(UML_PACKAGES) $(CNI_PACKAGES) $(WITNESS_PACKAGES)
kernel: setup $(PLAYGROUND)  ## Run the tests that need root
	$(SUDO) $(KEEP_ENV) $(BIN)/python -m pytest $(SPREAD) -m kernel

bench: PACKAGES += /usr/lib/cni/bridge:containernetworking-plugins dnsperf:dnsperf knotd:knot
bench: setup  ## Measure everything beside its floor, print ratios, save tables and pictures
	$(SUDO) $(BIN)/python benchmarks/run.py

release-check: $(BIN)/.installed-tests  ## Build wheel and sdist, install each into an empty environment, and check them
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[release]'
	PYTHONPATH=. $(BIN)/python scripts/release_check.py

# With the playground if `make playground` built it.
docs: $(BIN)/.installed-tests  ## Build the site from the documents, into build/site, in strict mode
	$(BIN)/python scripts/docs_site.py
	@echo "To read it: $(BIN)/python -m http.server --directory build/site --bind 127.0.0.1"

man: MAN ?= build/man
man: $(BIN)/.installed-tests  ## Write a manual page for each command, into build/man; MAN=DIRECTORY changes that
	$(BIN)/python scripts/man_pages.py $(MAN)

clean:  ## Remove what `setup` made in this folder
	rm -rf $(VENV) build playground/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
