"""Recipes: small TOML files that say what differs from the defaults. Everything is checked before anything starts."""

from ttvd.bench.recipe.parts import RULES as RULES
from ttvd.bench.recipe.parts import Recipe as Recipe
from ttvd.bench.recipe.parts import Rule as Rule
from ttvd.bench.recipe.planning import plan as plan
from ttvd.bench.recipe.reader import parse_recipe as parse_recipe
from ttvd.bench.recipe.reader import read_recipe as read_recipe
