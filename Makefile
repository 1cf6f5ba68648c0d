PYTHON ?= python3
# tests side by side: one for each core, 8 at most, since each takes 1.5 GB
JOBS ?= $(shell n=$$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
# TORCH=cpu, cu128, ...: the build of torch, by its name on download.pytorch.org; empty: the one that pip finds
TORCH ?=
BIN := .venv/bin
PIP = $(BIN)/python -m pip install -c constraints.txt $(if $(TORCH),--extra-index-url https://download.pytorch.org/whl/$(TORCH))

.PHONY: pretrain test test-all test-gpu lint docs keys findings clean

pretrain: .venv/ready  ## the main job: the default recipe, end to end
	$(BIN)/lm train

test: export CUDA_VISIBLE_DEVICES =
test: .venv/dev-ready  ## the CPU suite without what is marked slow, in JOBS processes
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist worksteal

test-all: export CUDA_VISIBLE_DEVICES =
test-all: .venv/dev-ready
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-gpu: .venv/dev-ready  ## what needs a GPU
	$(BIN)/python -m pytest tests/gpu

lint: .venv/dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/dev-ready  ## the site, in site/; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

keys: .venv/dev-ready  ## the list of keys that mistyped ones are told by, after a change of a config class
	$(BIN)/python -m tools.keys

findings: .venv/ready  ## the studies of docs/findings.md, a night on two cores; killed anywhere, it goes on
	$(BIN)/python -m tools.findings

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("PYTHON: $(PYTHON) is Python %d.%d, and 3.11 or newer is needed. Name one, as in make PYTHON=python3.12." \
	  % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Installing what running needs into .venv: torch, lightning, hydra, pydantic, tokenizers, datasets, matplotlib and theirs."
	@echo "On Linux pip's torch brings CUDA along; make pretrain TORCH=cpu takes the build without it."
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/dev-ready: .venv/ready
	@echo "Installing what developing needs as well: pytest, ruff, mypy, transformers, deepspeed, tensorboard, tiktoken, mkdocs and theirs."
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv site .mypy_cache .pytest_cache .ruff_cache
