PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
READY := .venv/ready

.PHONY: pretrain test test-all lint clean

pretrain: $(READY)  ## the main job: the default recipe, end to end
	$(BIN)/lm train

test: $(READY)  ## the CPU suite without what is marked slow, in JOBS processes
	$(BIN)/python -m pytest -m "not slow" -n $(JOBS) --dist loadfile

test-all: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
