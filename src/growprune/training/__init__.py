"""The main entry point: the arguments of a sparse training, and `sparsify`, which applies them in your own loop.

The same arguments work in your own loop (sparsifier.py), in transformers and Lightning (integrations/) and in a recipe
(engine/recipe.py).
"""
