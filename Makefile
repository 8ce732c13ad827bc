# run · test · check · setup: see README.md
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
NATIVE := $(shell find native -type f) pyproject.toml CMakeLists.txt constraints.txt
PYTHON_FILES := $(shell find src -name '*.py')

.PHONY: run test check test-native sanitize fuzz check-arm setup format clean

# smollm2_tests: the C++ code without Python. avxvnni runs on CPUs with AVX-512 in their encoding.
EVEX := $(shell grep -q avx512_vnni /proc/cpuinfo 2>/dev/null && echo ON || echo OFF)
NATIVE_TESTS = $(BIN)/cmake -S . -G Ninja --log-level=ERROR -DSMOLLM2_EXTENSION=OFF \
  -DSMOLLM2_NATIVE_TESTS=ON -DSMOLLM2_WERROR=ON -DSMOLLM2_EVEX_VNNI=$(EVEX)
ARM_CXX ?= $(firstword $(shell which aarch64-linux-gnu-g++ aarch64-linux-gnu-g++-12 2>/dev/null))
QEMU ?= $(firstword $(shell which qemu-aarch64 qemu-aarch64-static 2>/dev/null))

run: .venv/core  ## complete a prompt with the real 135M weights
	$(BIN)/smollm2 run "The capital of France is" --echo --stop "\n"

# Side by side, on one thread each, but for those that time, interrupt or watch what runs.
ALONE := $(addprefix tests/test_,$(addsuffix .py,native_threads native_interrupts native_memory \
  startup interface bench cli_measure cli_chat cli_terminal cli_screen registry_processes))
test: test-native  ## run all tests
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile \
	  $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)

check: .venv/dev  ## format, lint, types, import contracts, C++ warnings as errors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.inl')
	$(BIN)/cmake -S . -B build/check -G Ninja -DSMOLLM2_WERROR=ON -DCMAKE_BUILD_TYPE=Debug \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) --log-level=ERROR
	$(BIN)/cmake --build build/check

test-native: .venv/dev  ## every instruction set of this CPU against the plain C++
	$(NATIVE_TESTS) -B build/native -DCMAKE_BUILD_TYPE=Release
	$(BIN)/cmake --build build/native
	build/native/smollm2_tests

# `undefined` does not look at floats that no integer holds.
SANITIZE := address,undefined,float-cast-overflow
sanitize: .venv/dev  ## the same under the address, undefined behaviour and thread sanitizers
	for kind in $(SANITIZE) thread; do \
	  $(NATIVE_TESTS) -B build/$$kind -DCMAKE_BUILD_TYPE=Debug -DSMOLLM2_SANITIZE=$$kind && \
	  $(BIN)/cmake --build build/$$kind && build/$$kind/smollm2_tests || exit 1; \
	done

# -S: without it the editable installation would come before build/fuzz.
fuzz: .venv/dev  ## 10,000 broken files, with an extension under the first two of these
	$(PIP) --no-deps --upgrade --target build/fuzz . -C build-dir=build/fuzz-cmake \
	  -C cmake.build-type=Debug -C cmake.define.SMOLLM2_SANITIZE=$(SANITIZE)
	SMOLLM2_FUZZ=10000 ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$(foreach name,asan ubsan,$(shell $(CXX) -print-file-name=lib$(name).so))" \
	  PYTHONPATH=build/fuzz:$$($(BIN)/python -c "import site; print(site.getsitepackages()[0])") \
	  $(BIN)/python -S -m pytest tests/test_fuzz.py

check-arm: .venv/dev  ## the same for AArch64 in an emulator: NEON, with SDOT, with USDOT
	@test -n "$(ARM_CXX)" -a -n "$(QEMU)" || { echo "check-arm needs a cross compiler and QEMU:" \
	  "apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	$(NATIVE_TESTS) -B build/arm -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
	  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(ARM_CXX) \
	  -DCMAKE_EXE_LINKER_FLAGS=-static
	$(BIN)/cmake --build build/arm
	$(QEMU) -cpu max build/arm/smollm2_tests
	$(QEMU) -cpu cortex-a53 build/arm/smollm2_tests dispatch

setup: .venv/dev  ## prepare .venv for development

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.inl')

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
