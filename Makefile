# make serve   sets up .venv from nothing and serves a model on http://127.0.0.1:8000
# make shell   opens a shell that finds vlm-serve, which lies in .venv/bin
# make deploy  sets up .venv and serves the model with two replicas, and with a store that they share
#              if there is a redis-server
# make test    sets up .venv with the development dependencies, says how long the quick tests will take, runs them on up
#              to four cores, and lists the fifty slowest
# make test-all         runs every test, those that pyproject.toml's markers name included: other processors, Ray,
#                       long random traffic, further cases of tables, and the page in Debian's chromium
# make test-slow        runs those that make test leaves out; ARGS="--part 2/3" one of three parts of them, and
#                       ARGS="--slow-minutes 20" skips what has not begun by then, and names it
# make landing          raises the number that chooses the part which CI runs; it belongs to the last commit of a landing
# make check-kernels    compiles the Triton kernels that have changed for six kinds of GPU, with two versions of Triton,
#                       and checks their machine code; ARGS="--all" all of them, ARGS="--write" keeps the results
# make lint    ruff, clang-format and mypy, as CI runs them
# make test-sanitized   runs the tests of the compiled kernels with a library that checks its memory
#                       accesses and arithmetic (GCC; the first start compiles for a minute)
# make test-resolution  resolves everything that make installs, for every supported Python, on x86-64 and aarch64, as a
#                       machine without any configuration of its own does (needs the public index of packages)
# make test-install     installs that way with make serve, in a fresh folder, and asks about a picture (up to 5 GB);
#                       ARGS=--here asks the server of this checkout instead
# make test-lmms   has lmms-eval ask a server and a pipeline about pictures and videos, with and without
#                  caching (300 MB of packages, once; some minutes)
# make test-clients  has Codex CLI and the AI SDK from npm (400 MB, once) go through turns with tools, see
#                    examples/clients; ARGS="openai litellm" adds others of examples/clients/clients.toml,
#                    ARGS="--turn 7" a few small ones, others with each number
# make test-graphs   has every family of models answer with captured steps, on a stand-in for a GPU
# make test-isa   compares what the compiled kernels compute on x86-64-v3, x86-64-v4, znver4, with
#                 emulated tile registers, and on aarch64 (with Debian's g++-aarch64-linux-gnu and
#                 qemu-user), then runs their tests for the processor here and for x86-64-v3;
#                 ARGS="--tests x86-64-v3" only for the latter
# make wheels    builds the source distribution and wheels with compiled kernels, for x86-64 and aarch64, into dist (with
#                Debian's g++-aarch64-linux-gnu; ARGS="--machines x86_64" only the former). It compiles nine libraries,
#                which are kept in build/kernels
# make release-check   builds them, has twine check them, installs this machine's into an empty environment of each Python
#                      from 3.11 to 3.14 that is here, and asks the demo about a picture, with no compiler on the path
# make chaos     starts servers, breaks what is around them and asks meanwhile, for ten minutes (docs/chaos.md);
#                ARGS="--seed 7 --minutes 2" chooses what is broken, and how long
# make native-digest    prints the digest of the compiled kernels' arithmetic, for kernels/native_self_test.py
#
# make image-steps   goes through the Dockerfile without a container, in a root folder made by Debian's debootstrap, and
#                    asks the server there (as root; a few minutes, 6 GB of disk)
# make docs          builds docs/ and the reference of Python as a site with a search, into build/site
# make plots         draws the figures of docs/performance.md anew from benchmarks/results
# make screenshots   takes pictures of every view of the page, with Debian's chromium, into docs/screenshots
#
# PYTHON, MODEL, HOST, PORT and ARGS may be given: make serve MODEL=Qwen/Qwen3.5-4B ARGS="--block-size 64"
# TORCH_INDEX names the index that torch is installed from, once; TORCH_INDEX= takes it from pip's default index.
# If it is not given, that is CPU_INDEX where there is no NVIDIA driver and the index answers within seconds.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

LMMS := $(VENV)/lmms
DOCS := $(VENV)/docs
# That of torch 2.11, the oldest that is supported. It goes into a folder of its own, beside the pinned one.
OLD_TRITON := $(VENV)/triton-3.6.0

