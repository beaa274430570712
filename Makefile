# Formatter, linter, types and tests; the same in pre-commit and CI.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
export ALMA_EXTRAS ?= test,report,sample,develop
ENVIRONMENT := source recipes/lib/environment.sh

.PHONY: check lint format test

check: lint test ## all checks that a change must pass

lint: ## formatter, linter and types, in seconds
	@$(ENVIRONMENT); ruff format --check . && ruff check . && mypy

format: ## format the code and apply the linter's fixes
	@$(ENVIRONMENT); ruff format . && ruff check --fix .

test: ## options for pytest: make test PYTEST='-k capacity'
	@bash tests/run.sh $(PYTEST)
