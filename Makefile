# Two commands do everything: `make demo` and `make test`. See README.md.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
HOME_FOLDER ?= .gpucost
# Of the rehearsal cloud; for example: make up MARKET=include/market/small.json SPEED=60
MARKET ?=
SPEED ?=
REHEARSAL = $(if $(MARKET),--market "$(MARKET)") $(if $(SPEED),--speed "$(SPEED)")
export PYTHONPATH := $(CURDIR):$(CURDIR)/plugins

.PHONY: demo up down status gpucost test lint clean

demo: $(VENV)/runtime
	@$(BIN)/python -m demo run --home "$(HOME_FOLDER)" $(REHEARSAL)

up: $(VENV)/runtime
	@$(BIN)/python -m demo up --home "$(HOME_FOLDER)" $(REHEARSAL)

down:
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m demo down --home "$(HOME_FOLDER)"; fi

status: $(VENV)/runtime
	@$(BIN)/python -m demo status --home "$(HOME_FOLDER)"

# For example: make gpucost ARGS="reap --dry-run"
gpucost: $(VENV)/runtime
	@$(BIN)/python -m demo cli --home "$(HOME_FOLDER)" $(ARGS)

test: lint
	$(BIN)/python -m pytest tests/unit
	$(BIN)/python -m pytest tests/system

lint: $(VENV)/development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: down
	rm -rf $(VENV) "$(HOME_FOLDER)"

# A stamp per set of requirements: the second `make demo` installs nothing.
$(VENV)/runtime: requirements.txt constraints.txt scripts/make_venv
	@scripts/make_venv "$(PYTHON)" $(VENV) requirements.txt
	@touch $@

$(VENV)/development: requirements-dev.txt $(VENV)/runtime
	@scripts/make_venv "$(PYTHON)" $(VENV) requirements-dev.txt
	@touch $@
