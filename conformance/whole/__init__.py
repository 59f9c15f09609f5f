"""Whole programs: statements of every kind in any order, and a model that says after each what everybody must see."""
