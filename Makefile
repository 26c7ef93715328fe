# Every command of the project; `make help` lists them. CI runs the same ones.
#
#   PYTHON=python3.12   another interpreter than python3 (3.11 or later)
#   DEVICE=cpu|cuda     another engine than the one that nvidia-smi suggests
#   ARGS="-k plan -x"   passed on to pytest

PYTHON ?= python3
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# Asked once: `?=` alone would run nvidia-smi for every use below.
DEVICE := $(DEVICE)
ifeq (,$(filter cpu cuda,$(DEVICE)))
$(error DEVICE is cpu or cuda, not "$(DEVICE)")
endif

# A stamp is written last, and rebuilding an environment deletes it first: what was interrupted
# has none and is made again. The device is in the name, so that changing it makes a new engine.
PRODUCT := .venv/.made
INSTALLED := .venv/.installed
ENGINE := .venv-engine/.made-$(DEVICE)
MODELS := .models/.made

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-deployed test-quick test-slow test-mutations test-containers check bench up lock
.PHONY: test-engines bench-gpu docs clean clean-containers test-newest test-lowest mutate-diff

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

# Side by side, which takes half as long: pip uses one core. `-j` of whoever called it goes before.
BESIDE = $(if $(filter -j%,$(MAKEFLAGS)),,-j2)

setup: ## both environments and the tiny models; nothing where they exist
	@$(MAKE) -s $(BESIDE) $(INSTALLED) $(ENGINE) $(MODELS)

demo: setup ## three small batches through the whole product, on real vLLM
	@.venv/bin/python examples/demo.py

test: setup ## the tests, side by side, but for those of test-deployed
	.venv/bin/pytest -n auto -m "not slow and not containers and not engines and not deployed" $(ARGS)

test-deployed: setup ## those of whole commands, real engines, deployed servers, machines, browsers
	.venv/bin/pytest -n auto -m "deployed and not slow and not containers and not engines" $(ARGS)

test-quick: setup ## those that start no server, in less than a minute
	.venv/bin/pytest -n auto -m "not slow and not containers and not alone" tests/test_architecture.py tests/unit $(ARGS)

test-slow: setup ## the long fault and scale tests
	.venv/bin/pytest -m slow $(ARGS)

test-engines: setup ## real servers of other makers, in environments that it downloads once (3 GB)
	.venv/bin/pytest -m engines tests/engines $(ARGS)

test-newest: $(INSTALLED) ## with the newest versions that pyproject.toml allows: unit tests, batches
	.venv/bin/python requirements/ends.py newest $(ARGS)

test-lowest: $(INSTALLED) ## the same with the lowest ones
	.venv/bin/python requirements/ends.py lowest $(ARGS)

test-mutations: setup ## the listed wrong changes of the product, one at a time: does a test notice?
	@.venv/bin/python -m tests.mutations $(ARGS)

mutate-diff: setup ## mutmut's wrong changes of what differs from main: which does no test notice?
	@.venv/bin/python -m tests.mutations.of_a_diff $(ARGS)

test-containers: $(INSTALLED) ## build the images and run the compose file; root, Debian, 15 GB, half an hour
	.venv/bin/pytest -m containers tests/containers $(ARGS)

check: setup ## format, lint, types, import contracts, tests: what a change must pass
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	@$(MAKE) -s test test-deployed

up: setup ## the API, Prefect's server and UI and both workers in the foreground, until Ctrl-C
	@.venv/bin/batchyard up $(ARGS)

bench: setup ## measure, and rewrite the tables of docs/benchmarks.md; about half an hour
	.venv/bin/python -m benchmarks

bench-gpu: $(INSTALLED) ## MODEL=path: measure a real model on a GPU, into docs/benchmarks-gpu.md
	@.venv/bin/python -m benchmarks.gpu "$(MODEL)" $(ARGS)

docs: $(INSTALLED) ## the reference pages, from the code, and the site of all pages in site/
	.venv/bin/python -m reference
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet -f infra/site/mkdocs.yml

lock: $(INSTALLED) ## resolve every pinned list anew (CONTRIBUTING.md)
	.venv/bin/python requirements/lock.py

clean: ## remove environments, tiny models and caches; your batches in .batchyard stay
	rm -rf .venv .venv-engine .models build dist site .hypothesis .*_cache
	find . -path ./.containers -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-containers: $(INSTALLED) ## remove the images, volumes and programs of test-containers
	@.venv/bin/python -m tests.containers.tools

$(PRODUCT): requirements/runtime.txt requirements/dev.txt
	@PYTHON="$(PYTHON)" infra/environment.sh product .venv
	@touch $@

# Apart from its environment, so that an edit of pyproject.toml costs two seconds, not a minute.
$(INSTALLED): $(PRODUCT) pyproject.toml
	@.venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(ENGINE): $(wildcard infra/engine/*-$(DEVICE).txt infra/engine/*-$(DEVICE).pth)
	@PYTHON="$(PYTHON)" infra/environment.sh engine-$(DEVICE) .venv-engine
	@touch $@

$(MODELS): infra/engine/make_tiny_models.py | $(ENGINE)
	@echo "tiny models: a few seconds"
	@rm -rf .models
	@.venv-engine/bin/python infra/engine/make_tiny_models.py .models
	@touch $@
