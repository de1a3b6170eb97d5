# Two commands matter: `make demo` and `make test`. Both make their own .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check lint types unit netns test-browser docs dist clean

demo: .venv/demo
	$(BIN)/growprune demo

test: check

check: lint types unit

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev
	$(BIN)/mypy

# Three at a time on two cores, as many wait for processes they have started; what is marked slow is part of it. What is
# compiled is kept, whatever the environment says: each of them, and what they start, imports all of it.
unit: .venv/dev
	files=$$(mktemp -d "$(or $(MEMORY),$${TMPDIR:-/tmp})/growprune.XXXXXX") && \
	TMPDIR=$$files PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadgroup && rm -rf "$$files"

# Tests write and sync files all the time, which is quicker where files are memory: if there is room, and what is built there can be run.
MEMORY := $(shell grep -qs ' /dev/shm .*noexec' /proc/mounts || \
	df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 { print "/dev/shm" }')

# The site, in site/; `make test` builds it too.
docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Hosts with their own addresses on this machine, cables pulled; needs root, so it is not part of `make test`.
netns: .venv/dev
	GROWPRUNE_NETNS=1 $(BIN)/pytest tests/engine/test_netns.py

# The page of `growprune report`, and the site, in a real browser. `make test` runs this too where there is a chromium; here Debian's is
# installed if there is none, which needs root.
test-browser: .venv/dev
	command -v chromium chromedriver || apt-get install --yes --no-install-recommends chromium chromium-driver
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs tests/test_report_browser.py tests/test_docs_browser.py

# The wheel and the source archive, in dist/, checked.
dist: .venv/dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation --quiet
	$(BIN)/twine check --strict dist/*

# The stamps depend on what decides the environment, so a changed pin reinstalls.
.venv/demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[digits]'
	touch $@

.venv/dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv/dist: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dist]'
	touch $@

clean:
	rm -rf .venv
