"""Supervised fine-tuning on recorded responses, under the masks that the engine will apply.

``views`` says what every token of a response saw, ``data`` reads examples and packs batches,
``cache`` computes a model under such a mask, ``step`` trains, ``run`` does all of it with files.
Needs ``pip install 'da-jax[train]'``.
"""
