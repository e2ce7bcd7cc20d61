"""Many training runs: sweeps over recipes, overrides, seeds and folds, and the paper's tables."""
