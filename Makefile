# make train   set up .venv and learn Pong         (make train ARGS="--preset pong-fast --seed 1")
# make test    set up .venv and run the tests      (make test ARGS="-k returns")
# make lint    ruff and mypy                       (make format to let ruff change the files)
# make tables  write README.md's tables and the learning curve from the files in results/
# make docs    build the documentation site in site/ (make docs ARGS="-d /tmp/site")
# make ci      what every change must pass: a new .venv, all tests but soak, lint, a short training
PYTHON ?= python3
ARGS ?=

.PHONY: train test lint format tables docs ci clean

train: .venv/installed
	.venv/bin/python train.py $(ARGS)

test: .venv/installed
	.venv/bin/python -m pytest $(ARGS)

lint: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/installed
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

tables: .venv/installed
	.venv/bin/python benchmarks/tables.py

docs: .venv/docs
	.venv/bin/mkdocs build --strict $(ARGS)

ci:
	.ci/run

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

.venv/docs: .venv/installed
	.venv/bin/python -m pip install -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf .venv
