"""Recipes, data and training: what `epitorch train` and `epitorch demo` run. Needs the extra `train`."""