CPU_INDEX ?= https://download.pytorch.org/whl/cpu
ifeq ($(origin TORCH_INDEX),undefined)
CHOOSE_INDEX = index=$$($(BIN)/python release/torch_index.py "$(CPU_INDEX)")
OTHERWISE = || echo "vlm-serve: that did not work, so torch comes from pip's default index." >&2
else
CHOOSE_INDEX = index="$(TORCH_INDEX)"
endif

# Of an index that is out of reach pip says in the end that versions contradict each other.
UNREACHED = || { echo "vlm-serve: that did not work: most likely no index of packages is within reach of pip, see above." >&2; exit 1; }

MODEL ?= demo
CPP = $(shell find kernels/native vlm_serve/models/native tests/native -name '*.cpp' -o -name '*.h')

.PHONY: serve shell deploy test test-slow test-all landing check-kernels test-sanitized test-resolution test-install test-graphs test-lmms test-clients test-isa chaos native-digest wheels release-check image-steps docs plots screenshots lint format clean

serve: $(VENV)/installed
	@echo "The command is $(BIN)/vlm-serve; make shell opens a shell that finds it."
	exec $(BIN)/vlm-serve serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

shell: $(VENV)/installed
	@echo "This shell finds vlm-serve; exit leaves it."
	@VIRTUAL_ENV="$(CURDIR)/$(VENV)" PATH="$(CURDIR)/$(BIN):$$PATH" exec "$${SHELL:-/bin/sh}" $(ARGS)

# A store for these replicas alone, on a port of its own; it ends when they do, however that is.
REPLICAS ?= 2
STORE_PORT ?= 6390
deploy: $(VENV)/installed-ray
	if command -v redis-server >/dev/null; then \
		redis-server --port $(STORE_PORT) --bind 127.0.0.1 --save "" --maxmemory 256mb \
			--maxmemory-policy allkeys-lru --loglevel warning & \
		{ tail --pid=$$$$ -f /dev/null; kill $$!; } & \
		store="--shared-store redis://127.0.0.1:$(STORE_PORT)/0"; \
	fi; \
	exec $(BIN)/vlm-serve deploy $(MODEL) --replicas $(REPLICAS) --host $(HOST) --port $(PORT) $$store $(ARGS)

# The markers of pyproject.toml, each of which says what may carry it.
SLOW := browser or fuzz or interpreter or memory or processes or processors or ray or sweep
PYTEST = $(BIN)/python tests/compiled_code.py && $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 100 --durations=50

test: $(VENV)/installed-dev
	$(PYTEST) -m "not ($(SLOW))" $(ARGS)

test-slow: $(VENV)/installed-dev $(OLD_TRITON)/installed
	$(PYTEST) -m "$(SLOW)" $(ARGS)

test-all: $(VENV)/installed-dev $(OLD_TRITON)/installed
	$(PYTEST) $(ARGS)

landing:
	@echo $$(($$(cat .ci/landing) + 1)) > .ci/landing
	@.ci/part > /dev/null

check-kernels: $(VENV)/installed-dev $(OLD_TRITON)/installed
	$(BIN)/python benchmarks/aot.py --check $(ARGS)

# Python is not built with the sanitizers, so their libraries are loaded before it; what it and torch
# never free is no news. The first error ends the process: no test that has memory run out, none of
# glibc's own allocator, and pytest leaves stderr alone.
test-sanitized: $(VENV)/installed-dev
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 VLM_SERVE_NATIVE_SANITIZE=1 \
	$(BIN)/python -m pytest -n 0 --capture=sys tests/kernels tests/models/test_compiled_*.py \
	-k "not triton and not aot and not host_memory and not too_little_memory and not no_time" $(ARGS)

test-graphs: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n auto --maxprocesses 4 tests/engine/check_graph_families.py $(ARGS)

test-resolution: $(VENV)/installed-dev
	$(BIN)/python tests/resolution.py $(ARGS)

test-install: $(VENV)/installed-dev
	$(BIN)/python tests/install.py $(ARGS)

test-lmms: $(LMMS)/installed
	PYTHONPATH="$(CURDIR)/$(LMMS)" $(BIN)/python -m pytest -n 0 tests/server/lmms/check_lmms_eval.py $(ARGS)

# What npm fetches is kept beside the environment. Without node, or a registry, it says so and skips.
test-clients: $(VENV)/installed-dev
	$(BIN)/python examples/clients/run.py --strict --cache $(VENV)/clients codex ai-sdk-openai $(ARGS)

