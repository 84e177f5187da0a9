# Two commands: `make demo` runs the main job, `make test` passes the tests. Both install what is missing into .venv.
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-slurm lint requirements clean

# The first interpreter that is Python 3.12; say so plainly if there is none.
PYTHON ?= $(shell for p in python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && command -v $$p && break; done)
UV_VERSION := 0.13.9
# nvidia-resiliency-ext has wheels for this glibc only; it runs on older ones too.
PLATFORM := --python-platform x86_64-manylinux_2_39
COMPILED := $(PLATFORM) --python-version 3.12 --no-header --no-annotate --no-emit-index-url --no-emit-find-links
BIN := .venv/bin

help:
	@echo "make demo   distil a real small model on this machine's CPU, about 10 minutes (ARGS=--quick: 3 to 4)"
	@echo "make test   run the tests (ARGS=tests/loss for a part)"
	@echo "make test-slow   run those that take minutes each: the quick demo, every recipe shrunk, the bench"
	@echo "make test-slurm   run the job scripts on a Slurm of two nodes that starts here; needs root and slurmd"
	@echo "make lint   ruff"
	@echo "make requirements   pin all of requirements/ anew"

.venv/ready: requirements/dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.12 is needed and no python3.12, python3 or python on PATH is one. Install it (pyenv install 3.12, or Debian's python3.12 and python3.12-venv), or set PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv==$(UV_VERSION)
	$(BIN)/uv pip install --python $(BIN)/python --no-deps $(PLATFORM) -r requirements/dev.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --editable .
	@touch $@

demo: .venv/ready
	$(BIN)/megatron-kd demo $(ARGS)

test: .venv/ready
	$(BIN)/python -m pytest $(ARGS)

test-slow: .venv/ready
	$(BIN)/python -m pytest -m slow $(ARGS)

test-slurm: .venv/ready
	$(BIN)/python -m pytest tests/slurm -m slurm $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

requirements:
	$(BIN)/uv pip compile pyproject.toml --extra dev $(COMPILED) --overrides requirements/overrides.txt \
		--constraint requirements/constraints.txt --output-file requirements/dev.txt
	$(BIN)/uv pip compile requirements/vllm_cpu.in $(COMPILED) --overrides requirements/constraints.txt \
		--output-file requirements/vllm_cpu.txt
	$(BIN)/uv pip compile requirements/nemo_run.in $(COMPILED) --output-file requirements/nemo_run.txt

clean:
	rm -rf .venv demo-run runs
