# make train   set up and learn Pong          (make train ARGS="--cuda --seed 1")
# make test    set up and pass the tests      (make test ARGS="-k returns")
PYTHON ?= python3
ARGS ?=

.PHONY: train test clean

train: .venv/installed
	.venv/bin/python train.py $(ARGS)

test: .venv/installed
	.venv/bin/python -m pytest $(ARGS)

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv
