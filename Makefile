PYTHON ?= python3
.DEFAULT_GOAL := help

.venv/.dev: requirements/runtime.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/runtime.txt -r requirements/dev.txt
	.venv/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
