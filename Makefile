# shardwright: every piece of set-up hangs on these targets; `make` alone lists them.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TYPING := build/typing/shardwright

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help convert reshard train test check test-interop bench typing clean soak bench-load bench-start bench-reshard bench-sync ffcv

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

# Made once, and anew when the pins change. The command is then .venv/bin/shardwright.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "shardwright needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# `run COMMAND...`: its exit code. SIGTERM comes to this shell alone: it is handed on, and the end waited for. A command
# in the background would not hear Ctrl-C, but for the trap.
define RUN
run() { (trap - INT; exec "$$@") & local child=$$!; trap "kill -TERM $$child" TERM; trap : INT; \
	  while kill -0 $$child 2>/dev/null; do wait $$child; done; wait $$child; }
endef

# SRC and OUT go through the environment, as they were typed: spaces, quotes and dollars are safe. Make itself
# would hand them on expanded.
unexport SRC OUT
convert: export SHARDWRIGHT_MAKE_SRC = $(value SRC)
convert: export SHARDWRIGHT_MAKE_OUT = $(value OUT)
convert: $(READY) ## Convert SRC="a folder" to OUT=...; without SRC, a sample tree drawn into build/sample
ifeq ($(value SRC),)
	$(BIN)/python -P examples/draw_sample.py build/sample
	@out="$${SHARDWRIGHT_MAKE_OUT:-build/shards}"; \
	$(BIN)/shardwright convert build/sample "$$out" && out=$$(printf %q "$$out") && \
	printf '%s\n' '' 'Next:' \
	  "  $(BIN)/shardwright info $$out             what is in it" \
	  "  $(BIN)/python -P examples/train.py $$out  train a small CNN from it" \
	  '  make convert SRC="your folder" OUT="your shards"'
else
	@if [ -z "$$SHARDWRIGHT_MAKE_OUT" ]; then echo 'make convert: say where to write: OUT="a folder"' >&2; exit 2; fi; \
	$(RUN); run $(BIN)/shardwright convert "$$SHARDWRIGHT_MAKE_SRC" "$$SHARDWRIGHT_MAKE_OUT" || { code=$$?; \
	  [ $$code -eq 3 ] || exit $$code; \
	  echo 'make convert: done, but some pictures were rejected: see above' >&2; }
endif

# ARGS are further options, as in a shell. Make's own exit code is 2 for whatever fails: so 5, out of time, is none of it.
unexport ARGS
reshard: export SHARDWRIGHT_MAKE_SRC = $(value SRC)
reshard: export SHARDWRIGHT_MAKE_OUT = $(value OUT)
reshard: $(READY) ## Lay the data set SRC out anew, in OUT or as its next version; ARGS="--chunk-rows 64"
	@if [ -z "$$SHARDWRIGHT_MAKE_SRC" ]; then echo 'make reshard: say which data set: SRC="a folder"' >&2; exit 2; fi; \
	$(RUN); \
	run $(BIN)/shardwright reshard "$$SHARDWRIGHT_MAKE_SRC" $${SHARDWRIGHT_MAKE_OUT:+"$$SHARDWRIGHT_MAKE_OUT"} $(ARGS) || { \
	  code=$$?; case $$code in \
	    3) echo 'make reshard: done, with a warning: see above' >&2;; \
	    5) echo 'make reshard: not finished, its time is over: the same command goes on' >&2;; \
	    *) exit $$code;; \
	  esac; }

train: export SHARDWRIGHT_MAKE_OUT = $(value OUT)
train: convert ## Convert, then train the example on the result
	$(BIN)/python -P examples/train.py "$${SHARDWRIGHT_MAKE_OUT:-build/shards}"

test: $(READY) ## Run the tests
	$(BIN)/pytest -m 'not interop'

check: $(READY) typing ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/typing $(BIN)/mypy -p shardwright
	MYPYPATH=build/typing:benchmarks $(BIN)/mypy examples benchmarks

# Type checkers do not follow the import hook of an editable install: a folder of links shows them the house.
typing:
	@mkdir -p $(TYPING)
	@ln -sfn $(CURDIR)/shardwright/*.py $(CURDIR)/shardwright/py.typed $(TYPING)/
	@for room in convert datasets loaders; do ln -sfn $(CURDIR)/$$room $(TYPING)/$$room; done

test-interop: $(READY) ## Other readers on our shards, training frameworks over our loader; in environments of their own
	$(BIN)/pytest -m interop --timeout 900

soak: $(READY) ## Thousands of damaged files, and thousands of kills; takes more than an hour
	$(BIN)/pytest tests/test_fuzz.py --hypothesis-profile soak --timeout 7200
	$(BIN)/pytest tests/test_resume.py tests/test_gc.py tests/test_repair.py tests/test_reshard.py tests/test_export.py tests/test_sync_faults.py -k random_instants --kills 500 --timeout 7200

bench-load: $(READY) ## Measure the loader against bare reads, h5py, and FFCV after `make ffcv`
	$(BIN)/python benchmarks/load.py

bench-start: $(READY) ## Measure the first batch of 1.28 million rows in 1,000 shards
	$(BIN)/python -P benchmarks/start.py

bench-reshard: $(READY) ## Measure re-sharding against copying and hashing the same bytes
	$(BIN)/python -P benchmarks/reshard.py

bench-sync: $(READY) ## Measure sync by how much of a tree changed, and reading with dead rows
	$(BIN)/python benchmarks/sync.py

ffcv: ## FFCV in an environment of its own, for bench-load
	benchmarks/ffcv_environment.sh build/ffcv

bench: $(READY) ## Measure the conversion against decoding alone
	$(BIN)/python -P benchmarks/convert.py

clean: ## Remove what these targets made: .venv, build and shardwright.egg-info
	rm -rf $(VENV) build shardwright.egg-info
