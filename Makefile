# run · test · check · setup: see README.md
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
NATIVE := $(shell find native -type f) pyproject.toml CMakeLists.txt constraints.txt
PYTHON_FILES := $(shell find src -name '*.py')

.PHONY: run test check setup format clean

run: .venv/core  ## complete a prompt with the real 135M weights
	$(BIN)/smollm2 run "The capital of France is" --echo --stop "\n"

test: .venv/dev  ## run all tests
	$(BIN)/python -m pytest

check: .venv/dev  ## format, lint, types, import contracts, C++ warnings as errors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(shell find native -name '*.cpp' -o -name '*.h')
	$(BIN)/cmake -S . -B build/check -G Ninja -DSMOLLM2_WERROR=ON -DCMAKE_BUILD_TYPE=Debug \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) --log-level=ERROR
	$(BIN)/cmake --build build/check

setup: .venv/dev  ## prepare .venv for development

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(shell find native -name '*.cpp' -o -name '*.h')

clean:
	rm -rf .venv build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/core: .venv/bin/python $(NATIVE) $(PYTHON_FILES)
	@echo "installing into .venv …"; $(PIP) .
	@touch $@

.venv/dev: .venv/bin/python $(NATIVE)
	@echo "installing into .venv …"; $(PIP) -e '.[dev]'
	@touch $@ .venv/core
