# Each target does its own set-up in .venv: torch is pinned for reproducibility, the package itself accepts torch >= 2.10.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := $(shell find csrc include -type f) scripts/build_extensions.py setup.py pyproject.toml
PROMPT ?= What is the capital of France?
SECOND ?= What is the capital of Germany?

.PHONY: demo test lint bench claims fuzz clean

demo: $(STAMP)
	$(BIN)/pagedkv generate smollm2 --chat --max-tokens 48 --temperature 0 --draw -p "$(PROMPT)" -p "$(SECOND)"

test: $(STAMP) $(VENV)/.model
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal tests

lint: $(STAMP)
	scripts/lint.sh $(BIN)

bench: $(STAMP) $(VENV)/.model
	scripts/bench.sh $(BIN)

# Two processes, of 8 and 14 minutes on two cores that had other work too; each table says how long it took.
claims: $(STAMP) $(VENV)/.model
	PYTHONPATH=benchmarks OMP_NUM_THREADS=1 $(BIN)/python -m claims throughput --save & \
	PYTHONPATH=benchmarks OMP_NUM_THREADS=1 $(BIN)/python -m claims capacity waste block_size prefix sharing --save && wait $$!

fuzz: $(STAMP)
	PAGEDKV_FUZZ_CASES=2000 $(BIN)/python -m pytest tests/server/test_fuzz.py

clean:
	rm -rf build dist python/*.egg-info python/pagedkv/*.so $(VENV)

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install torch==2.13.0 numpy "setuptools>=77" wheel "pybind11>=3.0" ninja "cmake>=3.24"
	touch $@

$(STAMP): $(VENV)/.torch $(SOURCES)
	$(BIN)/python -m pip install --no-build-isolation --editable ".[test,lint]"
	touch $@

$(VENV)/.model: $(STAMP)
	$(BIN)/pagedkv fetch smollm2
	touch $@