test-isa: $(VENV)/installed-dev
	$(BIN)/python tests/native/isa.py $(ARGS)

chaos: $(VENV)/installed-dev
	@$(BIN)/python benchmarks/chaos.py $(ARGS)

native-digest: $(VENV)/installed
	$(BIN)/python -m vlm_serve.kernels.native_self_test

wheels: $(VENV)/installed
	$(BIN)/python release/wheels.py $(ARGS)

release-check: $(VENV)/installed-dev
	PYTHONPATH="$(CURDIR)/tests" $(BIN)/python release/check.py $(ARGS)

image-steps:
	$(PYTHON) tests/image_steps.py $(ARGS)

# -E reads everything anew: pages of the reference depend on code that Sphinx does not watch.
docs: $(DOCS)/installed
	@PYTHONPATH="$(CURDIR)/$(DOCS)" $(BIN)/python -m sphinx -q -E -W --keep-going -c docs/site . build/site $(ARGS)
	@echo "The site is build/site/index.html."

plots:
	$(PYTHON) benchmarks/plots.py

screenshots: $(VENV)/installed-dev
	$(BIN)/python tests/page_screenshots.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy --strict

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) $(VENV).lock build dist *.egg-info

$(LMMS)/installed: tests/server/lmms/requirements.txt
$(DOCS)/installed: docs/site/requirements.txt

# Who installs while another make does waits for it, where there is flock, and finds it done.
ifndef LOCKED
$(VENV)/installed $(VENV)/installed-ray $(VENV)/installed-dev $(OLD_TRITON)/installed $(LMMS)/installed $(DOCS)/installed: pyproject.toml constraints.txt $(wildcard setup.py)
	@$(if $(shell command -v flock),flock $(VENV).lock) $(MAKE) --no-print-directory LOCKED=1 $@
else

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vlm-serve needs Python 3.11 or newer; say make PYTHON=...")'
	@echo "Creating $(VENV)."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# setuptools comes first, so that the build runs with the pinned one and needs no environment of its own. From an index of
# its own comes torch alone: were pip to look there for everything, it could take any other package from there too.
$(VENV)/installed: $(VENV)/created pyproject.toml constraints.txt $(wildcard setup.py)
	@echo "Installing what vlm-serve needs into $(VENV), torch among it (0.5 GB, with CUDA 2.8 GB): a few minutes, once."
	@$(PIP) install --quiet --constraint constraints.txt setuptools $(UNREACHED)
	@$(CHOOSE_INDEX); if [ -n "$$index" ]; then \
		$(PIP) install --progress-bar on --constraint constraints.txt --no-deps --index-url "$$index" torch $(OTHERWISE); \
	fi
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[store]'
	@touch $@

$(VENV)/installed-ray: $(VENV)/installed
	@echo "Installing Ray Serve and a client for a store as well: a minute, once."
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[ray,store]'
	@touch $@

# torchvision is an oracle of the preprocessing tests. It names a CUDA build of torch as its dependency,
# so it is installed without dependencies, beside whichever build of torch is there. AutoGPTQ and AutoAWQ
# are oracles of packed weights: of theirs, only modules of plain torch are imported. They are no longer
# maintained; where one cannot be installed its tests are skipped.
$(VENV)/installed-dev: $(VENV)/installed
	@echo "Installing what its tests need as well: a few minutes, once."
	@$(PIP) install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@$(PIP) install --quiet --no-deps torchvision==0.28.0
	-BUILD_CUDA_EXT=0 $(PIP) install --quiet --no-deps --no-build-isolation auto-gptq==0.7.1
	-$(PIP) install --quiet --no-deps --no-build-isolation autoawq==0.2.9
	touch $@

$(OLD_TRITON)/installed: $(VENV)/created
	$(PIP) install --quiet --no-deps --upgrade --target $(OLD_TRITON) triton==3.6.0
	touch $@

$(LMMS)/installed: $(VENV)/installed-dev
	$(PIP) install --quiet --no-deps --upgrade --target $(LMMS) --requirement tests/server/lmms/requirements.txt
	touch $@

$(DOCS)/installed: $(VENV)/installed
	@echo "Installing the builder of the site: some seconds, once."
	@mkdir -p $(DOCS)
	@$(PIP) install --quiet --no-deps --upgrade --target $(DOCS) --requirement docs/site/requirements.txt
	@touch $@

endif
