# make run     the whole product on 127.0.0.1:8501 (CONFIG=, SOURCE=, ARGS= for `framechat up`)
# make test    unit, component, integration and browser tests (ARGS= for pytest; REPORT= a folder for JUnit files)
# make check   lint, format, types
# make setup   only the environments that CONFIG needs: .venv (app) and .venv-vllm (model server)
# make lock    resolve requirements/*.lock anew; UPGRADE=1 takes the newest versions
# make clean   remove the environments and what tools leave; keeps data/, runs/ and the model cache

PYTHON ?= python3
CONFIG ?= configs/sample.yaml
SOURCE ?=
REPORT ?=
ARGS ?=
UPGRADE ?=

APP := .venv/bin
# Asked in words that every Python reads.
SUPPORTED = import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 14) else "setup: Python %d.%d is \
not supported, allowed: 3.11 to 3.14; name another with make PYTHON=python3.12 ..." % v)
SETUP = $(PYTHON) -c '$(SUPPORTED)' && $(PYTHON) requirements/install.py
CODE := pipeline serving ui samples tests requirements

.DEFAULT_GOAL := help
.PHONY: help setup run test check lock clean

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

setup:
	@$(SETUP) --config '$(CONFIG)'

# The arguments are handed over in the environment, for they may hold quotes.
run: export FRAMECHAT_ARGUMENTS = $(ARGS)
run:
	@$(SETUP) --config '$(CONFIG)' --to-run
	@$(APP)/framechat up --config '$(CONFIG)' $(if $(SOURCE),--source '$(SOURCE)') $(ARGS)

test:
	@$(SETUP) --config configs/sample.yaml --to-test
	$(APP)/python -m pytest tests/unit -n auto $(if $(REPORT),--junitxml=$(REPORT)/unit.xml) $(ARGS)
	$(APP)/python -m pytest tests/component -n 3 $(if $(REPORT),--junitxml=$(REPORT)/component.xml) $(ARGS)
	$(APP)/python -m pytest tests/integration tests/browser $(if $(REPORT),--junitxml=$(REPORT)/real.xml) $(ARGS)

check:
	@$(SETUP) --app-only
	$(APP)/ruff check $(CODE)
	$(APP)/ruff format --check $(CODE)
	$(APP)/mypy
	$(APP)/mypy requirements/install.py

LOCK = build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --custom-compile-command 'make lock' $(if $(UPGRADE),--upgrade)

lock:
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
	$(LOCK) --excludes requirements/app-cpu.excludes --extra dev -o requirements/app-cpu.lock \
		pyproject.toml requirements/torch.in
	$(LOCK) --extra dev -o requirements/app-gpu.lock pyproject.toml
	$(LOCK) --excludes requirements/server-cpu.excludes -o requirements/server-cpu.lock \
		requirements/server-cpu.in requirements/torch.in
	$(LOCK) --excludes requirements/server-gpu.excludes -o requirements/server-gpu.lock requirements/server-gpu.in

clean:
	rm -rf .venv .venv-vllm build .mypy_cache .ruff_cache .pytest_cache .hypothesis framechat.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
